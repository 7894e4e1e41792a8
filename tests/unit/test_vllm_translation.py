"""How vLLM's keys, layouts, jobs and settings become ours. No vLLM is needed."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from kvmoor.errors import LayoutError, MissingDependencyError, RequestError, SettingsError
from kvmoor.integrations.vllm.keys import ChunkKeys
from kvmoor.integrations.vllm.layout import describe_kv_caches
from kvmoor.integrations.vllm.messages import HostSlots, pair_with_device
from kvmoor.integrations.vllm.rank_sizes import RankSizes, least_slots
from kvmoor.integrations.vllm.reset_fence import KEEPS_STEPPING_S, ResetFence
from kvmoor.integrations.vllm.settings import read_settings
from kvmoor.integrations.vllm.slot_tally import SlotTally
from kvmoor.key_builder import Namespace
from kvmoor.transfer_messages import OrderId, OrderKind, OrderPart, SlotRange

STORE, LOAD = OrderKind.DEVICE_TO_SLOT, OrderKind.SLOT_TO_DEVICE
NAMESPACE = Namespace(model="m", layout_fingerprint=bytes(32))


def offload_key(name: str, group_id: int = 0) -> bytes:
    return name.encode().ljust(32) + group_id.to_bytes(4, "big")


def chunk_keys(*, blocks_per_chunk: int = 1) -> ChunkKeys:
    return ChunkKeys(NAMESPACE, group_ids=[0, 3], tokens_per_block=[16, 16], blocks_per_chunk=blocks_per_chunk)


class Tensor:
    """What `describe_kv_caches` looks at of a torch tensor of int8."""

    def __init__(self, address: int, num_blocks: int, page: int, stride: int | None = None, device: str = "cpu"):
        self.shape, self._strides = (num_blocks, page), (stride or page, 1)
        self.device = SimpleNamespace(type=device)
        self._address = address

    def data_ptr(self):
        return self._address

    def element_size(self):
        return 1

    def stride(self, axis):
        return self._strides[axis]


def kv_caches(tensors, groups):
    refs = [[SimpleNamespace(tensor_idx=index, page_size_bytes=nbytes) for index, nbytes in group] for group in groups]
    return SimpleNamespace(tensors=[SimpleNamespace(tensor=tensor) for tensor in tensors], group_data_refs=refs)


def host_slots(*slots):
    return HostSlots(OrderId(7), tuple(np.array(each, np.int32) for each in slots))


def pair(kind, host, blocks, sizes, indices, blocks_per_chunk):
    ids = np.array(blocks, np.int32)
    return pair_with_device(
        kind, host, block_ids=ids, group_sizes=sizes, block_indices=indices, blocks_per_chunk=blocks_per_chunk
    )


def test_a_key_names_hash_group_and_place() -> None:
    """Another hash, group, place in the chunk or epoch is another block; asked twice, a key is the same."""
    keys = chunk_keys(blocks_per_chunk=2)
    found = [*keys.of(offload_key("a")), *keys.of(offload_key("b")), *keys.of(offload_key("a", 3))]

    assert 6 == len({key.digest for key in found})
    assert [0, 0, 0, 0, 1, 1] == [key.group for key in found]
    assert found[:2] == [*keys.of(offload_key("a"))]
    keys.next_epoch()
    assert not {key.digest for key in found} & {key.digest for key in keys.of(offload_key("a"))}


def test_a_group_that_is_not_offloaded_is_refused() -> None:
    """Numbers of groups may skip, and one in between is nobody's."""
    with pytest.raises(RequestError, match="asked for group 1, and offloads groups"):
        chunk_keys().of(offload_key("a", 1))


