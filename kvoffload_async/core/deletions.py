"""Deletion of blocks from the primary and from tiers, a bounded number of keys per step.

    begun --serve, slice by slice--> wanted at the primary and at each named tier
    wanted at the primary --no copy uses the block--> gone
    wanted at a tier --call--> under way --confirmed--> gone     --failed--> wanted, after a pause

All keys of a deletion are *barred* from its first step until all its blocks are gone: lookups miss
them, and no store, promotion or copy to a tier adds them. So whatever was under way before cannot
bring a block back: a copy into the primary ends without it, and the tier deletes it after its own
jobs on it. A deletion that a tier does not confirm is repeated until the tier does, or is closed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from kvoffload_async.abc.events import CallEnded
from kvoffload_async.core.barred import BarredKeys
from kvoffload_async.core.cascades import Cascades
from kvoffload_async.core.pins import Pins
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.room import Room
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import BusyError
from kvoffload_async.types import OffloadKey

MOST_KEYS: Final = 1 << 20
"""Maximum number of keys of all deletions under way."""
MOST_DELETIONS: Final = 32
"""Maximum number of deletions under way: a lookup tests their keys one after another."""
KEYS_A_STEP: Final = 512
"""Keys that a step deletes from the primary, and again as many that are retried there."""
_CALLS_AT_ONCE: Final = 2
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 30.0


class Deletion:
    """One deletion: its keys, and how many of them each place has not confirmed.

    Attributes:
        keys: The keys, without duplicates.
        in_primary: Whether the blocks are deleted from the primary too.
        left: Tier index -> number of keys that the tier has not confirmed yet.
        in_use: Number of blocks in the primary that copies or pins still use.
        removed: Number of blocks removed from the primary.
        errors: Tier index -> error of the tier's last call, until one succeeds.
        is_done: Whether all blocks are gone, or the rest of them is given up.
    """

    def __init__(
        self, keys: Iterable[OffloadKey], tiers: Iterable[int], *, in_primary: bool
    ) -> None:
        """Describe a deletion; nothing is deleted before `Deletions.begin`."""
        self.keys = frozenset(keys)
        self.in_primary = in_primary
        self.left = dict.fromkeys(tiers, len(self.keys))
        self.in_use = 0
        self.removed = 0
        self.errors: dict[int, Exception] = {}
        self.is_done = False
        self._rest = iter(self.keys)
        self.num_taken = 0
        """Number of keys that `take` has returned."""

    def take(self, count: int) -> list[OffloadKey]:
        """Return the next keys, at most `count`."""
        taken = list(islice(self._rest, count))
        self.num_taken += len(taken)
        return taken

    @property
    def has_rest(self) -> bool:
        """Whether `take` would return further keys."""
        return self.num_taken < len(self.keys)


class _TierQueue:
    """The keys to delete from one tier: waiting, and in calls under way."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Deletion, Sequence[OffloadKey]]] = deque()
        self.num_calls = 0
        self.paused_until_s = 0.0
        self.pause_s = _FIRST_PAUSE_S


