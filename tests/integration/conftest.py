"""Fixtures of the tests that run models; they import torch only for tests that have found it."""

from contextlib import ExitStack

import pytest


@pytest.fixture(scope="module")
def llama():
    """A small random Llama with grouped-query attention."""
    from moored_model import make_llama

    return make_llama()


@pytest.fixture
def moor(llama):
    """Open prefix caches, by default over the Llama; at the end of the test their books balance and they close."""
    from moored_model import open_moored

    with ExitStack() as opened:
        yield lambda model=llama, **options: opened.enter_context(open_moored(model, **options))
