"""The page-locked page of a queue, written by the test in the place of a GPU."""

import ctypes
import mmap
import threading

import pytest

from kvmoor.devices.cuda.completion import COMPLETION_NBYTES, CompletionMemory


@pytest.fixture
def page():
    with mmap.mmap(-1, COMPLETION_NBYTES) as page:
        yield page


@pytest.fixture
def address(page):
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def store(address, value):
    ctypes.c_uint64.from_address(address).value = value


def test_the_word_is_what_the_device_wrote_last(address):
    """Numbers of 64 bits are read as they are, from a cache line that has nothing else on it."""
    completion = CompletionMemory(address)
    assert 0 == completion.read()

    for number in (1, 2**32 + 7, 2**64 - 1):
        store(completion.word_address, number)
        assert number == completion.read()

    begin, _ = completion.next_times(1)
    assert 0 == completion.word_address % 64
    assert begin - completion.word_address >= 128


def test_times_belong_to_their_jobs(address):
    """Each of the latest 64 jobs has a place of its own; its time is told once it is over, and not for an older one."""
    completion = CompletionMemory(address)
    places = {}
    for sequence in range(10, 1010, 10):
        begin, end = places[sequence] = completion.next_times(sequence)
        store(begin, 1000)
        store(end, 1000 + sequence)
    assert 64 == len(set(places.values()))
    assert all(address < place[0] < place[1] < address + COMPLETION_NBYTES for place in places.values())
    assert completion.seconds(1000) is None

    store(completion.word_address, 990)

    assert 990e-9 == completion.seconds(990)
    assert completion.seconds(1000) is None
    assert 370e-9 == completion.seconds(370)
    assert completion.seconds(360) is None
    assert completion.seconds(985) is None
    assert completion.seconds(0) is None


def test_detached_memory_is_not_read_any_more(address):
    """After `detach` the answers stay what they were, whatever becomes of the page."""
    completion = CompletionMemory(address)
    begin, end = completion.next_times(7)
    for place, value in ((begin, 5), (end, 9), (completion.word_address, 7)):
        store(place, value)
    completion.detach()
    completion.detach()

    for place in (begin, end, completion.word_address):
        store(place, 2**40)

    assert 7 == completion.read()
    assert 4e-9 == completion.seconds(7)


def test_a_forked_child_knows_what_was_read(address):
    """After a fork the last number that was read is the answer, with a lock that nobody holds."""
    completion = CompletionMemory(address)
    store(completion.word_address, 3)
    assert 3 == completion.read()
    store(completion.word_address, 4)
    holder = threading.Thread(target=completion._lock.acquire)
    holder.start()
    holder.join()

    completion.forked()

    assert 3 == completion.read()
    assert completion.seconds(3) is None