def test_a_tensor_that_layers_share_is_copied_once() -> None:
    """Within a group a tensor counts once, with its longest page; across groups it belongs to each."""
    tensors = [Tensor(4096, 8, 512), Tensor(65536, 8, 512)]
    layout = describe_kv_caches(
        kv_caches(tensors, [[(0, 512), (0, 512), (1, 512)], [(0, 512)], []]), tokens_per_block=[16, 16, 32], content="c"
    )

    assert [2, 1, 0] == [len(group.tensors) for group in layout.groups]
    assert [1024, 512, 0] == [group.block_nbytes for group in layout.groups]
    assert layout.on_host


def test_padding_of_pages_is_left_out() -> None:
    """Of pages that lie further apart than they are long only the pages are copied."""
    layout = describe_kv_caches(kv_caches([Tensor(4096, 8, 512, 768)], [[(0, 500)]]), tokens_per_block=[16], content="")

    (tensor,) = layout.groups[0].tensors
    assert (500, 768, 8) == (tensor.page_nbytes, tensor.block_stride, tensor.num_blocks)


def test_tensors_in_two_places_are_refused() -> None:
    """One worker copies from one device."""
    with pytest.raises(LayoutError, match="some on a GPU"):
        describe_kv_caches(
            kv_caches([Tensor(4096, 8, 512), Tensor(1 << 20, 8, 512, device="cuda")], [[(0, 512), (1, 512)]]),
            tokens_per_block=[16],
            content="",
        )


def test_slots_and_device_blocks_meet_by_group() -> None:
    """Each group's device blocks belong to its slots, in order, and a group may have none."""
    order, blocks = pair(STORE, host_slots([4, 5], [], [9]), [20, 21, 30], [2, 0, 1], [0, 0, 3], 1)

    assert (OrderPart(0, (4, 5)), OrderPart(2, (9,))) == order.parts
    assert [[20], [21]] == blocks[0].tolist()
    assert [[30]] == blocks[2].tolist()


def test_a_load_may_begin_and_end_inside_a_chunk() -> None:
    """What the device has of the first chunk, or lacks of the last, is left out."""
    order, blocks = pair(LOAD, host_slots([0, 1, 2, 3, 4, 5, 6, 7]), [20, 21, 22, 23, 24], [5], [10], 4)

    assert (OrderPart(0, (2, 3, 4, 5, 6)),) == order.parts
    assert [20, 21, 22, 23, 24] == blocks[0].ravel().tolist()


def test_blocks_that_are_stored_are_not_stored_again() -> None:
    """Of a chunk only the blocks that have a slot are copied."""
    order, blocks = pair(STORE, host_slots([-1, 8, -1, 9]), [20, 21, 22, 23], [4], [4], 4)

    assert (OrderPart(0, (8, 9)),) == order.parts
    assert [21, 23] == blocks[0].ravel().tolist()


def test_a_chunk_with_a_hole_is_not_stored() -> None:
    """A store that lacks blocks of a chunk would leave bytes in its slots that nobody wrote."""
    with pytest.raises(RequestError, match="left out some in between"):
        pair(STORE, host_slots([0, 1, 2, 3]), [20, 21, 22, 23], [4], [2], 4)
    with pytest.raises(RequestError, match="without some of their blocks"):
        pair(STORE, host_slots([0, 1, 2, 3]), [21, 22, 23], [3], [1], 4)


def test_slots_survive_the_way_to_a_worker() -> None:
    """What vLLM carries is pickled, and comes out as it was."""
    found = pickle.loads(pickle.dumps(host_slots([1, 2], [])))

    assert 7 == found.order_id
    assert [[1, 2], []] == [slots.tolist() for slots in found.slots]


def test_a_slot_counts_once_all_ranks_have_it() -> None:
    """Ranks map memory at their own pace: what one of them lacks is not handed out."""
    tally = SlotTally(2)

    assert [] == tally.add([SlotRange(0, 0, 8), SlotRange(1, 4, 4)])
    assert [SlotRange(0, 2, 3)] == tally.add([SlotRange(0, 2, 3)])
    assert [SlotRange(0, 0, 2), SlotRange(0, 5, 3)] == tally.add([SlotRange(0, 0, 2), SlotRange(0, 5, 5)])
    assert [SlotRange(0, 8, 2), SlotRange(1, 4, 4)] == tally.add([SlotRange(0, 8, 2), SlotRange(1, 0, 10)])


