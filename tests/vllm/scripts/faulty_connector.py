"""The connector with a fault on one rank: KVMOOR_TEST_FAULT=RANK:QUEUE:COPY lets that copy fail there."""

import os
from typing import Any

import kvmoor.integrations.vllm.spec as plugin
from kvmoor.devices.cpu import CpuDevice
from kvmoor.integrations.vllm import KvmoorConnector
from kvmoor.testing import ScriptedCopies


class FaultyConnector(KvmoorConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        rank, queue, index = os.environ["KVMOOR_TEST_FAULT"].split(":")
        if vllm_config.parallel_config.rank == int(rank):
            scripted = ScriptedCopies()
            scripted.fail_at(int(index), queue=queue)
            plugin.open_device = lambda _layout: CpuDevice(copy_hook=scripted)
