"""Which request loads which blocks of the primary just now: who may take back which pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from kvoffload_async.errors import StateError
from kvoffload_async.types import OffloadKey, ReqContext


class Loads:
    """The loads of live and ended requests.

    Thread: owner.
    """

    def __init__(self) -> None:
        self._loads: dict[ReqContext, Counter[OffloadKey]] = {}
        self.num_pins = 0
        """How many pins they hold; a block may have several."""

    def begin(self, ctx: ReqContext, keys: Collection[OffloadKey]) -> None:
        """Note that a request loads blocks."""
        if keys:
            self._loads.setdefault(ctx, Counter()).update(keys)
            self.num_pins += len(keys)

    def end(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], *, may_be_unknown: bool
    ) -> Collection[OffloadKey]:
        """Note that a load has ended; return the blocks that were indeed loaded, to be unpinned.

        Raises:
            StateError: One was not, and it must not be unknown; nothing has changed.
        """
        loads = self._loads.get(ctx, Counter())
        known = asked = Counter(keys)
        if any(count > loads.get(key, 0) for key, count in asked.items()):
            if not may_be_unknown:
                raise StateError(f"request {ctx.req_id!r} completes a load that it did not prepare")
            known = asked & loads
        for key, count in known.items():
            loads[key] -= count
            if not loads[key]:
                del loads[key]
        if not loads:
            self._loads.pop(ctx, None)
        ended = tuple(known.elements())
        self.num_pins -= len(ended)
        return ended

    def clear(self) -> None:
        """Forget them all."""
        self._loads.clear()
        self.num_pins = 0

    def total(self) -> Counter[OffloadKey]:
        """Return how many loads pin each block."""
        return sum(self._loads.values(), Counter())
