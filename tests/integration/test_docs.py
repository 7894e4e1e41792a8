"""The docs are true: their examples run, their links lead somewhere, and their tables are complete."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from kvmoor import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")
SOURCE = re.compile(r"`(?P<path>(?:src|tests|benchmarks|docs|requirements)/[^`\s*]+)`")


def page_id(page):
    return str(page.relative_to(ROOT))


def examples(page):
    """Yield the code of each Python block, at its line of the page, and the modules that its first line asks for.

    A block that opens with "```python torch" needs torch.
    """
    text = page.read_text()
    for fence in FENCE.finditer(text):
        language, *modules = fence["info"].split() or [""]
        if language == "python":
            line = text.count("\n", 0, fence.start("code"))
            yield "\n" * line + fence["code"], modules


def anchors(page):
    """Return the anchors of a page's headings, as hosts of Markdown make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if list(examples(page))], ids=page_id)
def test_the_examples_of_a_page_run(page, monkeypatch, tmp_path):
    """All Python blocks of a page run in order, as one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, modules in examples(page):
        for module in modules:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"the rest of {page_id(page)} needs {module}")
        exec(compile(code, str(page), "exec"), namespace)


def test_there_are_examples():
    """The search for examples finds those of the README and of the quickstart."""
    pages = {page_id(page) for page in PAGES if list(examples(page))}
    assert {"README.md", "docs/quickstart.md"} <= pages


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    """Each link to a file, and to a heading of one, leads to something that exists."""
    broken = []
    for link in LINK.finditer(FENCE.sub("", page.read_text())):
        path, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue  # another site; tests need no network
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link["target"])
    assert [] == broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page):
    """A page that names a file of the source tree names one that is there."""
    paths = {match["path"].rstrip("/") for match in SOURCE.finditer(page.read_text())}
    assert [] == sorted(path for path in paths if not (ROOT / path).exists())


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_that_are_named_exist(page):
    """A page that says `make something` names a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert set() == named - targets


def test_the_error_page_lists_every_error():
    """docs/errors.md says of each exception what to do, and names none that does not exist."""
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    rows = re.findall(r"^\| `(\w+Error)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert classes - {"KvmoorError"} == set(rows)
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("drawing", [errors.__doc__, (ROOT / "docs/errors.md").read_text()], ids=["module", "page"])
def test_the_error_tree_is_drawn_as_it_is(drawing):
    """The tree in the module docstring and the one on the error page have the shape of the classes."""
    actual = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__bases__[0] is not Exception
    }
    path, drawn = ["KvmoorError"], {}
    for indent, name in re.findall(r"^ *((?:[|] {3})*)[+]-- (\w+)", drawing, re.MULTILINE):
        depth = len(indent) // 4 + 1
        drawn[name] = path[depth - 1]
        path[depth:] = [name]
    assert actual == drawn
