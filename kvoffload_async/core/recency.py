"""Which blocks each live request used, committed to the policy once, when the request ends.

Committing per request and in token order makes the ranking independent of the order in which
transfers end, and lets the tail of a prompt go before its head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kvoffload_async.errors import StateError
from kvoffload_async.types import OffloadKey, ReqContext


class RecencyLog:
    """Logical accesses of the live requests."""

    def __init__(self, rank: Callable[[Iterable[tuple[OffloadKey, bool]]], None]) -> None:
        """Start empty.

        Args:
            rank: Takes what a request used, head to tail, and whether it found a key or stored it.
        """
        self._rank = rank
        self._accesses: dict[ReqContext, dict[OffloadKey, bool]] = {}

    def open(self, ctx: ReqContext) -> None:
        """Begin a request.

        Raises:
            StateError: This very request is live; another one may have its id.
        """
        if ctx in self._accesses:
            raise StateError(f"request {ctx.req_id!r} is known already")
        self._accesses[ctx] = {}

    def knows(self, ctx: ReqContext) -> bool:
        """Tell whether the request is live."""
        return ctx in self._accesses

    def note(self, ctx: ReqContext, keys: Iterable[OffloadKey], *, reused: bool) -> None:
        """Record that a live request used keys; the first use of a key decides how it counts.

        Raises:
            StateError: The request is not live.
        """
        accesses = self._accesses.get(ctx)
        if accesses is None:
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        if accesses:
            for key in keys:
                accesses.setdefault(key, reused)
        else:
            accesses.update(dict.fromkeys(keys, reused))

    def used_by(self, ctx: ReqContext) -> Collection[OffloadKey]:
        """Return what a live request has used so far."""
        return self._accesses[ctx].keys()

    def commit(self, ctx: ReqContext) -> list[OffloadKey]:
        """End a request: rank what it used; return what it found, head to tail.

        Raises:
            StateError: The request is not live.
        """
        accesses = self._accesses.pop(ctx, None)
        if accesses is None:
            raise StateError(f"request {ctx.req_id!r} is unknown or has finished already")
        positions = ctx.key_positions
        ordered: Iterable[tuple[OffloadKey, bool]] = accesses.items()
        if positions:
            last = max(positions.values()) + 1
            ordered = sorted(ordered, key=lambda access: positions.get(access[0], last))
        self._rank(ordered)
        return [key for key, reused in ordered if reused]

    def live_requests(self) -> set[ReqContext]:
        """Return the live requests."""
        return set(self._accesses)
