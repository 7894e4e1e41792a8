"""A vLLM that is not what the plugin was written for is refused at start, by name."""

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("name", "missing vllm.v1.kv_offload.base.PrepareStoreOutput"),
        ("method", "missing OffloadingManager.reset_cache"),
        ("parameter", "missing parameter transfer_size of TransferResult, parameter transfer_time of TransferResult"),
        ("version", "tested with vLLM 0.30 to 0.33, found 0.99.1: install a tested version"),
    ],
)
def test_what_is_missing_is_named(run_script, fault, message) -> None:
    """The message says what was tested, what was found and what is missing, before any engine starts."""
    assert message in run_script("compatibility_faults.py", fault)


def test_this_version_lacks_nothing(run_script) -> None:
    """The version under test is served."""
    assert "" == run_script("compatibility_faults.py", "nothing")
