"""What holds for every test: nothing is left behind, and a failure found by Hypothesis can be repeated."""

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings

import leak_check

# NumPy's own huge-page advice would look like an arena to leak_check. The environment variable for it comes too late:
# pytest-randomly has imported NumPy by now.
np._core.multiarray._set_madvise_hugepage(False)

# A shared machine makes deadlines a lottery. In CI the examples are the same in each run: a red run can be repeated.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off what is there before the tests: going through all of torch takes it 0.4 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def mistook_no_mapping() -> Iterator[None]:
    """Fail the last test if the check after any of them took a mapping of kvmoor for what was there before."""
    yield
    mistaken = leak_check.find_mistaken()
    if mistaken:
        pytest.fail("some test left behind: " + "; ".join(mistaken), pytrace=False)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves file descriptors, threads of kvmoor or mappings of kvmoor behind."""
    before = leak_check.snapshot()
    yield
    leaks = leak_check.find_leaks(before, expects_quarantine="expects_quarantine" in request.fixturenames)
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture
def expects_quarantine() -> None:
    """Say that the test ends with a quarantined arena, whose mappings, memfds and threads stay on purpose."""
