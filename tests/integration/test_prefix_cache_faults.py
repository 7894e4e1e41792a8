"""The transformers integration when something goes wrong: a miss, and nothing lost or taken too early."""

import threading

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvmoor.errors import BusyError, ClosedError
from kvmoor.integrations.transformers import PrefixCache, RestoredPrefix, StoredPrefix
from moored_model import BLOCK, open_moored, prompt_of

WAIT_S = 20.0


def test_load_that_fails_is_a_miss(moor) -> None:
    """If a block cannot be loaded, its prompt is computed, its rows can be filled again, and the next load succeeds."""
    moored = moor(device_blocks=5)
    prompt = prompt_of(5 * BLOCK)
    expected = moored.generate(prompt)
    moored.store(prompt)
    moored.prefix_cache._pool.index.reset()
    moored.copies.fail_at(2, queue="load")

    cache, restored = moored.restore(prompt)
    assert RestoredPrefix(0, 0, 0) == restored
    assert 5 == moored.prefix_cache._pool.room
    assert expected == moored.generate(prompt, cache)
    _, restored = moored.restore(prompt)
    assert RestoredPrefix(4 * BLOCK, 0, 4 * BLOCK) == restored


def test_load_that_fails_keeps_the_prefix_before_it(moor) -> None:
    """Blocks in front of those that cannot be loaded are restored all the same."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache._pool.index.forget(moored.prefix_cache._key_builder.prompt_keys(prompt)[2:])
    moored.copies.fail_at(0, queue="load")
    _, restored = moored.restore(prompt)
    assert RestoredPrefix(2 * BLOCK, 2 * BLOCK, 0) == restored


def test_rows_of_a_load_that_does_not_end_are_withheld_until_it_does(moor) -> None:
    """A load past its deadline is a miss; its rows are given to nobody until the copy is proven over."""
    moored = moor(device_blocks=6, transfer_timeout_s=0.05)
    prompt = prompt_of(4 * BLOCK + 1)
    moored.store(prompt)
    moored.prefix_cache._pool.index.reset()
    gate = moored.copies.hang_at(0, queue="load")

    _, restored = moored.restore(prompt)
    assert RestoredPrefix(0, 0, 0) == restored
    assert 4 == moored.prefix_cache.statistics().device_pool.held
    _, stored = moored.store(prompt_of(6 * BLOCK, seed=2))
    assert 2 * BLOCK == stored.num_tokens

    gate.release()
    moored.prefix_cache._offloader.wait(list(moored.prefix_cache._withheld), WAIT_S)
    _, stored = moored.store(prompt_of(6 * BLOCK, seed=2))
    assert 0 == moored.prefix_cache.statistics().device_pool.held
    assert 6 * BLOCK == stored.num_tokens


def test_store_that_fails_leaves_the_pool_as_it_is(moor) -> None:
    """If host memory cannot take a prompt, storing says so; the pool has it, and the next store brings it there."""
    moored = moor()
    prompt = prompt_of(3 * BLOCK)
    moored.copies.fail_at(1, queue="store")
    _, failed = moored.store(prompt)
    _, again = moored.store(prompt)
    assert StoredPrefix(3 * BLOCK, 3 * BLOCK, 0, "the copy failed") == failed
    assert StoredPrefix(3 * BLOCK, 0, 3 * BLOCK) == again


def test_rows_of_a_store_that_does_not_end_are_not_filled_anew(moor) -> None:
    """While a copy to host memory may still read its rows, no other prompt gets them."""
    moored = moor(device_blocks=4, transfer_timeout_s=0.05)
    gate = moored.copies.hang_at(0, queue="store")
    prompt = prompt_of(3 * BLOCK)
    _, given_up = moored.store(prompt)
    assert StoredPrefix(3 * BLOCK, 3 * BLOCK, 0, "the copy was given up") == given_up
    _, stored = moored.store(prompt_of(3 * BLOCK, seed=2))
    assert BLOCK == stored.num_tokens
    _, restored = moored.restore([*prompt, 1])
    assert RestoredPrefix(3 * BLOCK, 3 * BLOCK, 0) == restored

    gate.release()
    moored.prefix_cache._offloader.wait(list(moored.prefix_cache._withheld), WAIT_S)
    _, stored = moored.store(prompt_of(4 * BLOCK, seed=3))
    assert 4 * BLOCK == stored.num_tokens


def test_rows_that_a_store_still_reads_stay_withheld_over_a_reset(moor) -> None:
    """A reset forgets blocks but hands no row out that a copy may still read; what may be filled is filled (B37)."""
    moored = moor(device_blocks=4, transfer_timeout_s=0.05)
    gate = moored.copies.hang_at(0, queue="store")
    prompt = prompt_of(3 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache.reset()
    _, stored = moored.store(prompt_of(4 * BLOCK, seed=2))
    assert BLOCK == stored.num_tokens
    _, restored = moored.restore([*prompt, 1])
    assert RestoredPrefix(0, 0, 0) == restored

    gate.release()
    moored.prefix_cache._offloader.wait(list(moored.prefix_cache._withheld), WAIT_S)
    _, stored = moored.store(prompt_of(4 * BLOCK, seed=3))
    assert 4 * BLOCK == stored.num_tokens


def test_interruption_withholds_the_rows_of_a_load(moor, monkeypatch) -> None:
    """Ctrl-C while a load runs leaves the cache empty and the rows withheld; closing still gives everything back."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache._pool.index.reset()

    def interrupt(job_ids, timeout_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(moored.prefix_cache._offloader, "wait", interrupt)
    cache = moored.new_cache()
    with pytest.raises(KeyboardInterrupt):
        moored.prefix_cache.restore(prompt, cache)
    assert 0 == cache.get_seq_length()
    assert 4 == moored.prefix_cache.statistics().device_pool.held


def test_cache_that_cannot_be_filled_is_left_empty(moor, monkeypatch) -> None:
    """If filling fails in the middle, no layer keeps anything, and the prompt can be computed into the same cache."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    expected = moored.generate(prompt)
    moored.store(prompt)
    cache = moored.new_cache()
    with monkeypatch.context() as broken:
        broken.setattr(cache.layers[2], "update", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            moored.prefix_cache.restore(prompt, cache)
    assert [0, 0, 0] == [layer.get_seq_length() for layer in cache.layers]
    assert expected == moored.generate(prompt, cache)


def test_second_thread_is_told_that_the_cache_is_in_use(moor) -> None:
    """Of two threads, the one that comes second gets a BusyError at once, and the first one is not disturbed."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache._pool.index.reset()
    gate = moored.copies.hang_at(0, queue="load")
    found = []
    first = threading.Thread(target=lambda: found.append(moored.restore(prompt)[1]))
    first.start()
    assert gate.wait_reached(WAIT_S)
    with pytest.raises(BusyError, match="another thread"):
        moored.restore(prompt)
    gate.release()
    first.join(WAIT_S)
    assert [RestoredPrefix(4 * BLOCK, 0, 4 * BLOCK)] == found


def test_closed_cache_refuses_everything(llama) -> None:
    """After the `with` block every call says that the cache is closed; closing again does no harm."""
    with open_moored(llama) as moored:
        cache, _ = moored.store(prompt_of(9))
    assert moored.prefix_cache.closed
    assert moored.prefix_cache.close() == moored.prefix_cache.close()
    for call in (
        lambda: moored.prefix_cache.restore(prompt_of(9), moored.new_cache()),
        lambda: moored.prefix_cache.store(prompt_of(9), cache),
        moored.prefix_cache.reset,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_forgotten_close_is_a_warning(llama) -> None:
    """A prefix cache that nobody closed says so when it goes away."""
    prefix_cache = PrefixCache(llama, host_memory="1MiB", device_blocks=4)
    with pytest.warns(ResourceWarning, match="PrefixCache.*never closed"):
        prefix_cache.__del__()
    prefix_cache.close()
