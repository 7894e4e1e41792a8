"""The index and its slots against a plain model that does everything the obvious way, in lists."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from index_model import NUM_GROUPS, Block, IndexModel, Load, Wait
from index_steps import assert_no_slot_lost
from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.errors import RequestError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.lease import Lease, LoadLease, StoreLease
from kvmoor.index.waiting import Waiter, WaitState
from kvmoor.transfer_messages import SlotRange

MAX_SLOTS = 5  # of a group: fewer than there are keys, so that stores evict
KEYS = [BlockKey(bytes([number]) * 32, group) for number in range(7) for group in range(NUM_GROUPS)]
PROMPTS = [
    *([key for key in KEYS if key.group == group] for group in range(NUM_GROUPS)),
    [key for key in reversed(KEYS) if key.group == 0],
    KEYS,
]

some_keys = st.one_of(
    st.builds(
        lambda prompt, start, count: PROMPTS[prompt][start : start + count],
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, 2),
        st.integers(1, 5),
    ),
    st.lists(st.sampled_from(KEYS), unique=True, max_size=5),
)
pick = st.integers(0, 99)
holders = st.sampled_from([None, "a", "b"])
patience_s = st.one_of(st.none(), st.integers(0, 2))


def as_given(keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
    """Return keys as a list, or as `BlockKeys` where they are of one group and of an odd number."""
    if len(keys) % 2 and len({key.group for key in keys}) == 1:
        return BlockKeys([key.digest for key in keys], keys[0].group)
    return list(keys)


def content(lease: Lease) -> list[tuple[BlockKey, int]]:
    return list(zip(lease.keys, lease.slots, strict=True))


def expected_content(load: Load) -> list[tuple[BlockKey, int]]:
    return [(block.key, block.slot) for block in load.blocks]


class IndexMachine(RuleBasedStateMachine):
    """Do the same to an index and to the model, and compare them after each step."""

    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(NUM_GROUPS)
        self.model = IndexModel()
        self.stores: list[tuple[StoreLease, list[Block], list[Block]]] = []
        self.held: list[tuple[StoreLease, list[Block]]] = []
        self.loads: list[tuple[LoadLease, Load]] = []
        self.waits: list[tuple[Waiter, Wait]] = []
        self.resolved: list[Lease] = []
        self.now_s = 0.0
        self.num_deadlines = 0

    @initialize(counts=st.tuples(*[st.integers(0, MAX_SLOTS)] * NUM_GROUPS))
    def publish_first(self, counts: tuple[int, ...]) -> None:
        for group, count in enumerate(counts):
            self.index.publish(SlotRange(group, 0, count))
            self.model.capacity[group] = count

    @precondition(lambda self: min(self.model.capacity) < MAX_SLOTS)
    @rule(count=st.integers(1, 2))
    def publish(self, count: int) -> None:
        group = self.model.capacity.index(min(self.model.capacity))
        self.index.publish(SlotRange(group, self.model.capacity[group], count))
        self.model.capacity[group] += count

    @rule(keys=some_keys)
    def prepare_store(self, keys: list[BlockKey]) -> None:
        expected = self.model.prepare_store(keys)
        lease = self.index.prepare_store(as_given(keys))
        if expected is None:
            assert lease is None
            return
        assert lease is not None
        new, evicted = expected
        assert new == list(lease.keys)
        assert evicted == list(lease.evicted_keys)
        assert (len(new), len(keys) - len(new), len(evicted)) == (len(lease), lease.num_known, lease.num_evicted)
        self.stores.append((lease, *self.model.start(lease)))

    @rule(keys=some_keys)
    def store_at_once(self, keys: list[BlockKey]) -> None:
        """Prepare and complete, so that there are blocks to match and to evict."""
        num_stores = len(self.stores)
        self.prepare_store(keys)
        if len(self.stores) > num_stores:
            self.complete_store(num_stores)

    @precondition(lambda self: self.stores)
    @rule(number=pick)
    def complete_store(self, number: int) -> None:
        lease, started, named = self.take(self.stores, number)
        assert self.model.complete(started, named) == self.index.complete(lease)

    @precondition(lambda self: self.stores)
    @rule(number=pick)
    def abort_store(self, number: int) -> None:
        lease, started, named = self.take(self.stores, number)
        self.model.fail(started, named, hold=False)
        self.index.abort(lease)

    @precondition(lambda self: self.stores)
    @rule(number=pick)
    def hold_store(self, number: int) -> None:
        lease, started, named = self.take(self.stores, number)
        self.model.fail(started, named, hold=True)
        self.index.hold(lease)
        self.held.append((lease, started))

    @precondition(lambda self: self.held)
    @rule(number=pick)
    def release_held(self, number: int) -> None:
        lease, started = self.held.pop(number % len(self.held))
        for block in started:
            self.model.blocks.remove(block)
        self.index.release_held(lease)

    @rule(keys=some_keys, holder=holders, patience=patience_s)
    def match(self, keys: list[BlockKey], holder: str | None = None, patience: int | None = None) -> None:
        deadline_s = self.deadline_s(patience)
        load = self.model.match(keys, holder, deadline_s)
        lease = self.index.match(as_given(keys), holder=holder, deadline_s=deadline_s)
        assert expected_content(load) == content(lease)
        self.loads.append((lease, load))

    @precondition(lambda self: self.model.visible)
    @rule(number=pick, holder=holders, patience=patience_s)
    def match_what_is_there(self, number: int, holder: str | None, patience: int | None) -> None:
        """Match in the order in which blocks were stored, so that several are found."""
        there = list(self.model.visible)
        self.match(there[number % len(there) :], holder, patience)

    @precondition(lambda self: self.loads)
    @rule(number=pick, kept=pick)
    def keep(self, number: int, kept: int) -> None:
        lease, load = self.loads[number % len(self.loads)]
        kept %= len(load.blocks) + 1
        if load.in_flight:
            with pytest.raises(RequestError):
                lease.keep(kept)
            return
        self.model.release(load, kept)
        lease.keep(kept)

    @precondition(lambda self: self.loads)
    @rule(number=pick)
    def start_load(self, number: int) -> None:
        lease, load = self.loads[number % len(self.loads)]
        load.in_flight = True
        self.index.start_load(lease)

    @precondition(lambda self: any(wait.load.blocks for wait in self.model.waits()))
    @rule()
    def load_the_beginning(self) -> None:
        """Load what somebody who waits for more has already."""
        for waiter, wait in self.waits:
            if wait.state is WaitState.WAITING and wait.load.blocks and not wait.load.done:
                wait.load.in_flight = True
                self.index.start_load(waiter.lease)

    @precondition(lambda self: any(load.in_flight for _, load in self.loads))
    @rule(number=pick)
    def cancel_load(self, number: int) -> None:
        in_flight = [(lease, load) for lease, load in self.loads if load.in_flight]
        lease, load = in_flight[number % len(in_flight)]
        self.model.cancel_load(load)
        self.index.cancel_load(lease)

    @precondition(lambda self: self.loads)
    @rule(number=pick)
    def complete_load(self, number: int) -> None:
        lease, load = self.take(self.loads, number)
        self.model.end_load(load)
        assert 0 == self.index.complete(lease)

    @precondition(lambda self: self.loads)
    @rule(number=pick)
    def abort_load(self, number: int) -> None:
        lease, load = self.take(self.loads, number)
        self.model.end_load(load)
        self.index.abort(lease)

    @rule(keys=some_keys, holder=holders, patience=patience_s)
    def join(self, keys: list[BlockKey], holder: str | None, patience: int | None) -> None:
        deadline_s = self.deadline_s(patience)
        wait = self.model.join(keys, holder, deadline_s)
        waiter = self.index.join(as_given(keys), holder=holder, deadline_s=deadline_s)
        assert wait.keys == list(waiter.keys)
        self.loads.append((waiter.lease, wait.load))
        self.waits.append((waiter, wait))

    @precondition(lambda self: self.stores)
    @rule(number=pick, holder=holders, patience=patience_s)
    def join_a_store(self, number: int, holder: str | None, patience: int | None) -> None:
        """Join what is stored just now, behind something that is there already."""
        keys = self.stores[number % len(self.stores)][0].call_keys
        there = [key for key, block in self.model.visible.items() if block.ready and key not in keys]
        self.join([*there[: number % 3], *keys], holder, patience)

    @rule()
    def take_ended_waiters(self) -> None:
        ended = self.index.take_ended_waiters()
        wait_of = {id(waiter): wait for waiter, wait in self.waits}
        told = [wait for wait in self.model.ended if not wait.load.done]
        assert told == [wait_of[id(waiter)] for waiter in ended]
        self.model.ended = []
        for waiter in ended:
            self.loads.append((waiter.lease, wait_of[id(waiter)].load))

    @rule(holder=st.sampled_from(["a", "b"]))
    def end_request(self, holder: str) -> None:
        assert self.model.release_holder(holder) == self.index.release_holder(holder)

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        assert self.model.expire(self.now_s) == self.index.expire(self.now_s)

    @rule(keys=some_keys)
    def touch(self, keys: list[BlockKey]) -> None:
        assert self.model.touch(keys) == self.index.touch(as_given(keys))

    @rule(keys=some_keys)
    def forget(self, keys: list[BlockKey]) -> None:
        assert self.model.forget(keys[:2]) == self.index.forget(as_given(keys[:2]))

    @precondition(lambda self: self.stores or self.loads)
    @rule(number=pick)
    def forget_what_is_leased(self, number: int) -> None:
        leases = [*self.stores, *self.loads]
        lease = leases[number % len(leases)][0]
        assert self.model.forget(list(lease.keys)) == self.index.forget(lease.keys)

    @precondition(lambda self: self.stores or self.held)
    @rule(number=pick)
    def store_again(self, number: int) -> None:
        """Store what a store under way, or one that was given up, names: it may have been forgotten since."""
        leases = [*self.stores, *self.held]
        lease = leases[number % len(leases)][0]
        self.prepare_store(list(lease.call_keys))

    @precondition(lambda self: len(self.model.visible) > 3)
    @rule()
    def reset(self) -> None:
        self.take_ended_waiters()
        assert self.model.reset() == self.index.reset()
        wait_of = {id(waiter): wait for waiter, wait in self.waits}
        ended = self.index.take_ended_waiters()  # all at once, so in whichever order
        for waiter in ended:
            self.model.end_wait(wait_of[id(waiter)], WaitState.PARTIAL)
        assert [] == self.model.waits()
        self.model.ended = []

    @precondition(lambda self: self.resolved)
    @rule(number=pick)
    def resolve_again(self, number: int) -> None:
        lease = self.resolved[number % len(self.resolved)]
        with pytest.raises(RequestError):
            self.index.complete(lease)

    @rule(keys=some_keys.filter(bool))
    def name_a_key_twice(self, keys: list[BlockKey]) -> None:
        with pytest.raises(RequestError):
            self.index.prepare_store([*keys, keys[0]])

    @invariant()
    def books_balance(self) -> None:
        IndexMachine.num_steps += 1
        self.index.check_invariants()

    @invariant()
    def index_and_model_find_the_same(self) -> None:
        expected = {
            key: BlockState.READY if block.ready else BlockState.WRITING for key, block in self.model.visible.items()
        }
        found = {key: self.index.lookup(key) for key in KEYS}
        assert expected == {key: state for key, state in found.items() if state is not BlockState.ABSENT}
        assert self.model.num_evicted == self.index.num_evicted

    @invariant()
    def index_and_model_use_the_same_slots(self) -> None:
        for group in range(NUM_GROUPS):
            blocks = [block for block in self.model.blocks if block.key.group == group]
            old = [block for block in blocks if block.generation < self.model.generation and not block.dropped]
            usage = self.index.slot_usage(group)
            assert self.model.capacity[group] == usage.published
            assert self.model.capacity[group] - len(blocks) == usage.free
            assert sum(block.held for block in blocks) == usage.held
            assert sum(not block.ready and not block.held for block in blocks) == usage.writing
            assert sum(self.model.is_found(block) for block in blocks if block.ready) == usage.ready
            assert sum(block.ready for block in old) == usage.outdated
            assert sum(block.dropped for block in blocks) == usage.draining
            assert sum(block.num_loads > 0 for block in blocks) == usage.leased
            evictable = [block for block in self.model.idle if block.key.group == group]
            assert sum(self.model.is_found(block) for block in evictable) == usage.evictable

    @invariant()
    def index_and_model_have_the_same_claims(self) -> None:
        for waiter, wait in self.waits:
            assert wait.state is waiter.state
            if wait.state is WaitState.WAITING:
                assert len(wait.pending) == waiter.num_pending
        assert bool(self.model.waits()) == bool(self.index._waiting)
        for lease, load in self.loads:
            assert (load.done, load.holder) == (lease.resolved, lease.holder)
            assert load.done or (load.in_flight, expected_content(load)) == (lease.in_flight, content(lease))
        open_leases = self.index.unresolved_leases()
        loads = [load for load in self.model.claims if isinstance(load, Load)]
        assert [expected_content(load) for load in loads] == [
            content(lease) for lease in open_leases if isinstance(lease, LoadLease)
        ]
        assert len(self.stores) == len(open_leases) - len(loads)
        self.loads = [(lease, load) for lease, load in self.loads if not load.done]

    def deadline_s(self, patience: int | None) -> float | None:
        """Return a deadline that no other claim has, so that it is clear which one is over first."""
        self.num_deadlines += 1
        return None if patience is None else self.now_s + patience + self.num_deadlines * 1e-3

    def take(self, leases: list, number: int) -> tuple:
        """Remove a lease from those still open."""
        taken = leases.pop(number % len(leases))
        self.resolved = [*self.resolved[-3:], taken[0]]
        return taken

    def teardown(self) -> None:
        """Resolve what is left: no lease remains and every slot can be filled anew."""
        for lease, _, _ in self.stores:
            self.index.abort(lease)
        for lease, _ in self.held:
            self.index.release_held(lease)
        for lease in self.index.unresolved_leases():
            self.index.abort(lease)
        self.index.check_invariants()
        assert (0, 0, 0) == (self.index.num_leased, self.index.num_writing, self.index.num_held)
        assert all(waiter.state is not WaitState.WAITING for waiter, _ in self.waits)
        assert_no_slot_lost(self.index)


def test_index_behaves_like_the_model() -> None:
    """On 400 runs of up to 50 steps the index finds, evicts and counts what the model does, and its books balance."""
    IndexMachine.num_steps = 0

    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=400,
            stateful_step_count=50,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,  # else looking for the smallest steps may take longer than a test may
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )

    assert 10_000 <= IndexMachine.num_steps
