"""Tiers in ordered dictionaries, by the rules as docs/simulate.md has them: what a tiered replay is held against."""

from collections import OrderedDict
from itertools import takewhile


class PlainTier:
    """A cache that evicts what was used least recently, of one prompt the end first."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.oldest_first = OrderedDict()
        self.loading = []
        self.hits = self.stored = self.evicted = 0

    def use(self, blocks):
        for block in reversed(blocks):
            self.oldest_first[block] = None
            self.oldest_first.move_to_end(block)

    def begin_load(self, blocks):
        self.loading += blocks

    def end_loads(self):
        self.use(self.loading)
        self.loading = []

    def enter_device(self, blocks):
        pass

    def leave_device(self, blocks):
        pass

    def store(self, blocks):
        """Return what is written, and what the next tier may have."""
        num_free = self.capacity - len(self.oldest_first)
        room = num_free + len(self.oldest_first) - len(self.loading)
        named = blocks[: self.capacity]
        new, others = self._new_and_others(named)
        if len(new) > num_free + len(others):
            named = named[:room]
            new, others = self._new_and_others(named)
        gone = others[: max(0, len(new) - num_free)]
        self._let_go(gone)
        self._take_in([block for block in named if block not in self.loading])
        self.stored += len(new)
        self.evicted += len(gone)
        unfit = blocks[len(named) :]
        return new, unfit + [block for block in reversed(gone) if block not in unfit]

    def _let_go(self, blocks):
        for block in blocks:
            del self.oldest_first[block]

    def _take_in(self, blocks):
        self.use(blocks)

    def _first_to_go(self):
        return list(self.oldest_first)

    def _new_and_others(self, named):
        new = [block for block in named if block not in self.oldest_first]
        return new, [block for block in self._first_to_go() if block not in named and block not in self.loading]


class PlainDeviceLru(PlainTier):
    """A cache that evicts first what was loaded from it and is on the device; leaving the device is a use."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.loaded = set()  # and since then neither stored nor dropped by the device
        self.doubled = set()

    def begin_load(self, blocks):
        super().begin_load(blocks)
        self.loaded |= set(blocks)

    def enter_device(self, blocks):
        entering = [block for block in blocks if block in self.loaded - self.doubled]
        self.doubled |= set(entering)
        self.use(entering)

    def leave_device(self, blocks):
        self._make_single(blocks)
        self.use([block for block in blocks if block in self.oldest_first and block not in self.loading])

    def _let_go(self, blocks):
        super()._let_go(blocks)
        self._make_single(blocks)

    def _take_in(self, blocks):
        super()._take_in(blocks)
        self._make_single(blocks)

    def _make_single(self, blocks):
        self.loaded -= set(blocks)
        self.doubled -= set(blocks)

    def _first_to_go(self):
        return sorted(self.oldest_first, key=lambda block: block not in self.doubled)  # sorting keeps the order else


PLAIN_HOSTS = {"lru": PlainTier, "device-lru": PlainDeviceLru}


class PlainTiers:
    """A device, host memory and a disk."""

    def __init__(self, device, host, disk, *, leaving, num_remembered, policy="lru"):
        self.device, self.host, self.disk = self.tiers = PlainTier(device), PLAIN_HOSTS[policy](host), PlainTier(disk)
        self.leaving = leaving
        self.num_remembered = num_remembered  # None: everything is admitted
        self.referenced = OrderedDict()
        self.admitted = set()
        self.declined = set()

    def serve(self, own):
        self.refer_to([block for block in own if block not in self.disk.oldest_first])
        already_there = list(takewhile(self.device.oldest_first.__contains__, own))
        from_disk = self.find(own)
        for blocks in from_disk:
            self.put_into_host(blocks)
            self.host.begin_load(list(takewhile(self.host.oldest_first.__contains__, blocks)))
        if self.device.capacity:
            _, left = self.device.store(own)
            self.host.leave_device(left)
            if self.leaving:
                self.put_into_host(left)
        self.host.end_loads()
        self.disk.end_loads()
        if not self.leaving:
            self.put_into_host(own)
            already_there = []
        self.host.enter_device(own[len(already_there) : self.device.capacity])

    def refer_to(self, blocks):
        known = {block for block in blocks if block in self.referenced or self.num_remembered is None}
        self.admitted = (self.admitted - set(blocks)) | known
        for block in reversed(blocks):
            self.referenced[block] = None
            self.referenced.move_to_end(block)
        while self.num_remembered is not None and len(self.referenced) > self.num_remembered:
            self.referenced.popitem(last=False)

    def find(self, own):
        """Count hits, begin loads and return what comes from the disk, in pieces."""
        pieces = []
        while own:
            for tier in self.tiers:
                found = list(takewhile(tier.oldest_first.__contains__, own))
                if found:
                    break
            else:
                break
            tier.hits += len(found)
            own = own[len(found) :]
            if tier is self.device:
                tier.use(found)
            else:
                tier.begin_load(found)
            if tier is self.disk:
                pieces.append(found)
        return pieces

    def put_into_host(self, blocks):
        _, left = self.host.store(blocks)
        if not self.disk.capacity:
            return
        if self.leaving:
            left = [block for block in left if block not in self.device.oldest_first]
        wanted = [block for block in left if block in self.disk.oldest_first or block in self.admitted]
        self.declined |= set(left) - set(wanted)
        written, _ = self.disk.store(wanted)
        self.declined -= set(written)
