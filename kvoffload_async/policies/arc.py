"""ARC: recency and frequency in balance, a balance that its own regrets adjust.

Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4. Its names are kept: T1 and T2 hold the resident keys seen once and at least twice, B1 and
B2 the *ghosts* of those that left them; L1 = T1 + B1, L2 = T2 + B2; c is the capacity, p the size
at which T1 is aimed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.types import OffloadKey

_Ordered = OrderedDict[OffloadKey, None]
# Linked, not a plain dict: a dict scanned from its front walks over every key that ever left there.


class ArcPolicy(CachePolicy):
    """The paper's cases I to IV, key by key, where evicting is not always possible or needed.

    Four things differ from the paper's cache. REPLACE runs only when no slot is free (a failed
    write frees one while ghosts remain). LRU means the least recent *evictable* key, and a list
    without one leaves it to the other, whichever that is. A batch is planned whole before
    anything changes. Keys are admitted apart from their eviction, so a list is trimmed after the
    insertion that overfills it and not before, which drops the same ghosts; a T1 that fills the
    cache (case IV A, second half) needs no case of its own, as its victim's ghost is the one to go.

    Always: |T1| + |T2| <= c; |L1| <= c; |L1| + |L2| <= 2c; no key in two lists; 0 <= p <= c.

    Attributes:
        t1: Seen once. This and the others: least recent first, not to be changed from outside.
        t2: Seen at least twice.
        b1: Ghosts of `t1`.
        b2: Ghosts of `t2`.
        p: Target size of `t1`, in blocks and fractions of one.

    Thread: owner.
    """

    name = "arc"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.t1 = _Ordered()
        self.t2 = _Ordered()
        self.b1 = _Ordered()
        self.b2 = _Ordered()
        self.p = 0.0

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[OffloadKey], bool],
    ) -> list[OffloadKey] | None:
        l1 = _Rehearsal(self.t1, self.b1, is_evictable)
        l2 = _Rehearsal(self.t2, self.b2, is_evictable)
        p = self.p
        num_free = len(incoming) - count
        victims: list[OffloadKey] = []
        for turn, key in enumerate(incoming):
            in_b1, in_b2 = l1.is_ghost(key), l2.is_ghost(key)
            if in_b1:
                p = min(p + max(1.0, l2.num_ghosts / l1.num_ghosts), self.capacity_blocks)
            elif in_b2:
                p = max(p - max(1.0, l1.num_ghosts / l2.num_ghosts), 0.0)
            if turn >= num_free:
                t1_first = l1.num_resident > p or (in_b2 and l1.num_resident == p)
                victim = _replace(l1, l2) if t1_first else _replace(l2, l1)
                if victim is None:
                    return None
                victims.append(victim)
            if in_b1 or in_b2:
                (l1 if in_b1 else l2).take_ghost(key)
                l2.num_resident += 1
            else:
                l1.num_resident += 1
                if len(l1) > self.capacity_blocks:
                    l1.drop_ghost()
                elif len(l1) + len(l2) > 2 * self.capacity_blocks:
                    l2.drop_ghost()
        self.p = p
        for key in victims:
            resident, ghosts = (self.t1, self.b1) if key in self.t1 else (self.t2, self.b2)
            del resident[key]
            ghosts[key] = None
        return victims

    def admit(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in self.b1:
                del self.b1[key]
                self.t2[key] = None
            elif key in self.b2:
                del self.b2[key]
                self.t2[key] = None
            else:
                self.t1[key] = None
                len_l1 = len(self.t1) + len(self.b1)
                if len_l1 > self.capacity_blocks:
                    self.b1.popitem(last=False)
                elif len_l1 + len(self.t2) + len(self.b2) > 2 * self.capacity_blocks:
                    self.b2.popitem(last=False)

    def access(self, keys: Sequence[OffloadKey], reused: Callable[[OffloadKey], bool]) -> None:
        for key in reversed(keys):
            if key in self.t2:
                self.t2.move_to_end(key)
            elif key in self.t1:
                if reused(key):
                    del self.t1[key]
                    self.t2[key] = None
                else:
                    self.t1.move_to_end(key)

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.t1.pop(key, None)
            self.t2.pop(key, None)

    def clear(self) -> None:
        for keys in (self.t1, self.t2, self.b1, self.b2):
            keys.clear()
        self.p = 0.0

    def resident(self) -> Iterable[OffloadKey]:
        num_above_target = max(0, len(self.t1) - int(self.p))
        above, below = islice(self.t1, num_above_target), islice(self.t1, num_above_target, None)
        return tuple(chain(above, self.t2, below))

    def violations(self) -> Iterable[str]:
        c = self.capacity_blocks
        t1, t2, b1, b2 = (len(part) for part in (self.t1, self.t2, self.b1, self.b2))
        if t1 + t2 > c or t1 + b1 > c or t1 + t2 + b1 + b2 > 2 * c or not 0 <= self.p <= c:
            yield f"|T1|={t1} |T2|={t2} |B1|={b1} |B2|={b2} p={self.p} c={c}"
        if len({*self.t1, *self.t2, *self.b1, *self.b2}) != t1 + t2 + b1 + b2:
            yield "a key is in two lists"


class _Rehearsal:
    """L1 or L2 as a batch in the making would leave it; the lists themselves stay as they are.

    Each list is walked at most once, whatever the batch's size.
    """

    def __init__(
        self, resident: _Ordered, ghosts: _Ordered, is_evictable: Callable[[OffloadKey], bool]
    ) -> None:
        self.num_resident = len(resident)
        self.num_ghosts = len(ghosts)
        self._victims = filter(is_evictable, resident)
        self._ghosts = ghosts
        self._gone = gone = set[OffloadKey]()
        self._droppable = (key for key in ghosts if key not in gone)

    def __len__(self) -> int:
        return self.num_resident + self.num_ghosts

    def evict(self) -> OffloadKey | None:
        victim = next(self._victims, None)
        if victim is not None:
            self.num_resident -= 1
            self.num_ghosts += 1
        return victim

    def is_ghost(self, key: OffloadKey) -> bool:
        return key in self._ghosts and key not in self._gone

    def take_ghost(self, key: OffloadKey) -> None:
        self.num_ghosts -= 1
        self._gone.add(key)

    def drop_ghost(self) -> None:
        self.num_ghosts -= 1
        # None left: the one that goes is the batch's own victim, which nobody asks for again.
        self._gone.update(islice(self._droppable, 1))


def _replace(preferred: _Rehearsal, other: _Rehearsal) -> OffloadKey | None:
    victim = preferred.evict()
    return other.evict() if victim is None else victim
