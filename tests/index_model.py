"""What a block index does, the obvious way: in lists, one block at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmoor.block_key import BlockKey
from kvmoor.index.lease import StoreLease
from kvmoor.index.waiting import WaitState

NUM_GROUPS = 2


@dataclass(eq=False)
class Block:
    """One block in one slot, from the moment a store begins until the slot is free again."""

    key: BlockKey
    slot: int
    generation: int
    """How many resets there were before its store began."""
    ready: bool = False
    held: bool = False
    dropped: bool = False
    """Nobody finds it any more for another reason than a reset."""
    num_loads: int = 0


@dataclass(eq=False)
class Load:
    """What a match holds."""

    blocks: list[Block]
    holder: str | None = None
    deadline_s: float | None = None
    in_flight: bool = False
    ends_with_load: bool = False
    """Its holder or its time has gone while its load was under way."""
    done: bool = False


@dataclass(eq=False)
class Wait:
    """Who waits for which blocks."""

    keys: list[BlockKey]
    pending: list[Block]
    load: Load
    """What is there."""
    holder: str | None
    deadline_s: float | None
    state: WaitState = WaitState.WAITING


@dataclass
class IndexModel:
    """Do what an index does."""

    capacity: list[int] = field(default_factory=lambda: [0] * NUM_GROUPS)
    blocks: list[Block] = field(default_factory=list)
    """Every block that occupies a slot."""
    visible: dict[BlockKey, Block] = field(default_factory=dict)
    idle: list[Block] = field(default_factory=list)
    """Whole blocks that are not leased, of all groups and of before resets too: what may give way, oldest use first."""
    generation: int = 0
    num_evicted: int = 0
    claims: list[Load | Wait] = field(default_factory=list)
    """Open matches that are not empty, and who waits, oldest first."""
    ended: list[Wait] = field(default_factory=list)
    """Whose waiting has ended, not told yet."""

    def is_found(self, block: Block) -> bool:
        return self.visible.get(block.key) is block

    def use(self, blocks: Sequence[Block]) -> None:
        """Make blocks that are whole, not leased and not dropped the most recent ones, the first the very most."""
        for block in reversed(blocks):
            if block.ready and not block.num_loads and not block.dropped and block in self.blocks:
                if block in self.idle:
                    self.idle.remove(block)
                self.idle.append(block)

    def ready_blocks(self, keys: Sequence[BlockKey]) -> list[Block]:
        return [self.visible[key] for key in keys if key in self.visible and self.visible[key].ready]

    def prepare_store(self, keys: list[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]] | None:
        """Return the new keys and the evicted ones of each group in turn, or None."""
        new = [key for key in keys if key not in self.visible]
        victims: list[Block] = []
        for group in dict.fromkeys(key.group for key in keys):
            num_free = self.capacity[group] - sum(block.key.group == group for block in self.blocks)
            missing = max(0, sum(key.group == group for key in new) - num_free)
            candidates = [block for block in self.idle if block.key.group == group]
            candidates = [block for block in candidates if block.key not in keys or not self.is_found(block)]
            candidates.sort(key=lambda block: block.generation)  # of one time, the order stays
            if len(candidates) < missing:
                return None
            victims += candidates[:missing]
        evicted = [block.key for block in victims if block.generation == self.generation]
        for block in victims:
            self.idle.remove(block)
            self.blocks.remove(block)
        for key in evicted:
            del self.visible[key]
        self.num_evicted += len(evicted)
        self.use(self.ready_blocks(keys))
        return new, evicted

    def start(self, lease: StoreLease) -> tuple[list[Block], list[Block]]:
        """Return the blocks of a store, and all blocks that its call named."""
        started = [Block(key, slot, self.generation) for key, slot in zip(lease.keys, lease.slots, strict=True)]
        for block in started:
            assert not any((block.slot, block.key.group) == (other.slot, other.key.group) for other in self.blocks), (
                "a slot was given to two blocks"
            )
            assert 0 <= block.slot < self.capacity[block.key.group]
            self.visible[block.key] = block
            self.blocks.append(block)
        return started, [self.visible[key] for key in lease.call_keys]

    def complete(self, started: list[Block], named: list[Block]) -> int:
        """Make blocks whole unless nobody would find them; `named` are all that the store's call named."""
        num_ready = 0
        for block in started:
            if self.is_found(block):
                block.ready = True
                num_ready += 1
            else:
                self.blocks.remove(block)
        self.use([block for block in named if self.is_found(block)])
        self.end_waiting(started, named)
        return num_ready

    def fail(self, started: list[Block], named: list[Block], *, hold: bool) -> None:
        for block in started:
            if self.is_found(block):
                del self.visible[block.key]
            block.held = hold
            if not hold:
                self.blocks.remove(block)
        self.end_waiting(started, named)

    def match(self, keys: Sequence[BlockKey], holder: str | None = None, deadline_s: float | None = None) -> Load:
        matched: list[Block] = []
        for key in keys:
            block = self.visible.get(key)
            if block is None or not block.ready:
                break
            block.num_loads += 1
            if block in self.idle:
                self.idle.remove(block)
            matched.append(block)
        load = Load(matched, holder, deadline_s)
        if matched:
            self.claims.append(load)
        return load

    def release(self, load: Load, kept: int = 0) -> None:
        """Release all but the first blocks of a match; all of them end it."""
        given_back = load.blocks[kept:]
        del load.blocks[kept:]
        if not kept and load in self.claims:
            self.claims.remove(load)
        for block in given_back:
            block.num_loads -= 1
            if block.dropped and not block.num_loads:
                self.blocks.remove(block)
        self.use(given_back)

    def end_load(self, load: Load) -> None:
        load.done = True
        self.release(load)

    def cancel_load(self, load: Load) -> None:
        load.in_flight = False
        if load.ends_with_load:
            self.end_load(load)

    def forget(self, keys: Sequence[BlockKey]) -> int:
        num_ready = 0
        for key in keys:
            block = self.visible.pop(key, None)
            if block is None or not block.ready:
                continue
            block.dropped = True
            num_ready += 1
            if not block.num_loads:
                self.idle.remove(block)
                self.blocks.remove(block)
        return num_ready

    def reset(self) -> int:
        """Forget all; the caller ends the waiting, in whichever order."""
        num_ready = len(self.ready_blocks(list(self.visible)))
        self.visible.clear()
        self.generation += 1
        return num_ready

    def touch(self, keys: Sequence[BlockKey]) -> int:
        ready = self.ready_blocks(keys)
        self.use(ready)
        return len(ready)

    def join(self, keys: Sequence[BlockKey], holder: str | None, deadline_s: float | None) -> Wait:
        coming = []
        for key in keys:
            if key not in self.visible:
                break
            coming.append(key)
        pending = [self.visible[key] for key in coming if not self.visible[key].ready]
        wait = Wait(coming, pending, self.match(coming, holder), holder, deadline_s)
        if pending:
            self.claims.append(wait)
        else:
            wait.state = WaitState.READY
        return wait

    def waits(self) -> list[Wait]:
        return [claim for claim in self.claims if isinstance(claim, Wait)]

    def end_waiting(self, started: list[Block], named: list[Block]) -> None:
        """Note that the blocks of a store are not being written any more."""
        for group in dict.fromkeys(block.key.group for block in named):
            done = []
            for block in started:
                for wait in self.waits():
                    if block.key.group == group and block in wait.pending:
                        wait.pending.remove(block)
                        if not wait.pending:
                            done.append(wait)
            for wait in done:
                self.end_wait(wait, WaitState.PARTIAL)

    def end_wait(self, wait: Wait, state: WaitState) -> None:
        self.claims.remove(wait)
        before = wait.load
        if state is not WaitState.CANCELLED:
            wait.load = self.match(wait.keys, wait.holder)
            if len(wait.load.blocks) == len(wait.keys):
                state = WaitState.READY
            self.ended.append(wait)
        wait.state = state
        if before.in_flight:
            before.ends_with_load = True
        elif before.blocks and not before.done:
            self.end_load(before)

    def release_holder(self, holder: str) -> int:
        mine = [claim for claim in self.claims if claim.holder == holder]
        return sum([self.give_back(claim, WaitState.CANCELLED) for claim in mine])

    def expire(self, now_s: float) -> int:
        due = [claim for claim in self.claims if claim.deadline_s is not None and claim.deadline_s <= now_s]
        due.sort(key=lambda claim: claim.deadline_s or 0.0)
        return sum([self.give_back(claim, WaitState.EXPIRED) for claim in due])

    def give_back(self, claim: Load | Wait, state: WaitState) -> bool:
        if isinstance(claim, Wait):
            self.end_wait(claim, state)
        elif claim.in_flight:
            claim.ends_with_load = True
            return False
        else:
            self.end_load(claim)
        return True
