"""Store and load in random order and compare every byte, while another process does the same on the same GPU.

one_of_two.py SEED STEPS FOLDER     FOLDER: where the two tell each other that they are ready
"""

import sys
import time
from pathlib import Path

import numpy as np

from device_blocks import content_keys
from gpu_child import end_with_parent, report
from gpu_rig import WAIT_S, Gpu
from kvmoor.block_layout import BlockLayout
from kvmoor.offloader import Offloader

NUM_BLOCKS = 256


def main(seed: int, num_steps: int, folder: Path) -> None:
    gpu = Gpu(host_nbytes=2**20)
    torch = gpu.torch
    random = np.random.default_rng(seed)
    cache = torch.zeros((8, NUM_BLOCKS, 32 * 1024), dtype=torch.uint8, device="cuda")
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
    wrong = []
    with Offloader(layout, host_memory="2GiB", device=gpu.open_device()) as offloader:
        (folder / str(seed)).touch()
        deadline = time.monotonic() + WAIT_S
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < deadline, "the other process never came"
            time.sleep(0.01)
        began = time.time()
        for step in range(num_steps):
            ids = random.permutation(NUM_BLOCKS)
            stored, loaded = ids[:32], ids[32:64]
            index = torch.from_numpy(stored).cuda()
            content = torch.randint(0, 256, (8, 32, 32 * 1024), dtype=torch.uint8, device="cuda")
            cache[:, index] = content
            keys = content_keys(*(1000 * seed + 32 * step + number for number in range(32)))
            offloader.wait([offloader.submit_store(keys, stored).job_id], WAIT_S)
            match = offloader.match(keys)
            offloader.wait([offloader.submit_load(match, loaded)], WAIT_S)
            if not torch.equal(content, cache[:, torch.from_numpy(loaded).cuda()]):
                wrong.append(step)
        ended = time.time()
        outcomes = {result.outcome.value for result in offloader.poll_results()}
        registered = offloader.statistics().transfers.arena.registered_nbytes
        graceful = offloader.close(WAIT_S).worker.graceful
    report(began=began, ended=ended, wrong=wrong, outcomes=sorted(outcomes), registered=registered, graceful=graceful)


if __name__ == "__main__":
    end_with_parent()
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
