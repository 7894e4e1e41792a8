"""What vLLM's workers do, without a GPU and without weights: both model runners, call for call, on a GPU that is late.

`FakeRank` is one worker. vLLM's own classes call the connector: the mix-in of the first runner, `ActiveKVConnector` of
the second one. What is here is when they are asked to, among the work on the engine's stream. A rank may lag behind the
others: it keeps its calls in a queue until somebody needs the answer, as a process of its own does.
"""

import copy
import pickle
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from fake_model import TOKEN_NBYTES, WORDS_PER_TOKEN, KvMemory, Sequence, forward, propose
from late_gpu import ENGINE, LateDevice, LateGpu, new_mark
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import kvmoor.integrations.vllm.spec as plugin

_describe_kv_caches = plugin.describe_kv_caches


@dataclass
class Plan:
    """What a step changes and computes, as the work on the stream needs it: the scheduler goes on meanwhile."""

    gone: set[str]
    new: list[tuple]
    cached: list[tuple]
    num_tokens: dict[str, int]
    drafts: dict[str, list[int]]
    zeroed: list[int]
    copied: list[tuple[int, int]]

    @classmethod
    def of(cls, output):
        new = [
            (each.req_id, list(each.prefill_token_ids or each.prompt_token_ids), _lists(each.block_ids), each)
            for each in output.scheduled_new_reqs
        ]
        cached, reqs = [], output.scheduled_cached_reqs
        rows = zip(reqs.req_ids, reqs.new_block_ids, reqs.num_computed_tokens, reqs.num_output_tokens, strict=True)
        for request, blocks, num_computed, num_output in rows:
            tokens = reqs.all_token_ids[request] if request in reqs.resumed_req_ids else None
            cached.append((request, tokens, blocks and _lists(blocks), num_computed, num_output))
        return cls(
            gone=set(output.finished_req_ids),
            new=[
                (request, tokens, blocks, each.num_computed_tokens, len(each.prompt_token_ids))
                for request, tokens, blocks, each in new
            ],
            cached=cached,
            num_tokens=dict(output.num_scheduled_tokens),
            drafts={request: list(tokens) for request, tokens in output.scheduled_spec_decode_tokens.items()},
            zeroed=list(getattr(output, "new_block_ids_to_zero", None) or ()),
            copied=[(each.src_block_id, each.dst_block_id) for each in _block_copies(output)],
        )


@dataclass
class Step:
    """What a step has queued on the stream, and what it leaves there."""

    plan: Plan
    sampled: dict[str, list[int]] = field(default_factory=dict)
    batch: list[tuple[Sequence, int]] = field(default_factory=list)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    wrong: list = field(default_factory=list)
    spoiled: set[int] = field(default_factory=set)
    is_sampled: object = field(default_factory=new_mark)
    is_over: object = field(default_factory=new_mark)


