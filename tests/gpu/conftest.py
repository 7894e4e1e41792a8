"""Tests that need a CUDA device and torch: `pytest -m gpu`. They skip, with the reason, where one is missing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import leak_check
from gpu_child import run_gpu_child
from gpu_rig import Gpu, why_no_gpu

DRIVERS_OWN = ("/dev/nvidia", "anon_inode:", "socket:", "pipe:", "/dev/shm", "/proc/")
"""What the driver keeps open from the first use of something until the process ends."""


@pytest.fixture(scope="session")
def needs_gpu() -> None:
    """Skip where there is no GPU, without opening one: for tests whose children open it."""
    if reason := why_no_gpu():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def opened_gpu(needs_gpu: None) -> Gpu:
    return Gpu()


@pytest.fixture
def gpu(opened_gpu: Gpu) -> Iterator[Gpu]:
    """Give the GPU, with all its page-locked memory free."""
    opened_gpu.forget_host_memory()
    yield opened_gpu
    assert opened_gpu.driver.broken == "", "the test broke the context for all tests behind it"


@pytest.fixture
def run_child(needs_gpu: None) -> Callable[..., dict[str, Any]]:
    """Give a function that runs one of `scripts/` in a process with a watchdog and returns what it printed as JSON."""
    return run_gpu_child


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Do as for all tests, but for what the driver opens and reserves when it pleases."""
    if "gpu" in request.fixturenames:
        request.getfixturevalue("opened_gpu")
    before = leak_check.snapshot()
    yield
    leaks = [
        leak
        for leak in leak_check.find_leaks(before, expects_quarantine="expects_quarantine" in request.fixturenames)
        if "reserved addresses" not in leak
        and not (leak.startswith("file descriptor") and leak.partition(": ")[2].startswith(DRIVERS_OWN))
    ]
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)
