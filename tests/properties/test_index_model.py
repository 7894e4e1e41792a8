"""The index and its slots against a plain model that does everything the obvious way, in lists."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvmoor.block_key import BlockKey
from kvmoor.errors import RequestError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.lease import Lease, LoadLease, StoreLease
from kvmoor.transfer_messages import SlotRange

NUM_GROUPS = 2
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


@dataclass(eq=False)
class Block:
    """One block in one slot, from the moment a store begins until the slot is free again."""

    key: BlockKey
    slot: int
    ready: bool = False
    held: bool = False
    num_loads: int = 0


@dataclass
class Model:
    """What an index does, the obvious way."""

    capacity: list[int] = field(default_factory=lambda: [0] * NUM_GROUPS)
    blocks: list[Block] = field(default_factory=list)
    """Every block that occupies a slot."""
    visible: dict[BlockKey, Block] = field(default_factory=dict)
    oldest_first: list[BlockKey] = field(default_factory=list)
    """Ready blocks that are not leased: what may be evicted, and in which order, of all groups."""
    num_evicted: int = 0

    def is_idle(self, key: BlockKey) -> bool:
        block = self.visible.get(key)
        return block is not None and block.ready and block.num_loads == 0

    def use(self, keys: list[BlockKey]) -> None:
        """Make idle blocks the most recent ones, the first the very most."""
        for key in reversed(keys):
            if self.is_idle(key):
                if key in self.oldest_first:
                    self.oldest_first.remove(key)
                self.oldest_first.append(key)

    def prepare_store(self, keys: list[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]] | None:
        """Return the new keys and the evicted ones of each group in turn, or None."""
        new = [key for key in keys if key not in self.visible]
        evicted: list[BlockKey] = []
        for group in dict.fromkeys(key.group for key in keys):
            num_free = self.capacity[group] - sum(block.key.group == group for block in self.blocks)
            missing = max(0, sum(key.group == group for key in new) - num_free)
            candidates = [key for key in self.oldest_first if key.group == group and key not in keys]
            if len(candidates) < missing:
                return None
            evicted += candidates[:missing]
        for key in evicted:
            self.oldest_first.remove(key)
            self.blocks.remove(self.visible.pop(key))
        self.num_evicted += len(evicted)
        self.use(keys)
        return new, evicted

    def start(self, lease: StoreLease) -> list[Block]:
        started = [Block(key, slot) for key, slot in zip(lease.keys, lease.slots, strict=True)]
        for block in started:
            assert not any((block.slot, block.key.group) == (other.slot, other.key.group) for other in self.blocks), (
                "a slot was given to two blocks"
            )
            assert 0 <= block.slot < self.capacity[block.key.group]
            self.visible[block.key] = block
            self.blocks.append(block)
        return started

    def complete(self, started: list[Block], call_keys: list[BlockKey]) -> int:
        num_ready = 0
        for block in started:
            if self.visible.get(block.key) is block:
                block.ready = True
                num_ready += 1
            else:
                self.blocks.remove(block)
        self.use(call_keys)
        return num_ready

    def fail(self, started: list[Block]) -> None:
        for block in started:
            if self.visible.get(block.key) is block:
                del self.visible[block.key]

    def match(self, keys: list[BlockKey]) -> list[Block]:
        matched: list[Block] = []
        for key in keys:
            block = self.visible.get(key)
            if block is None or not block.ready:
                break
            block.num_loads += 1
            if key in self.oldest_first:
                self.oldest_first.remove(key)
            matched.append(block)
        return matched

    def release(self, matched: list[Block]) -> None:
        for block in matched:
            block.num_loads -= 1
        for block in matched:
            if self.visible.get(block.key) is not block and block.num_loads == 0:
                self.blocks.remove(block)
        self.use([block.key for block in matched if self.visible.get(block.key) is block])

    def forget(self, keys: list[BlockKey]) -> int:
        num_ready = 0
        for key in keys:
            block = self.visible.pop(key, None)
            if block is None or not block.ready:
                continue
            num_ready += 1
            if block.num_loads == 0:
                self.oldest_first.remove(key)
                self.blocks.remove(block)
        return num_ready


class IndexMachine(RuleBasedStateMachine):
    """Do the same to an index and to the model, and compare them after each step."""

    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(NUM_GROUPS)
        self.model = Model()
        self.stores: list[tuple[StoreLease, list[Block]]] = []
        self.held: list[tuple[StoreLease, list[Block]]] = []
        self.loads: list[tuple[LoadLease, list[Block]]] = []
        self.resolved: list[Lease] = []

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
        lease = self.index.prepare_store(keys)
        if expected is None:
            assert lease is None
            return
        assert lease is not None
        new, evicted = expected
        assert tuple(new) == lease.keys
        assert tuple(evicted) == lease.evicted_keys
        assert len(keys) - len(new) == lease.num_known
        self.stores.append((lease, self.model.start(lease)))

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
        lease, started = self.take(self.stores, number)
        assert self.model.complete(started, list(lease.call_keys)) == self.index.complete(lease)

    @precondition(lambda self: self.stores)
    @rule(number=pick)
    def abort_store(self, number: int) -> None:
        lease, started = self.take(self.stores, number)
        self.model.fail(started)
        for block in started:
            self.model.blocks.remove(block)
        self.index.abort(lease)

    @precondition(lambda self: self.stores)
    @rule(number=pick)
    def hold_store(self, number: int) -> None:
        lease, started = self.take(self.stores, number)
        self.model.fail(started)
        for block in started:
            block.held = True
        self.index.hold(lease)
        self.held.append((lease, started))

    @precondition(lambda self: self.held)
    @rule(number=pick)
    def release_held(self, number: int) -> None:
        lease, started = self.held.pop(number % len(self.held))
        for block in started:
            self.model.blocks.remove(block)
        self.index.release_held(lease)

    @rule(keys=some_keys)
    def match(self, keys: list[BlockKey]) -> None:
        matched = self.model.match(keys)
        lease = self.index.match(keys)
        assert [(block.key, block.slot) for block in matched] == list(zip(lease.keys, lease.slots, strict=True))
        self.loads.append((lease, matched))

    @precondition(lambda self: self.model.visible)
    @rule(number=pick)
    def match_what_is_there(self, number: int) -> None:
        """Match in the order in which blocks were stored, so that several are found."""
        there = list(self.model.visible)
        self.match(there[number % len(there) :])

    @precondition(lambda self: self.loads)
    @rule(number=pick, kept=pick)
    def keep(self, number: int, kept: int) -> None:
        lease, matched = self.loads[number % len(self.loads)]
        kept %= len(matched) + 1
        self.model.release(matched[kept:])
        del matched[kept:]
        lease.keep(kept)
        assert [(block.key, block.slot) for block in matched] == list(zip(lease.keys, lease.slots, strict=True))

    @precondition(lambda self: self.loads)
    @rule(number=pick)
    def complete_load(self, number: int) -> None:
        lease, matched = self.take(self.loads, number)
        self.model.release(matched)
        assert 0 == self.index.complete(lease)

    @precondition(lambda self: self.loads)
    @rule(number=pick)
    def abort_load(self, number: int) -> None:
        lease, matched = self.take(self.loads, number)
        self.model.release(matched)
        self.index.abort(lease)

    @rule(keys=some_keys)
    def forget(self, keys: list[BlockKey]) -> None:
        assert self.model.forget(keys[:2]) == self.index.forget(keys[:2])

    @precondition(lambda self: self.stores or self.loads)
    @rule(number=pick)
    def forget_what_is_leased(self, number: int) -> None:
        leases = [*self.stores, *self.loads]
        lease, _ = leases[number % len(leases)]
        assert self.model.forget(list(lease.keys)) == self.index.forget(lease.keys)

    @precondition(lambda self: self.stores or self.held)
    @rule(number=pick)
    def store_again(self, number: int) -> None:
        """Store what a store under way, or one that was given up, names: it may have been forgotten since."""
        leases = [*self.stores, *self.held]
        lease, _ = leases[number % len(leases)]
        self.prepare_store(list(lease.call_keys))

    @precondition(lambda self: len(self.model.visible) > 3)
    @rule()
    def clear(self) -> None:
        assert self.model.forget(list(self.model.visible)) == self.index.clear()

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
    def index_and_model_agree(self) -> None:
        expected = {
            key: BlockState.READY if block.ready else BlockState.WRITING for key, block in self.model.visible.items()
        }
        found = {key: self.index.state(key) for key in KEYS}
        assert expected == {key: state for key, state in found.items() if state is not BlockState.ABSENT}
        assert self.model.num_evicted == self.index.num_evicted
        for group in range(NUM_GROUPS):
            blocks = [block for block in self.model.blocks if block.key.group == group]
            usage = self.index.slot_usage(group)
            assert self.model.capacity[group] == usage.published
            assert self.model.capacity[group] - len(blocks) == usage.free
            assert sum(block.held for block in blocks) == usage.held
            assert sum(not block.ready and not block.held for block in blocks) == usage.writing
            assert sum(self.model.visible.get(block.key) is block for block in blocks if block.ready) == usage.ready
            assert sum(block.num_loads > 0 for block in blocks) == usage.leased
            assert sum(key.group == group for key in self.model.oldest_first) == usage.evictable
        loads = [lease for lease in self.index.unresolved_leases() if isinstance(lease, LoadLease)]
        assert all(lease.keys for lease in loads)  # an empty match is nobody's business
        assert len(self.stores) == len(self.index.unresolved_leases()) - len(loads)

    def take(self, leases: list, number: int) -> tuple:
        """Remove a lease from those still open."""
        taken = leases.pop(number % len(leases))
        self.resolved = [*self.resolved[-3:], taken[0]]
        return taken

    def teardown(self) -> None:
        """Resolve what is left: no lease remains and every slot is free or holds a block that is found."""
        for lease, _ in [*self.stores, *self.loads]:
            self.index.abort(lease)
        for lease, _ in self.held:
            self.index.release_held(lease)
        self.index.check_invariants()
        assert [] == self.index.unresolved_leases()
        assert (0, 0, 0) == (self.index.num_leased, self.index.num_writing, self.index.num_held)
        self.index.clear()
        self.index.check_invariants()
        for group in range(NUM_GROUPS):
            usage = self.index.slot_usage(group)
            assert usage.published == usage.free


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
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )

    assert 10_000 <= IndexMachine.num_steps
