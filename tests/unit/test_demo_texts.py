"""The documents of the demo: what they are, and how a user's own text is read."""

import os
from pathlib import Path

import pytest

from kvmoor.demo.documents import built_in_documents, parse_document, read_own_document
from kvmoor.errors import RequestError

_DOCUMENT = (
    "Title: T\nAuthor: A (1800-1850)\nYear: 1840\nPassage: all\nQuestion: Why?\n\nOne line\nand the next.\n\nEnd.\n"
)


def test_built_in_documents_are_three_of_comparable_length() -> None:
    """Each of the three texts has 1,100 to 1,300 words, which is about 1,500 tokens."""
    lengths = [len(document.text.split()) for document in built_in_documents()]
    assert 3 == len(lengths)
    assert all(1100 <= length <= 1300 for length in lengths), lengths


def test_built_in_documents_are_in_the_public_domain() -> None:
    """Each text was published before 1929, and its header says when its author died: more than seventy years ago."""
    for document in built_in_documents():
        year_of_death = int(document.author.rstrip(")")[-4:])
        assert int(document.year) < 1929
        assert year_of_death < 1950, document.author


def test_built_in_documents_are_plain_text() -> None:
    """The texts keep to ASCII and to paragraphs of one line, so that they look alike to every tokenizer."""
    for document in built_in_documents():
        assert document.text.isascii()
        assert all(line and line == line.strip() for line in document.text.split("\n\n"))


def test_prompt_puts_the_text_before_the_question() -> None:
    """A prompt begins with the text, so that two questions about one text share their prefix."""
    document = parse_document(_DOCUMENT)
    assert "One line and the next.\n\nEnd." == document.text
    assert "One line and the next.\n\nEnd.\n\nWhy?" == document.prompt


def test_parsing_refuses_another_header() -> None:
    """A text without all header fields is refused, by naming those that were found."""
    with pytest.raises(RequestError, match=r"\['Title', 'Year'\]"):
        parse_document("Title: T\nYear: 1840\n\ntext")


def test_own_document_is_the_whole_file(tmp_path: Path) -> None:
    """A user's file is asked as it is, without a question added."""
    path = tmp_path / "mine.txt"
    path.write_text("  Ein Text über Wale.\nWas ist ein Wal?\n", encoding="utf-8")
    document = read_own_document(path)
    assert "Ein Text über Wale.\nWas ist ein Wal?" == document.prompt
    assert "mine.txt" == document.title


def test_own_document_refuses_what_cannot_be_asked(tmp_path: Path) -> None:
    """A missing file, a folder, a pipe, an endless device, an empty file, no text and a huge file get a clear error."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "huge.txt").write_bytes(b"x" * 1_000_001)
    for name, complaint in [
        ("missing.txt", "No such file"),
        (".", "not a plain file"),
        ("pipe", "not a plain file"),
        ("/dev/zero", "not a plain file"),
        ("empty.txt", "is empty"),
        ("latin.txt", "not text in UTF-8"),
        ("huge.txt", "more than 1000000 bytes, too long"),
    ]:
        with pytest.raises(RequestError, match=complaint):
            read_own_document(tmp_path / name)
