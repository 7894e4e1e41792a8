"""The public API as a user writes it. Type-checked by `make types`, never run."""

import numpy as np

import kvmoor
from kvmoor import (
    BlockKey,
    BlockKeys,
    BlockLayout,
    CpuDevice,
    GroupLayout,
    KeyBuilder,
    KvmoorError,
    MultimodalItem,
    Namespace,
    Offloader,
    Outcome,
    TensorPages,
)
from kvmoor.observation import Event, Observer, StoreDeclined, TransferEnded


class PrintingObserver:
    """An observer is any object with the method; it need not inherit."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, TransferEnded):
            print(event.kind.value, event.outcome.value, event.nbytes / event.seconds, event.reason)
        elif isinstance(event, StoreDeclined):
            print(event.num_blocks, event.reason)


def describe() -> BlockLayout:
    tensors = [np.zeros((64, 2, 16, 4, 32), dtype=np.float32)]
    from_tensors: BlockLayout = BlockLayout.from_tensors(tensors, block_axis=0, tokens_per_block=16, content="NHD")
    pages = TensorPages(base=0x1000, num_blocks=64, block_stride=8192, page_nbytes=4096)
    by_hand = BlockLayout((GroupLayout((pages,), tokens_per_block=32, blocks_per_chunk=2),), on_host=False)
    fingerprint: bytes = by_hand.fingerprint
    print(fingerprint.hex(), by_hand.groups[0].slot_nbytes)
    return from_tensors


def store_and_load(layout: BlockLayout, tokens: list[int], blocks: list[int]) -> int:
    observer: Observer = PrintingObserver()
    namespace = Namespace(
        model="example",
        revision="1",
        weights_epoch=1,
        layout_fingerprint=layout.fingerprint,
        parallel_sizes={"tensor": 2},
        extra={"engine": "mine", "version": 3, "raw": b""},
    )
    builder = KeyBuilder(namespace.next_epoch(), tokens_per_block=16)
    keys: BlockKeys = builder.prompt_keys(tokens, adapter="a", cache_salt=None, multimodal=[MultimodalItem(b"h", 3, 2)])
    same: BlockKeys = builder.engine_keys([b"hash", "hash", 7], group=0)
    prompt = builder.growing_prompt(group=0)
    more: BlockKeys = prompt.append(np.array(tokens))
    first: BlockKey = keys[0]
    print(first.digest.hex(), same.digests, more[:1], prompt.keys, prompt.num_tokens)
    num_done = 0
    with Offloader(layout, host_memory="8GiB", device=CpuDevice(), observer=observer, mapping="eager") as offloader:
        print(offloader.plan.describe(), offloader.plan.nbytes)
        store = offloader.submit_store(keys, blocks)
        if store.job_id is not None:
            offloader.wait([store.job_id], timeout_s=10)
        else:
            print(store.num_known, store.declined)
        with offloader.match(keys) as match:
            match.keep(match.num_blocks - 1)
            job = offloader.submit_load(match, np.arange(match.num_blocks), expedited=True)
        offloader.wait([job], timeout_s=10)
        for result in offloader.poll_results():
            num_done += result.num_blocks if result.outcome is Outcome.DONE else 0
        print(offloader.statistics().blocks.ready, offloader.closed)
        report = offloader.close(timeout_s=1)
        print(report.worker.graceful, report.worker.quarantined_nbytes, [key.digest for key in report.unresolved_keys])
    return num_done


def main() -> None:
    try:
        store_and_load(describe(), list(range(160)), list(range(10)))
    except KvmoorError as error:
        print(kvmoor.__version__, error)
