"""The texts that the demo asks about: three that come with kvmoor, and the user's own."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from kvmoor.errors import RequestError

_TEXT_NAMES: Final = ("moby-dick.txt", "alice-in-wonderland.txt", "origin-of-species.txt")
_FIELDS: Final = ("Title", "Author", "Year", "Passage", "Question")
_MAX_PROMPT_NBYTES: Final = 1_000_000
"""No text of this size fits the model; more is not even read."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a question about it; a user's own text has its question inside, or none."""

    title: str
    author: str
    year: str
    text: str
    question: str

    @property
    def prompt(self) -> str:
        """Return what the model is asked: the text first, so that another question about it finds the same prefix."""
        return f"{self.text}\n\n{self.question}" if self.question else self.text


def built_in_documents() -> list[Document]:
    """Return the three documents that come with kvmoor."""
    folder = files("kvmoor.demo") / "texts"
    return [parse_document((folder / name).read_text(encoding="utf-8")) for name in _TEXT_NAMES]


def parse_document(source: str) -> Document:
    """Read a text file of the demo: a header of ``Name: value`` lines, an empty line, and the text in paragraphs."""
    header, _, body = source.partition("\n\n")
    fields = dict(line.split(": ", 1) for line in header.splitlines())
    if tuple(fields) != _FIELDS:
        raise RequestError(
            f"the header of a demo text has the fields {list(fields)}: give {list(_FIELDS)}, in this order"
        )
    paragraphs = [" ".join(paragraph.split()) for paragraph in body.split("\n\n")]
    return Document(fields["Title"], fields["Author"], fields["Year"], "\n\n".join(paragraphs), fields["Question"])


def read_own_document(path: Path) -> Document:
    """Read a user's own prompt. Raises `RequestError` for a file that cannot be used, and says why."""
    try:
        if not path.is_file():
            # A pipe or a device may have no end; a missing file raises what the system says.
            path.stat()
            raise RequestError(f"the prompt file {path} is not a plain file: give a text file")
        with path.open("rb") as file:
            content = file.read(_MAX_PROMPT_NBYTES + 1)
        if len(content) > _MAX_PROMPT_NBYTES:
            raise RequestError(
                f"the prompt file {path} has more than {_MAX_PROMPT_NBYTES} bytes, too long for the model: "
                "give a few thousand words"
            )
        text = content.decode().strip()
    except OSError as error:
        raise RequestError(f"the prompt file {path} cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt file {path} is not text in UTF-8 ({error.reason}): convert it") from error
    if not text:
        raise RequestError(f"the prompt file {path} is empty: write the text and a question into it")
    return Document(path.name, "you", "", text, "")
