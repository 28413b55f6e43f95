"""Promotions: slots reserved by lookups, batched into one job a (tier, request) and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.retention import Retention
from kvoffload_async.core.shares import Shares
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.types import OffloadKey, ReqContext

_Batch = tuple[RequestState, list[OffloadKey], list[int]]


class Promotions:
    """Reserves primary slots for blocks that come back, up to the tiers' shares and the cap.

    A reservation counts against the cap that `Retention` keeps until its block has been loaded, or
    its request waits no more: waiting requests can neither fill the primary nor evict what each
    other waits for. It counts against its tier's share until the block has landed; one that was
    given up while its copy runs, until the copy has ended.

    Thread: owner.
    """

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        shares: Shares,
        retention: Retention,
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._shares = shares
        self._retention = retention
        self._batches: dict[tuple[int, ReqContext], _Batch] = {}

    @property
    def outstanding_slots(self) -> int:
        """Slots that count against the cap."""
        return self._retention.in_flight + self._retention.retained_slots

    def unflushed(self) -> Iterator[tuple[int, OffloadKey, int]]:
        """Iterate over (tier, key, slot) of this step's reservations.

        For invariants and inspection.
        """
        for (tier, _), (_, keys, slots) in self._batches.items():
            yield from zip(repeat(tier), keys, slots)

    def reserve(self, tier: int, request: RequestState, key: OffloadKey) -> bool:
        """Reserve a slot for an absent key and queue it; False if there is no room for it."""
        retention = self._retention
        if not self._shares.room_to_load(tier) or retention.spare_slots <= 0:
            return False
        if not self._primary.pool.free_count:
            retention.guard_found()
        slot = self._primary.reserve(key)
        if slot is None:
            return False
        batch = self._batches.setdefault((tier, request.ctx), (request, [], []))
        batch[1].append(key)
        batch[2].append(slot)
        request.unflushed_promotions += 1
        retention.in_flight += 1
        self._tiers[tier].reserve_slot()
        return True

    def flush(self) -> Iterator[tuple[int, RequestState, Sequence[OffloadKey], Sequence[int]]]:
        """Detach the step's batches: (tier, request, keys, slots)."""
        batches, self._batches = self._batches, {}
        for (tier, _), (request, keys, slots) in batches.items():
            request.unflushed_promotions -= len(keys)
            yield tier, request, keys, slots

    def land(self, tier: int, keys: Sequence[OffloadKey], request: RequestState | None) -> None:
        """Make promoted blocks readable, and keep them for the request if it still waits."""
        self._end(tier, keys)
        self._primary.complete_write(keys, success=True)
        if request is not None and request.waits:
            self._retention.retain(request, keys, promoted=True)

    def fail(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of blocks that did not come; the keys become absent."""
        self._end(tier, keys)
        self._primary.complete_write(keys, success=False)

    def disown(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Give up blocks whose copy still runs; return their slots, which their tier occupies."""
        self._retention.in_flight -= len(keys)
        return self._primary.disown_write(keys)

    def reset(self) -> None:
        """Forget all but what copies still occupy; the primary is about to be emptied."""
        for _ in self.flush():
            pass  # flushing detaches the batches; the jobs are never made
        self._retention.reset()
        for tier in self._tiers:
            late = (record.job for record in tier.jobs.disowned())
            tier.promotion_slots = sum(len(job.keys) for job in late if job.is_promotion)

    def _end(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        self._retention.in_flight -= len(keys)
        self._tiers[tier].promotion_slots -= len(keys)