class FakeRank:
    """One rank. `setup` says what it is a worker of (see `fake_engine`)."""

    def __init__(self, vllm_config, rank, setup):
        self.gpu = LateGpu((setup.seed, rank).__repr__(), pace=setup.paces[rank])
        self.setup = setup
        self.config = copy.copy(vllm_config)
        self.config.parallel_config = copy.copy(vllm_config.parallel_config)
        self.config.parallel_config.rank = rank
        self.rank = rank
        self.calls = deque()
        self.connector = None
        self.device = None
        self.memory = None
        self.num_flushed = self.num_excused = 0
        self._is_async = vllm_config.scheduler_config.async_scheduling
        self._sequences = {}  # the device's own: only work on its stream changes them
        self._pending = self._last = None

    def initialize(self, kv_cache_config):
        """Make KV caches and, if there is to be one, the connector, in the order of a worker."""
        (nbytes,) = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
        cache = self.gpu.device_bytes(nbytes)
        cache[:] = 0xAB
        groups = {
            name: number for number, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names
        }
        pages, tensors = {}, {}
        for tensor in kv_cache_config.kv_cache_tensors:
            for number, name in enumerate(tensor.layers):
                at = tensor.offset + number * tensor.layer_stride, tensor.block_stride
                pages[name] = self._pages(cache, kv_cache_config.num_blocks, *at)
                tensors[name] = torch.from_numpy(cache.view("int8")).as_strided(
                    (kv_cache_config.num_blocks, self.setup.page_nbytes), (tensor.block_stride, 1), at[0]
                )
        layers = [replace(layer, group=groups[layer.name]) for layer in self.setup.layers]
        self.memory = KvMemory(layers, pages, rank=self.rank)
        if self.config.kv_transfer_config is None:
            return
        self.connector = KVConnectorFactory.create_connector(
            config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )
        plugin.open_device = self._open_device
        plugin.describe_kv_caches = _describe_as_on_gpu
        self._become_current()
        if self.setup.is_second:
            self.connector_calls = ActiveKVConnector(self.config, tensors)
        else:
            self.connector.register_kv_caches(tensors)

    def _pages(self, cache, num_blocks, offset, block_stride):
        words = cache[offset : offset + len(cache[offset:]) // 8 * 8].view(np.uint64)
        shape = num_blocks, self.setup.tokens_per_block, WORDS_PER_TOKEN
        return np.lib.stride_tricks.as_strided(words, shape, (block_stride, TOKEN_NBYTES, 8))

    def _open_device(self, _layout):
        self.device = LateDevice(self.gpu, fails=self.setup.fails)
        return self.device

    def num_jobs(self, *queues):
        return sum(self.device.queues[name].num_jobs for name in queues)

    @property
    def num_failed(self):
        return sum(queue.num_failed for queue in self.device.queues.values())

    # The calls of an executor, which come from a queue.

    def catch_up(self, number=None):
        """Work off calls, up to that one or all."""
        while self.calls and (number is None or self.calls[0][0] <= number):
            _, method, payload, answers = self.calls.popleft()
            self.gpu.lag()
            self._become_current()
            answers[self.rank] = getattr(self, method)(pickle.loads(payload))
            self.gpu.lag()

    def execute_model(self, output):
        """Do what `execute_model` of a runner does; return an answer if nothing is to be sampled."""
        if self.connector:
            self.num_flushed += len(output.kv_connector_metadata.jobs_to_flush or ())
        run = self._execute_second if self.setup.is_second else self._execute_first
        return run(output)

    def _execute_first(self, output):
        if self.connector:
            self.connector.handle_preemptions(output.kv_connector_metadata)
        step = self._update_states(output)
        if not output.total_num_scheduled_tokens:
            return self._no_forward_first(output)
        with set_forward_context(None, self.config):
            calls = (
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                    output, defer_finalize=self.setup.num_drafts > 0
                )
                if self.connector
                else nullcontext()
            )
            with calls as connector_output:
                self._queue_forward(step)
        self._pending = step, connector_output, output
        return None

    def _no_forward_first(self, output):
        if not self.connector:
            return ModelRunnerOutput.with_kv_conn_output_only(None)
        return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)

    def _execute_second(self, output):
        step = self._update_states(output)
        if not self.connector:
            if not output.total_num_scheduled_tokens:
                return ModelRunnerOutput.with_kv_conn_output_only(None)
            self._queue_forward(step)
            self._pending = step, None, output
            return None
        if not output.total_num_scheduled_tokens:
            return self.connector_calls.no_forward(output)
        with set_forward_context(None, self.config):
            self.connector_calls.pre_forward(output)
        self._queue_forward(step)
        self.connector_calls.finish_forward()
        self._pending = step, None, output
        return None

    def sample_tokens(self, _grammar):
        """Do what `sample_tokens` of a runner does; the answer waits for the device when it is asked for."""
        (step, connector_output, output), self._pending = self._pending, None
        self._last = step
        if self.setup.is_second:
            return self._sample_second(step, output)
        self._queue_drafter(step)
        if not self._is_async:
            self.gpu.finish(step.is_over)
        if self.setup.num_drafts and self.connector:
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        return Answer(self, step, connector_output)

    def _sample_second(self, step, output):
        if not self.connector:
            self._queue_drafter(step)
            return Answer(self, step, None)
        calls, finished = self.connector_calls, output.finished_req_ids
        if self.setup.num_drafts and hasattr(calls, "finalize_step"):  # vLLM 0.33
            connector_output = calls.post_forward(finished, defer_finalize=True)
            self._queue_drafter(step)
            calls.finalize_step()
        else:
            self._queue_drafter(step)
            connector_output = calls.post_forward(finished)
        return Answer(self, step, connector_output)

    def judge(self, step, connector_output):
        """Keep what was wrong, but for blocks that the scheduler is told of: a load within the step failed."""
        told = connector_output.invalid_block_ids if connector_output is not None else set()
        for wrong in step.wrong:
            if (told | step.spoiled).issuperset(wrong.blocks):  # by others of this step: it is computed again whole
                self.num_excused += 1
            else:
                self.memory.wrong.append(wrong)

    def take_draft_token_ids(self):
        """Return the drafts of the last step, for a scheduler that is to know them."""
        self.gpu.finish(self._last.is_over)
        return DraftTokenIds(list(self._last.drafts), list(self._last.drafts.values()))

    def change_weights(self):
        """Let all keys and values be others from here on in the work on the stream."""
        self.gpu.enqueue(ENGINE, self.memory.change_weights, label="weights")

    # What is queued on the engine's stream.

    def _update_states(self, output):
        step = Step(Plan.of(output))
        self.gpu.enqueue(ENGINE, lambda: self._apply(step.plan), label="states")
        return step

    def _apply(self, plan):
        for request in plan.gone:
            self._sequences.pop(request, None)
        for request, tokens, blocks, num_computed, num_prompt in plan.new:
            self._sequences[request] = Sequence(request, tokens, blocks, num_computed, num_prompt)
        for request, tokens, blocks, num_computed, num_output in plan.cached:
            sequence = self._sequences[request]
            if tokens is not None:
                sequence.replace_tokens(tokens)
                sequence.blocks = blocks
            elif blocks:
                for known, more in zip(sequence.blocks, blocks, strict=True):
                    known.extend(more)
            if not (self._is_async and self.setup.num_drafts) or tokens is not None:
                sequence.num_computed = num_computed
            del sequence.tokens[sequence.num_prompt + num_output :]  # a load within a step failed
        if plan.zeroed:
            self.memory.zero(plan.zeroed)
        if plan.copied:
            self.memory.copy_blocks(plan.copied)

    def _queue_forward(self, step):
        def run():
            batch = []
            for request, num_tokens in step.plan.num_tokens.items():
                sequence = self._sequences[request]
                batch.append((sequence, num_tokens, self._drafts_of(sequence, step.plan.drafts.get(request, []))))
                step.batch.append((sequence, sequence.num_computed))
            num_wrong = len(self.memory.wrong)
            self.memory.spoiled = step.spoiled
            sampled = forward(self.memory, batch)
            step.wrong = self.memory.wrong[num_wrong:]
            del self.memory.wrong[num_wrong:]
            step.sampled = dict(zip(step.plan.num_tokens, sampled, strict=True))
            step.is_sampled.set()
            if not self.setup.num_drafts:
                step.is_over.set()

        self.gpu.enqueue(ENGINE, run, label="forward")

    def _drafts_of(self, sequence, scheduled):
        """Return what the scheduler knows of, or what the device knows where it has placeholders, or what is wrong."""
        if -1 not in scheduled:
            return scheduled
        return (sequence.drafts + scheduled)[: len(scheduled)]

    def _queue_drafter(self, step):
        def run():
            propose(self.memory, step.batch, self.setup.num_drafts)
            step.drafts = {sequence.request: list(sequence.drafts) for sequence, _ in step.batch}
            step.is_over.set()

        if self.setup.num_drafts:
            self.gpu.enqueue(ENGINE, run, label="drafter")

    def _become_current(self):
        """Let vLLM's own classes find this rank's connector: they know one for each process."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector


class Answer:
    """What a rank answers with once the device has come to it."""

    def __init__(self, rank, step, connector_output):
        self._rank = rank
        self._step = step
        self._connector_output = connector_output

    def get(self):
        # The second runner copies what was sampled before its drafter runs, and so hears of it before that is over.
        self._rank.gpu.finish(self._step.is_sampled if self._rank.setup.is_second else self._step.is_over)
        self._rank.judge(self._step, self._connector_output)
        requests = list(self._step.plan.num_tokens)
        return ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: number for number, request in enumerate(requests)},
            sampled_token_ids=[self._step.sampled[request] for request in requests],
            kv_connector_output=self._connector_output,
        )


def _describe_as_on_gpu(*arguments, **options):
    layout = _describe_kv_caches(*arguments, **options)
    return type(layout)(layout.groups, on_host=False)


def _block_copies(output):
    return getattr(output, "kv_cache_block_copies", None) or ()


def _lists(blocks):
    return [list(each) for each in blocks]
