"""A tier that is asked only where loading from it can pay: for requests that miss many blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvoffload_async.core.effects import StartProbe
from kvoffload_async.core.index import KeyIndex, KeysDecided
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import LookupResult, OffloadKey


class SelectiveIndex(KeyIndex):
    """Asks another index for those requests alone that miss at least so many blocks.

    What reaches a tier's index is what the primary and the nearer tiers lack. How much that is
    for a request shows at the end of the step in which it first asks: until then it is told
    RETRY, and afterwards MISS if it is too little. A request that turns out to miss more later is
    answered from then on.

    Thread: owner.
    """

    def __init__(self, index: KeyIndex, min_blocks: int) -> None:
        """Ask nothing yet.

        Args:
            index: Who knows; owned by this object from now on.
            min_blocks: Blocks that a request must miss, at least.
        """
        self._index = index
        self._min_blocks = min_blocks
        self._worthwhile: set[Hashable] = set()
        self._missed: dict[Hashable, dict[OffloadKey, None]] = {}
        """What requests have asked for that have not missed enough; below `min_blocks` of each."""
        self._undecided: dict[Hashable, None] = {}
        self._deferred: dict[OffloadKey, None] = {}
        """What was answered with RETRY since the last step ended, because of too few blocks."""

    @property
    def decided(self) -> KeysDecided | None:
        """Told of the keys that a probe has answered, and of those that get another answer now."""
        return self._index.decided

    @decided.setter
    def decided(self, decided: KeysDecided | None) -> None:
        self._index.decided = decided

    def lookup(self, key: OffloadKey, request: Hashable) -> LookupResult:
        """Return what the other index says; RETRY, then MISS, where too few blocks are missed."""
        if request in self._worthwhile:
            return self._index.lookup(key, request)
        missed = self._missed.get(request)
        if missed is None:
            missed = self._missed[request] = {}
            self._undecided[request] = None
        missed[key] = None
        if len(missed) < self._min_blocks:
            if request not in self._undecided:
                return LookupResult.MISS
            self._deferred[key] = None
            return LookupResult.RETRY
        del self._missed[request]
        self._undecided.pop(request, None)
        self._worthwhile.add(request)
        for earlier in missed:
            self._index.lookup(earlier, request)
        return self._index.lookup(key, request)

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Blocks were stored, or found."""
        self._index.appeared(keys)

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Blocks are gone, or could not be loaded."""
        self._index.vanished(keys, surely=surely)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that are known to be absent."""
        return self._index.lacks(keys)

    def next_probe(self) -> StartProbe | None:
        """End a step: decide who misses too little; return the other index's probe."""
        self._decide()
        return self._index.next_probe()

    def answered(self, generation: int, present: frozenset[OffloadKey]) -> None:
        """A probe ended."""
        self._index.answered(generation, present)

    def left_alone(self) -> None:
        """No probe may be started now."""
        self._decide()
        self._index.left_alone()

    def forget_request(self, request: Hashable) -> None:
        """A request ended."""
        self._worthwhile.discard(request)
        self._missed.pop(request, None)
        self._undecided.pop(request, None)
        self._index.forget_request(request)

    @property
    def is_exact(self) -> bool:
        """Whether all of the tier's contents are known here."""
        return self._index.is_exact

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is outstanding, or a request undecided."""
        return bool(self._deferred) or self._index.is_waiting

    @property
    def probes_outstanding(self) -> int:
        """Probes that have no answer yet."""
        return self._index.probes_outstanding

    def _decide(self) -> None:
        """Let who was told to ask again do so: the answers are other ones from now on."""
        deferred, self._deferred = self._deferred, {}
        self._undecided.clear()
        if deferred and self.decided is not None:
            self.decided(tuple(deferred))