class Deletions:
    """The deletions under way.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        running: The deletions under way, oldest first. Read-only.
    """

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        cascades: Cascades,
        room: Room,
        pins: Pins,
    ) -> None:
        """Start without deletions."""
        self.running: list[Deletion] = []
        self._primary = primary
        self._tiers = tiers
        self._cascades = cascades
        self._room = room
        self._pins = pins
        self._queues = [_TierQueue() for _ in tiers]
        self._now_s = 0.0
        self._in_use: deque[tuple[Deletion, OffloadKey]] = deque()
        """Blocks in the primary that were in use when they were last tried."""
        self._num_again = 0
        """Number of blocks at the head of `_in_use` to try again, since `room_made` has grown."""
        self._room_made = 0
        """`Primary.room_made` when blocks were last tried."""

    @property
    def has_work(self) -> bool:
        """Whether a step is needed; not while deletions only wait for copies, calls or a pause."""
        return self.wakes_in_s(self._now_s) <= 0

    @property
    def num_keys(self) -> int:
        """Number of keys of the deletions under way."""
        return sum(len(each.keys) for each in self.running)

    def takes(self, num_keys: int) -> bool:
        """Return whether a deletion of `num_keys` keys may begin now."""
        return len(self.running) < MOST_DELETIONS and self.num_keys + num_keys <= MOST_KEYS

    def begin(self, deletion: Deletion) -> None:
        """Bar the keys of a deletion at all its places; `serve` deletes the blocks.

        Raises:
            BusyError: Too many deletions are under way, or they have too many keys.
        """
        if not self.takes(len(deletion.keys)):
            raise BusyError(
                f"{len(self.running)} deletions of {self.num_keys} keys are under way: at most "
                f"{MOST_DELETIONS} of {MOST_KEYS} keys; delete in parts, one after another"
            )
        self.running.append(deletion)
        for barred in self._barred(deletion):
            barred.sets.append(deletion.keys)

    def serve(self, requests: Iterable[RequestState], now_s: float) -> None:
        """Delete a bounded number of blocks, at a step's end.

        Args:
            requests: The live requests, whose tickets may name the blocks.
            now_s: Time of the step, in seconds.
        """
        self._now_s = now_s
        holders = [request for request in requests if request.ticket]
        if self._room_made != self._primary.room_made:
            self._num_again = len(self._in_use)
        again: dict[Deletion, list[OffloadKey]] = {}
        for _ in range(min(KEYS_A_STEP, self._num_again)):
            deletion, key = self._in_use.popleft()
            deletion.in_use -= 1
            self._num_again -= 1
            again.setdefault(deletion, []).append(key)
        for deletion, retried in again.items():
            self._delete_here(deletion, retried, holders)
        num_keys = KEYS_A_STEP
        for deletion in self.running:
            keys = deletion.take(num_keys)
            num_keys -= len(keys)
            self._delete_here(deletion, keys, holders)
            for index in deletion.left if keys else ():
                self._queues[index].waiting.append((deletion, keys))
        self._room_made = self._primary.room_made
        for index in range(len(self._tiers)):
            self._call(index)
        for deletion in [each for each in self.running if self._is_gone(each)]:
            self._end(deletion)

    def wakes_in_s(self, now_s: float) -> float:
        """Return the seconds until a step can continue a deletion; inf if none can."""
        if self._in_use and (self._num_again or self._room_made != self._primary.room_made):
            return 0.0
        if any(each.has_rest or self._is_gone(each) for each in self.running):
            return 0.0
        pauses = [
            max(0.0, queue.paused_until_s - now_s)
            for tier, queue in zip(self._tiers, self._queues, strict=True)
            if queue.waiting and queue.num_calls < _CALLS_AT_ONCE and tier.is_available
        ]
        return min(pauses, default=math.inf)

    def close(self) -> None:
        """Give up what is left of all deletions."""
        for queue in self._queues:
            queue.waiting.clear()
        self._in_use.clear()
        for deletion in tuple(self.running):
            self._end(deletion)

    # -- internal -------------------------------------------------------------------------------

    def _barred(self, deletion: Deletion) -> list[BarredKeys]:
        barred = [self._tiers[index].barred for index in deletion.left]
        return [self._primary.barred, *barred] if deletion.in_primary else barred

    def _is_gone(self, deletion: Deletion) -> bool:
        return not (deletion.has_rest or deletion.in_use or any(deletion.left.values()))

    def _end(self, deletion: Deletion) -> None:
        deletion.is_done = True
        self.running.remove(deletion)
        for barred in self._barred(deletion):
            del barred.sets[[each is deletion.keys for each in barred.sets].index(True)]

    def _delete_here(
        self, deletion: Deletion, keys: Sequence[OffloadKey], holders: Sequence[RequestState]
    ) -> None:
        """Delete blocks from the primary; those that copies use are retried in later steps."""
        if not keys:
            return
        everywhere = range(len(self._tiers))
        slots = self._primary.resident_slots(keys)
        self._cascades.drop_deleted(everywhere if deletion.in_primary else deletion.left, slots)
        if not deletion.in_primary:
            return
        self._room.cut(holders, frozenset(keys))
        self._pins.unpin(keys)
        removed, in_use = self._primary.delete(keys)
        deletion.removed += removed
        deletion.in_use += len(in_use)
        self._in_use.extend((deletion, key) for key in in_use)

    def _call(self, index: int) -> None:
        """Begin calls of a tier for the keys that wait, unless it is paused or not open."""
        tier, queue = self._tiers[index], self._queues[index]
        while (
            queue.waiting
            and queue.num_calls < _CALLS_AT_ONCE
            and self._now_s >= queue.paused_until_s
            and tier.is_available
        ):
            deletion, keys = queue.waiting.popleft()
            queue.num_calls += 1
            tier.call("delete", keys, self._ended_at(index, deletion, keys))

    def _ended_at(
        self, index: int, deletion: Deletion, keys: Sequence[OffloadKey]
    ) -> Callable[[CallEnded], None]:
        """Return the function that takes the end of a tier's call."""

        def ended(event: CallEnded) -> None:
            queue = self._queues[index]
            queue.num_calls -= 1
            if deletion.is_done:
                return
            deletion.left[index] -= len(event.keys)
            left = [key for key in keys if key not in event.keys]
            if not left:
                deletion.errors.pop(index, None)
                queue.pause_s, queue.paused_until_s = _FIRST_PAUSE_S, 0.0
                return
            if event.error is not None:
                deletion.errors[index] = event.error
            queue.waiting.append((deletion, left))
            queue.paused_until_s = self._now_s + queue.pause_s
            queue.pause_s = min(2 * queue.pause_s, _LONGEST_PAUSE_S)

        return ended
