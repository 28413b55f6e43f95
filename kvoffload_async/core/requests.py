"""What the planner remembers of one live request."""

from __future__ import annotations

from collections.abc import Collection

from kvoffload_async.types import OffloadKey, ReqContext


class RequestState:
    """One request, from `on_new_request` until every tier was told that it has finished."""

    __slots__ = (
        "_decided",
        "_deferred_at_s",
        "_deferred_s",
        "_undecided_since_s",
        "asked_at_s",
        "ctx",
        "failed",
        "is_behind",
        "is_deferred",
        "is_expired",
        "is_finished",
        "parked",
        "promoting",
        "refused",
        "request_level_tiers",
        "retained",
        "unflushed_promotions",
        "waits",
        "writing",
    )

    def __init__(self, ctx: ReqContext, request_level_tiers: Collection[int]) -> None:
        self.ctx = ctx
        self.request_level_tiers = tuple(request_level_tiers)
        self.is_finished = False
        self.is_expired = False
        """Whether the request was deferred for too long: pending means missing from now on."""
        self.writing: set[OffloadKey] = set()
        """Keys that were granted slots and whose write has not ended."""
        self.unflushed_promotions = 0
        """Slots reserved in this step whose job is not submitted yet."""
        self.promoting = 0
        """Slots of promotions for it that have not ended, and whose copies are not overdue."""
        self.refused: dict[int, dict[OffloadKey, None]] = {}
        """Tier -> keys that found no room for their promotion from there, and wait; see `Lines`."""
        self.is_behind = False
        """Whether another one is before it in such a line: then nothing is retained for it."""
        self.parked: dict[OffloadKey, None] = {}
        """Keys to cascade to the request-level tiers once another request has written them."""
        self.retained: dict[OffloadKey, bool] = {}
        """Blocks that stay, pinned, until the request loads them or proceeds without them, and
        whether they were promoted for it."""
        self.waits = False
        """Whether it has looked something up and not proceeded since; see `Retention`."""
        self.is_deferred = False
        """Whether a lookup of this step was deferred."""
        self.asked_at_s = 0.0
        """When it last looked something up."""
        self.failed: set[tuple[int, OffloadKey]] = set()
        """Promotions that failed: not tried again for this request."""
        self._deferred_s = 0.0
        self._deferred_at_s: float | None = None
        self._undecided_since_s: float | None = None
        self._decided: set[OffloadKey] = set()

    @property
    def can_end(self) -> bool:
        """Whether the tiers may be told that nothing more will be submitted."""
        return (
            self.is_finished
            and not self.writing
            and not self.unflushed_promotions
            and not self.parked
        )

    def defer(self, now_s: float, limit_s: float) -> bool:
        """Note a deferred lookup; return True if the request has now been deferred for too long.

        Time adds up from one deferred lookup to the next, and a failed round does not reset it.
        """
        self.is_deferred = True
        if self._deferred_at_s is not None:
            self._deferred_s += max(0.0, now_s - self._deferred_at_s)
        self._deferred_at_s = now_s
        if self.is_expired or self._deferred_s < limit_s:
            return False
        self.is_expired = True
        return True

    def begin_round(self, now_s: float) -> None:
        """Note that the request asks."""
        self.asked_at_s = now_s
        self.waits = not self.is_expired
        if self._undecided_since_s is None:
            self._undecided_since_s = now_s

    def decides(self, key: OffloadKey) -> bool:
        """Note that a key is certainly found, or not; return whether that is new."""
        decided = self._decided
        if key in decided:
            return False
        decided.add(key)
        return True

    def proceed(self) -> float | None:
        """Note that the request was scheduled: it is not being deferred any more.

        Returns:
            Since when it has asked; None: it has not, since it last proceeded.
        """
        since_s, self._undecided_since_s = self._undecided_since_s, None
        self._deferred_at_s = None
        return since_s

    def forget_blocks(self) -> None:
        """Forget what a reset of the primary has made void."""
        self.writing.clear()
        self.parked.clear()
        self.retained.clear()
        self.promoting = 0
        self.waits = self.is_deferred = False
