"""The page kernel without a GPU: takes the same parameter bytes as page_copy.cu and does the same to real memory.

    add_page_kernels(fake)     # a FakeDriver knows the functions of all variants from now on

The structures are written down here once more, as C has them: packing that differs does not pass.
"""

import ctypes
import itertools

import numpy as np

from kvmoor.devices.cuda.launches import LARGE_PARAMETERS_NBYTES, SMALL_PARAMETERS_NBYTES, VARIANTS

_NANOSECONDS = itertools.count(1_000_000_000, 1000)  # a clock that never stands still


class Header(ctypes.Structure):
    _fields_ = [
        ("pieces", ctypes.c_uint64),
        ("slots_base", ctypes.c_uint64),
        ("word", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("ticket", ctypes.c_uint64),
        ("begin_time", ctypes.c_uint64),
        ("end_time", ctypes.c_uint64),
        ("num_pieces", ctypes.c_uint32),
        ("num_blocks", ctypes.c_uint32),
        ("blocks_per_chunk", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    ]


class Piece(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("slot_offset", ctypes.c_uint32),
        ("nbytes", ctypes.c_uint32),
        ("chunk_index", ctypes.c_uint32),
        ("width_log2", ctypes.c_uint32),
    ]


def add_page_kernels(fake):
    """Make the functions of all variants known to a `FakeDriver`."""
    for variant in VARIANTS:
        fake.add_kernel(variant.small_function, _run, SMALL_PARAMETERS_NBYTES)
        fake.add_kernel(variant.large_function, _run, LARGE_PARAMETERS_NBYTES)


def run_page_kernel(parameters, grid, touch):
    """Do what one launch does. `touch(address, nbytes, write=...)` is called before each access, and may refuse it."""
    header = Header.from_buffer_copy(parameters)
    row_length = 1 + header.blocks_per_chunk
    rows = np.frombuffer(parameters, np.int32, header.num_blocks * row_length, ctypes.sizeof(Header))
    to_host, has_odd_pieces = header.flags & 1, header.flags & 2
    if header.begin_time:
        _store(header.begin_time, next(_NANOSECONDS), touch)
    touch(header.pieces, header.num_pieces * ctypes.sizeof(Piece), write=False)
    pieces = (Piece * header.num_pieces).from_address(header.pieces)
    for row in rows.reshape(-1, row_length).tolist():
        slot = header.slots_base + (row[0] % 2**32) * 4096
        for piece in pieces:
            block_id = row[1 + piece.chunk_index]
            if block_id < 0:
                continue
            page, place = piece.start + block_id * piece.stride, slot + piece.slot_offset
            width = 1 << piece.width_log2
            assert page % width == place % width == 0, "a GPU faults at a misaligned access"
            assert has_odd_pieces or (width == 16 and piece.nbytes % 16 == 0), "its last bytes would not be copied"
            source, target = (page, place) if to_host else (place, page)
            touch(source, piece.nbytes, write=False)
            touch(target, piece.nbytes, write=True)
            ctypes.memmove(target, source, piece.nbytes)
    if header.sequence:
        _take_tickets(header.ticket, grid, touch)
        if header.end_time:
            _store(header.end_time, next(_NANOSECONDS), touch)
        _store(header.word, header.sequence, touch)


def _run(fake, function, grid, block, parameters):
    name = fake.function_name(function)
    variant = next(each for each in VARIANTS if name in {each.small_function, each.large_function})
    assert block == variant.threads_per_block, "the kernel's bounds, and rings for so many warps"
    run_page_kernel(parameters, grid, fake.touch)


def _take_tickets(address, grid, touch):
    """Let every thread block take a ticket; the last one leaves none taken."""
    touch(address, 4, write=True)
    ticket = ctypes.c_uint32.from_address(address)
    for taken in range(grid):
        assert ticket.value == taken, "a launch began with tickets taken"
        ticket.value = (taken + 1) % grid


def _store(address, value, touch):
    touch(address, 8, write=True)
    ctypes.c_uint64.from_address(address).value = value
