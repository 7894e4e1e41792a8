"""Which configurations of vLLM are refused at start, and what a scheduler reads of its ranks' status segments."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from device_blocks import DeviceBlocks
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import KvmoorError, SettingsError, UnsupportedError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.integrations.vllm.host_status import HostStatus
from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.integrations.vllm.refusals import refuse_configuration
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart
from kvmoor.worker import TransferWorker

TIMEOUT_S = 10.0


def configuration(**changes):
    """Return a configuration of vLLM that is served, with changes by path."""
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", kv_role="kv_both", kv_connector_extra_config={}
        ),
        model_config=SimpleNamespace(enable_sleep_mode=False, use_mla=False),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        max_concurrent_batches=1,
    )
    for path, value in changes.items():
        part, name = path.split("__")
        setattr(getattr(vllm_config, part), name, value)
    return vllm_config


def kv_cache_config(*windows):
    specs = [SimpleNamespace(sliding_window=window, block_size=16) for window in windows or (None,)]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_an_ordinary_configuration_is_served() -> None:
    """Whatever the version, and with sliding windows too."""
    for is_before_033 in (False, True):
        refuse_configuration(configuration(), kv_cache_config(None, 96), is_before_033=is_before_033)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, 'set it to "recompute"'),
        ({"kv_transfer_config__kv_role": "kv_producer"}, 'set it to "kv_both"'),
        ({"kv_transfer_config__kv_connector_extra_config": {"sync_load_budget_bytes": 1}}, "has 2 groups"),
        ({"kv_transfer_config__kv_connector_extra_config": {"canonical_layout": True}}, "canonical_layout"),
        ({"kv_transfer_config__kv_connector_extra_config": {"blocks_per_chunk": 4}}, "set blocks_per_chunk to 1"),
        ({"model_config__enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"model_config__use_mla": True, "cache_config__enable_prefix_caching": False}, "wrong answers"),
        ({"attention_config__hisparse_config": object()}, "hisparse"),
    ],
)
def test_what_would_go_wrong_later_is_refused_at_start(changes, message) -> None:
    """Each refusal says what was found and what to do."""
    with pytest.raises(KvmoorError, match=message):
        refuse_configuration(configuration(**changes), kv_cache_config(None, 96), is_before_033=True)


def test_loads_within_a_step_want_one_step_at_a_time() -> None:
    """With two steps in flight vLLM would hand out what it computed from a load that failed."""
    config = configuration(kv_transfer_config__kv_connector_extra_config={"sync_load_budget_bytes": 1})
    refuse_configuration(config, kv_cache_config(), is_before_033=False)
    config.max_concurrent_batches = 2

    with pytest.raises(KvmoorError, match="set async_scheduling to False"):
        refuse_configuration(config, kv_cache_config(), is_before_033=False)


def test_newer_versions_serve_more() -> None:
    """From 0.33 on vLLM tells of sleep, and of chunks that lack blocks."""
    extra = {"blocks_per_chunk": 4}
    config = configuration(model_config__enable_sleep_mode=True, kv_transfer_config__kv_connector_extra_config=extra)

    refuse_configuration(config, kv_cache_config(None, 96), is_before_033=False)


@pytest.mark.parametrize(
    ("extra", "dcp_size", "is_refused"),
    [
        ({"block_size": 32}, 1, True),
        ({"block_size": 16}, 1, False),
        ({"block_size": 32}, 2, False),
        ({"block_size": 64}, 2, True),
        ({"blocks_per_chunk": None, "block_size": 32}, 1, True),
        ({"blocks_per_chunk": 2, "block_size": None}, 1, True),
        ({"blocks_per_chunk": 1}, 1, False),
        ({"blocks_per_chunk": None}, 1, False),
    ],
)
def test_chunks_of_several_blocks_are_known_in_both_spellings(extra, dcp_size, is_refused) -> None:
    """Windows with chunks of several blocks are refused below 0.33, counted in blocks or in tokens."""
    config = configuration(
        kv_transfer_config__kv_connector_extra_config=extra, parallel_config__decode_context_parallel_size=dcp_size
    )
    with pytest.raises(UnsupportedError, match="sliding windows") if is_refused else nullcontext():
        refuse_configuration(config, kv_cache_config(None, 96), is_before_033=True)
    refuse_configuration(config, kv_cache_config(), is_before_033=True)


@pytest.mark.parametrize("option", ["blocks_per_chunk", "block_size"])
@pytest.mark.parametrize("value", ["x", "4", [4], 2.5, True, 0, -1])
def test_a_size_of_chunks_is_a_whole_number(option, value) -> None:
    """Whatever else stands there is named in a message, in every version."""
    config = configuration(kv_transfer_config__kv_connector_extra_config={option: value})
    for is_before_033 in (False, True):
        with pytest.raises(SettingsError, match=f"{option} in kv_connector_extra_config is"):
            refuse_configuration(config, kv_cache_config(), is_before_033=is_before_033)


def test_a_scheduler_learns_from_status_segments() -> None:
    """Slots are told once, and a slot vouches for the order that filled it whole, and for no other."""
    blocks = DeviceBlocks()
    layout = blocks.layout()
    plan = plan_arena(layout, 2**20)
    host = HostStatus("status-test", 1)
    assert host.num_slots is None
    with TransferWorker(layout, plan, CpuDevice(), engine_id="status-test", rank=0) as worker:
        assert worker.arena.wait_published(TIMEOUT_S)
        (published,) = worker.take_published()

        assert published.num_slots == sum(each.num_slots for each in host.take_published())
        assert [] == host.take_published()
        assert (plan.groups[0].num_slots,) == host.num_slots
        slots = HostSlots(OrderId(5), (np.array([3, -1], np.int32),))
        assert not host.vouches_for(slots)
        order = Order(OrderId(5), OrderKind.DEVICE_TO_SLOT, (OrderPart(0, (3,)),))
        worker.submit(order, {0: np.array([[1]])})
        worker.wait([OrderId(5)], TIMEOUT_S)
        worker.take_reports()
        assert host.vouches_for(slots)
        assert not host.vouches_for(HostSlots(OrderId(6), slots.slots))
    host.close()


def test_a_rank_that_was_not_found_vouches_for_nothing() -> None:
    """Without its segment nobody knows what a rank has stored."""
    host = HostStatus("nobody", 2)

    assert [] == host.take_published()
    assert not host.vouches_for(HostSlots(OrderId(1), (np.array([0], np.int32),)))
