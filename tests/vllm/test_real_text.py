"""A trained model through vLLM: what it says of a document does not depend on where the document's blocks were."""

from pathlib import Path

import pytest

from kvmoor.demo.model import MODEL_NAME, PACKAGE, ModelPackage, is_whole

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def found(run_script):
    """Return the answers of `MODEL_NAME`, as ``kvmoor demo`` has converted and kept it."""
    model = ModelPackage(Path(), PACKAGE.rpartition("==")[2]).converted
    if not is_whole(model):
        pytest.skip(f"{MODEL_NAME} is not in {model}: run `make demo` once, which converts it")
    return run_script("real_text.py", str(model), timeout_s=900.0)


def test_the_same_is_said_with_and_without_offloading(found) -> None:
    """Greedy answers in float32 about three documents, asked twice, are equal token by token."""
    assert found["off"]["answers"] == found["connector"]["answers"]
    assert "Ishmael" in found["off"]["texts"][0]  # of Moby-Dick, and not of weights that were not read


def test_documents_come_back_from_host_memory(found) -> None:
    """A device for one document has to compute each again without offloading, and loads all but its end with it."""
    wanted = [(num_tokens - 1) // 32 * 32 for num_tokens in found["num_tokens"]]

    assert all(1500 < num_tokens < 1600 for num_tokens in found["num_tokens"])
    assert wanted == found["connector"]["cached"][3:]
    assert all(cached < 400 for cached in found["off"]["cached"])
