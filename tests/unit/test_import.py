"""What importing the package costs, what it offers, and the rules of the tree that no linter knows."""

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvmoor

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
DRAWERS = {"base", "common", "helpers", "misc", "utils"}
HEAVY = {"blake3", "cuda", "numpy", "rich", "torch", "transformers", "typer", "vllm", "xxhash"}


def modules_after(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter and return the top-level packages it loaded."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False
    )
    assert 0 == run.returncode, run.stderr
    return {name.split(".")[0] for name in json.loads(run.stdout)}


def test_importing_the_package_loads_nothing_that_is_not_used():
    """`import kvmoor` alone loads no GPU code, no array library and no command line."""
    assert set() == modules_after("import kvmoor") & HEAVY


def test_importing_the_whole_core_loads_no_model_library():
    """The facade, and so everything it needs, loads neither torch nor transformers, CUDA, vLLM or the command line."""
    loaded = modules_after("from kvmoor import Offloader, CpuDevice, BlockLayout")
    assert set() == loaded & {"cuda", "rich", "torch", "transformers", "typer", "vllm"}


def test_importing_the_command_line_loads_no_model_library():
    """`kvmoor --help` does not pay for torch."""
    assert set() == modules_after("import kvmoor.cli.main") & {"cuda", "torch", "transformers", "vllm"}


@pytest.mark.parametrize("name", kvmoor.__all__)
def test_every_public_name_resolves(name):
    """What `__all__` names exists, is listed, and comes from this package."""
    value = getattr(kvmoor, name)
    assert name in dir(kvmoor)
    assert getattr(value, "__module__", "kvmoor").startswith("kvmoor")


def test_an_unknown_name_is_an_attribute_error():
    """A misspelt name fails as it does in any module."""
    with pytest.raises(AttributeError, match="Offlader"):
        kvmoor.Offlader  # noqa: B018


def test_types_see_what_importers_get():
    """The imports for type checkers and the table of lazily loaded names are the same set."""
    tree = ast.parse((ROOT / "src/kvmoor/__init__.py").read_text())
    for_types = {
        alias.asname or alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert kvmoor._HOMES == for_types


def test_the_wheel_ships_the_texts_and_no_tests():
    """An installed kvmoor has what the demo reads and the typing marker, and nothing outside its package."""
    try:
        files = importlib.metadata.files("kvmoor")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kvmoor is imported from its sources: there is no wheel to look into")
    names = {str(file) for file in files or ()}
    texts = {f"kvmoor/demo/texts/{path.name}" for path in (ROOT / "src/kvmoor/demo/texts").glob("*.txt")}
    assert texts
    assert texts | {"kvmoor/py.typed"} <= names
    assert {"kvmoor", f"kvmoor-{kvmoor.__version__}.dist-info"} >= {
        name.split("/")[0] for name in names if not name.startswith("..")
    }


def test_source_files_stay_short_and_have_names():
    """No file of the package grows past the length at which to look for its second idea, or is a drawer."""
    lengths = {
        file.relative_to(ROOT): len(file.read_text().splitlines()) for file in sorted((ROOT / "src").rglob("*.py"))
    }
    assert lengths
    assert {} == {str(file): lines for file, lines in lengths.items() if lines > MAX_LINES}
    names = {file: {part.strip("_") for part in file.with_suffix("").parts} for file in lengths}
    assert [] == [str(file) for file, parts in names.items() if DRAWERS & parts]


def test_every_test_says_what_it_promises():
    """Each test has a docstring: one sentence that says what holds."""
    silent = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and ast.get_docstring(node) is None
    ]
    assert [] == silent


def test_the_import_benchmark_runs(capsys, monkeypatch):
    """The benchmark of the import time works, in its smallest form."""
    path = ROOT / "benchmarks/import_time.py"
    monkeypatch.syspath_prepend(path.parent)  # as for a script
    spec = importlib.util.spec_from_file_location("import_time", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.main(["--runs", "1"])
    assert "import kvmoor" in capsys.readouterr().out
