"""Queueing copies of the copy engine on a stream, many with one call."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.devices.cuda.backlog import COPIES_A_PLACE, StreamBacklog
from kvmoor.devices.cuda.driver import Driver

_COPIES_A_CALL: Final = 512
"""How many copies one batch call queues at most: a fourth of what a stream takes, so that it gets on meanwhile."""


def queue_copies(
    driver: Driver,
    stream: int,
    backlog: StreamBacklog,
    targets: NDArray[np.int64],
    sources: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    is_given_up: Callable[[], bool],
) -> None:
    """Queue copies between addresses, int64 ``[num_copies]`` each; in any order among themselves.

    `backlog` counts what is queued on the stream. What this raises leaves open how many were queued.
    """
    if nbytes.size == 1 or not driver.copy_batch_available:
        for copy in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
            backlog.make_room(1, is_given_up)
            driver.copy_async(*copy, stream)
            backlog.count(1)
        return
    for start in range(0, nbytes.size, _COPIES_A_CALL):
        some = slice(start, start + _COPIES_A_CALL)
        num_places = -(-nbytes[some].size // COPIES_A_PLACE)
        backlog.make_room(num_places, is_given_up)
        driver.copy_batch_async(targets[some], sources[some], nbytes[some], stream)
        backlog.count(num_places)
