"""Promotions: slots reserved by lookups, batched into one job a (tier, request) and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.retention import Retention
from kvoffload_async.types import OffloadKey


class Promotions:
    """Reserves primary slots for blocks that come back, up to the cap that `Retention` keeps.

    A reservation counts against it until its block has been loaded, or its request waits no more:
    waiting requests can neither fill the primary nor evict what each other waits for.

    Thread: owner.
    """

    def __init__(self, primary: Primary, retention: Retention) -> None:
        self._primary = primary
        self._retention = retention
        self._batches: dict[tuple[int, str], tuple[RequestState, list[OffloadKey], list[int]]] = {}

    @property
    def outstanding_slots(self) -> int:
        """Slots that count against the cap."""
        return self._retention.in_flight + self._retention.retained_slots

    def unflushed(self) -> Iterator[tuple[OffloadKey, int]]:
        """Iterate over (key, slot) of this step's reservations. For invariants and inspection."""
        for _, keys, slots in self._batches.values():
            yield from zip(keys, slots, strict=True)

    def reserve(self, tier: int, request: RequestState, key: OffloadKey) -> bool:
        """Reserve a slot for an absent key and queue it; False if there is no room for it."""
        retention = self._retention
        if retention.spare_slots <= 0:
            return False
        if not self._primary.pool.free_count:
            retention.guard_found()
        slot = self._primary.reserve(key)
        if slot is None:
            return False
        batch = self._batches.setdefault((tier, request.ctx.req_id), (request, [], []))
        batch[1].append(key)
        batch[2].append(slot)
        request.unflushed_promotions += 1
        retention.in_flight += 1
        return True

    def flush(self) -> Iterator[tuple[int, RequestState, Sequence[OffloadKey], Sequence[int]]]:
        """Detach the step's batches: (tier, request, keys, slots)."""
        batches, self._batches = self._batches, {}
        for (tier, _), (request, keys, slots) in batches.items():
            request.unflushed_promotions -= len(keys)
            yield tier, request, keys, slots

    def land(self, keys: Sequence[OffloadKey], request: RequestState | None) -> None:
        """Make promoted blocks readable, and keep them for the request if it still waits."""
        self._retention.in_flight -= len(keys)
        self._primary.complete_write(keys, success=True)
        if request is not None and request.waits:
            self._retention.retain(request, keys, promoted=True)

    def fail(self, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of blocks that did not come; the keys become absent."""
        self._retention.in_flight -= len(keys)
        self._primary.complete_write(keys, success=False)

    def disown(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Give up blocks whose copy still runs; return their slots, which stay held."""
        self._retention.in_flight -= len(keys)
        return self._primary.disown_write(keys)

    def reset(self) -> None:
        """Forget everything; the primary is about to be emptied."""
        for _ in self.flush():
            pass  # flushing detaches the batches; the jobs are never made
        self._retention.reset()
