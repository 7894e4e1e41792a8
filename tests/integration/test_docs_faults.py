"""The table of faults names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(?P<path>tests/[^`\s]+\.py)`: (?P<tests>`test_\w+`(?:, `test_\w+`)*)")
KINDS = re.compile(r"^\| (B\d\d): ", re.MULTILINE)


def test_every_test_in_the_table_of_faults_exists() -> None:
    """Each test that docs/faults.md names is defined in the file it names."""
    text = (ROOT / "docs" / "faults.md").read_text()
    named = [
        (match["path"], test) for match in NAMED.finditer(text) for test in re.findall(r"test_\w+", match["tests"])
    ]
    missing = [(path, test) for path, test in named if f"def {test}(" not in (ROOT / path).read_text()]
    assert [] == missing
    assert len(named) == len(re.findall(r"`test_\w+`", text))


def test_the_table_of_faults_is_complete() -> None:
    """It has a row for every kind of fault that can be shown, in order."""
    kinds = KINDS.findall((ROOT / "docs" / "faults.md").read_text())
    opening = [*range(1, 12), 13, 14, 15, 16]
    closing = [17, 18, 19, 21, 23, 24]
    ordering = [25, 26]
    keeping = [28, 32, 35, 36, 37, 40, 41, 42, 44]
    assert [f"B{number:02}" for number in opening + closing + ordering + keeping] == kinds


def test_the_table_of_faults_leaves_nothing_open() -> None:
    """Nothing in it is still to be done, and each row names a test or says that none shows it."""
    text = (ROOT / "docs" / "faults.md").read_text()
    assert "TODO" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [line for line in lines if not line.startswith("|---") and not line.endswith(" tests |")]
    assert len(rows) > len(KINDS.findall(text))
    assert [] == [row for row in rows if not NAMED.search(row) and "not shown" not in row]