def test_the_smallest_rank_decides() -> None:
    """Each group has as many slots as the rank that has least of them."""
    ranks = [RankSizes(0, (8, 3), ("s",)), RankSizes(1, (6, 4), ("s",))]

    assert (6, 3) == least_slots(ranks, num_ranks=2)


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    """A rank that vLLM lost, or one that lays blocks out differently, is named at start."""
    one, two = RankSizes(0, (8,), ("s",)), RankSizes(1, (8,), ("t",))
    with pytest.raises(SettingsError, match="1 of 2 ranks"):
        least_slots([one], num_ranks=2)
    with pytest.raises(SettingsError, match=r"rank 0: \('s',\); rank 1: \('t',\)"):
        least_slots([one, two], num_ranks=2)
    with pytest.raises(SettingsError, match="none of 2 ranks keeps blocks"):
        least_slots([RankSizes(0, None, ("s",)), RankSizes(1, None, ("s",))], num_ranks=2)
    with pytest.raises(SettingsError, match=r"numbers of groups of KV caches \(rank 0: 1; rank 1: 2"):
        least_slots([one, RankSizes(1, (8, 8), ("s",))], num_ranks=2)


def test_a_reset_is_flushed_once_every_rank_has_reported() -> None:
    """Each job of before is due from each rank; other jobs do not count."""
    fence = ResetFence()
    fence.add({3: 2, 4: 1})
    fence.note_reports({4: 1, 9: 2})
    fence.note_reports({3: 1})

    assert not fence.is_open
    fence.note_reports({3: 1})
    assert fence.is_open


def test_an_idle_engine_is_kept_stepping_for_a_while_only() -> None:
    """A rank that never reports does not keep an engine busy for ever."""
    now = [0.0]
    fence = ResetFence(clock=lambda: now[0])
    fence.add({3: 1})
    assert fence.keeps_stepping

    now[0] = KEEPS_STEPPING_S

    assert not fence.keeps_stepping
    assert not fence.is_open


def test_settings_are_read_beside_those_of_vllm() -> None:
    """The plugin reads its own keys, leaves vLLM's alone, and knows what 64GB is."""
    settings = read_settings({"host_memory": "64GB", "blocks_per_chunk": 4, "eviction": "arc", "job_timeout_s": 5})

    assert (64 * 10**9, "arc", 5.0) == (settings.host_memory, settings.eviction, settings.job_timeout_s)
    assert not settings.offload_prompt_only


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "give host_memory"),
        ({"host_memory": "much"}, "host_memory is 'much'"),
        ({"host_memory": 1, "host_memroy": 2}, "did you mean 'host_memory'"),
        ({"host_memory": 1, "zzz": 2}, "known are eviction"),
        ({5: 1, "host_memory": 1}, "key 5 that is no text"),
        ({"host_memory": 1, "eviction": "fifo"}, "give 'lru' or 'arc'"),
        ({"host_memory": 1, "kv_layout": []}, "kv_layout is"),
        ({"host_memory": 1, "job_timeout_s": 0}, "job_timeout_s"),
        ({"host_memory": 1, "model_revision": 3}, "model_revision is 3: give text"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(extra, message) -> None:
    """A typing error is named at start, and does not silently do nothing."""
    with pytest.raises(SettingsError, match=message):
        read_settings(extra)


def test_without_vllm_the_entries_say_so() -> None:
    """Who lacks vLLM is told which versions will do, and not of an attribute of some module."""
    import kvmoor.integrations.vllm as plugin

    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match=r"install vLLM 0\.30 to 0\.33"):
            _ = plugin.KvmoorConnector
    with pytest.raises(AttributeError, match="no attribute 'KvmoorThing'"):
        _ = plugin.KvmoorThing
