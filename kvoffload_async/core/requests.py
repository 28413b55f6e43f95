"""State of live requests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffload_async.types import OffloadKey, ReqContext

if TYPE_CHECKING:
    from kvoffload_async.core.primary import Share


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from `on_new_request` until all tiers were notified of its end.

    `Room` alone writes `wants`, `ticket`, `awaits`, `is_cut`, `is_queued` and `is_refused`.
    """

    ctx: ReqContext
    request_level_tiers: Collection[int] = ()
    is_finished: bool = False
    is_expired: bool = False
    """Whether the deferral limit has passed: pending blocks count as missing from now on."""
    writing: set[OffloadKey] = field(default_factory=set)
    """Keys with granted slots whose write has not ended."""
    undecided_blocks: dict[int, dict[OffloadKey, None]] = field(default_factory=dict)
    """Tier -> blocks that the tier will store or decline when the request ends."""
    parked: dict[OffloadKey, None] = field(default_factory=dict)
    """Keys to cascade to the request-level tiers once another request has written them."""
    failed: set[tuple[int, OffloadKey]] = field(default_factory=set)
    """(tier, key) of failed promotions, which are not retried for this request."""
    lacking: dict[int, set[OffloadKey]] = field(default_factory=dict)
    """Tier -> keys that the tier lacks; not looked up there again while the request waits."""
    searched: dict[OffloadKey, bool] = field(default_factory=dict)
    """Key looked up in the tiers in this step without a miss -> whether a tier has the block; if
    not, the answer is outstanding."""
    again: Collection[OffloadKey] = ()
    """The keys of the last step's `searched`, which the waiting request will look up again."""
    decided: set[OffloadKey] = field(default_factory=set)
    """Keys that were answered HIT or MISS."""
    asked_at_s: float = 0.0
    """Time of the last lookup, in seconds."""
    waits: bool = False
    """Whether the request has made a lookup and not proceeded since."""
    is_deferred: bool = False
    """Whether a lookup of this step was deferred."""
    wants: dict[OffloadKey, None] = field(default_factory=dict)
    """Keys that a request in the queue or with a ticket wants: its leading run and the rest."""
    ticket: dict[OffloadKey, bool] = field(default_factory=dict)
    """Pinned key -> whether it was promoted for this request; empty: no ticket. See `Room`."""
    awaits: int = 0
    """Number of the ticket's blocks that are still being written."""
    is_queued: bool = False
    """Whether the request waits in the queue for its ticket."""
    is_refused: bool = False
    """Whether the request has left the queue without room: blocks that it lacks count as missing in
    its next lookups."""
    blocked_since_s: float | None = None
    """Time since which the request, first in the queue, has waited while no ticket is left."""
    share: Share | None = None
    """The slots of its tenant; None before its first lookup."""
    is_cut: bool = False
    """Whether the early ticket names only a part of the blocks found of the prompt."""
    prefetched: list[OffloadKey] = field(default_factory=list)
    """Blocks that were promoted ahead for this request."""
    _deferred_s: float = 0.0
    _deferred_at_s: float | None = None
    _undecided_since_s: float | None = None

    @property
    def can_end(self) -> bool:
        """Whether the request is finished and can submit no more jobs."""
        return self.is_finished and not self.writing and not self.parked

    def defer(self, now_s: float, limit_s: float, *, counts: bool) -> bool:
        """Record a deferred lookup; return True if this reaches the limit on deferral.

        The limit applies to the total time between consecutive deferred lookups that count: not
        those of a request behind others in the queue. A promotion that fails in between does not
        reset the total.
        """
        self.is_deferred = True
        if self._deferred_at_s is not None:
            self._deferred_s += max(0.0, now_s - self._deferred_at_s)
        self._deferred_at_s = now_s if counts else None
        if self.is_expired or self._deferred_s < limit_s:
            return False
        self.is_expired = True
        return True

    def end_deferral(self) -> None:
        """Record that lookups are not deferred; the time until the next deferral does not count."""
        self._deferred_at_s = None
        self.lacking.clear()
        self.again = ()

    def begin_round(self, now_s: float) -> None:
        """Record the start of a series of lookups."""
        self.asked_at_s = now_s
        self.waits = not self.is_expired
        if self._undecided_since_s is None:
            self._undecided_since_s = now_s

    def proceed(self) -> float | None:
        """Record that the request no longer waits for lookups.

        Returns:
            Time, in seconds, at which the wait began: that of the first lookup since the last
            call. None without a lookup.
        """
        since_s, self._undecided_since_s = self._undecided_since_s, None
        self.waits = False
        self.end_deferral()
        return since_s

    def forget_blocks(self) -> None:
        """Clear the state of blocks after a reset of the primary."""
        self.writing.clear()
        self.parked.clear()
        self.undecided_blocks.clear()
        self.searched.clear()
        self.prefetched.clear()
        self.end_deferral()
        self.waits = self.is_deferred = False
