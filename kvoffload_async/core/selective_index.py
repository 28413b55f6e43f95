"""A tier that is asked only where loading from it can pay: for requests that miss many blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from kvoffload_async.core.effects import StartProbe
from kvoffload_async.core.index import KeyIndex, KeysDecided
from kvoffload_async.core.payback import Payback
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import LookupResult, OffloadKey


class SelectiveIndex(KeyIndex):
    """Asks another index for those requests alone that miss at least so many blocks.

    What reaches a tier's index is what the primary and the nearer tiers lack. How much that is
    for a request shows at the end of the step in which it first asks, or later, as long as nearer
    tiers do not know all of its blocks yet: until then it is told RETRY, and afterwards MISS if it
    is too little. A request that turns out to miss more later is answered from then on.

    Thread: owner.

    Attributes:
        payback: What tells, beside the configured number, how many blocks are enough; None:
            nothing does.
        has_decided: Whether the end of the last step has changed the answer of some request.
    """

    def __init__(self, index: KeyIndex, min_blocks: int, payback: Payback | None = None) -> None:
        """Ask nothing yet.

        Args:
            index: Who knows; owned by this object from now on.
            min_blocks: Blocks that a request must miss, at least.
            payback: See the class.
        """
        self.payback = payback
        self.has_decided = False
        self._index = index
        self._min_blocks = min_blocks
        self._needed_blocks: float = min_blocks
        self._worthwhile: set[Hashable] = set()
        self._missed: dict[Hashable, dict[OffloadKey, None]] = {}
        """What requests have asked for that have not missed enough."""
        self._deferred: dict[Hashable, dict[OffloadKey, None]] = {}
        """By request, what was answered with RETRY because of too few blocks so far, and has to be
        asked for again: of those that are not decided yet, or have been since the last step ended.
        """
        self._unknown: dict[Hashable, dict[OffloadKey, None]] = {}
        """By request, what a nearer tier does not know yet."""
        self._explorer: Hashable = None

    @property
    def decided(self) -> KeysDecided | None:
        """Told of the keys that a probe has answered, and of those that get another answer now."""
        return self._index.decided

    @decided.setter
    def decided(self, decided: KeysDecided | None) -> None:
        self._index.decided = decided

    @property
    def needed_blocks(self) -> float:
        """Blocks that a request must miss now; infinity: no number is enough."""
        return self._needed_blocks

    def lookup(self, key: OffloadKey, request: Hashable) -> LookupResult:
        """Return what the other index says; RETRY, then MISS, where too few blocks are missed."""
        if request in self._worthwhile:
            return self._index.lookup(key, request)
        missed = self._missed.get(request)
        if missed is None:
            missed = self._missed[request] = self._deferred[request] = {}
        if len(missed) + (key not in missed) < self._needed_blocks:
            missed[key] = None
            return LookupResult.MISS if self.declines(request) else LookupResult.RETRY
        self._ask(request)
        return self._index.lookup(key, request)

    def declines(self, request: Hashable) -> bool:
        """Tell whether a request is told MISS because it misses too few blocks."""
        return request in self._missed and request not in self._deferred

    def expect(self, key: OffloadKey, request: Hashable) -> None:
        """Note that a request may miss a block, of which a nearer tier does not know yet."""
        if request not in self._worthwhile and not self.declines(request):
            self._unknown.setdefault(request, {})[key] = None

    def settle(self, ask_nearer: Callable[[OffloadKey, Hashable], LookupResult]) -> None:
        """Take in what nearer tiers have found out; before each end of a step.

        Args:
            ask_nearer: Returns what they know of a key; RETRY: one does not know yet.
        """
        for request, unknown in list(self._unknown.items()):
            known = []
            for key in unknown:
                answer = ask_nearer(key, request)
                if answer is LookupResult.RETRY:
                    break
                known.append(key)
                if answer is LookupResult.MISS and request in self._missed:
                    self._missed[request][key] = None
            for key in known:
                del unknown[key]
            if not unknown:
                del self._unknown[request]

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Blocks were stored, or found."""
        self._index.appeared(keys)

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Blocks are gone, or could not be loaded."""
        self._index.vanished(keys, surely=surely)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that are known to be absent."""
        return self._index.lacks(keys)

    def peek(self, key: OffloadKey) -> LookupResult:
        """Return what the other index knows."""
        return self._index.peek(key)

    def next_probe(self) -> StartProbe | None:
        """End a step: decide who misses too little; return the other index's probe."""
        self._decide(may_explore=True)
        return self._index.next_probe()

    def answered(self, generation: int, present: frozenset[OffloadKey]) -> None:
        """A probe ended."""
        self._index.answered(generation, present)

    def left_alone(self) -> None:
        """No probe may be started now."""
        self._decide(may_explore=False)
        self._index.left_alone()

    def forget_request(self, request: Hashable) -> None:
        """A request ended."""
        self._worthwhile.discard(request)
        self._missed.pop(request, None)
        self._deferred.pop(request, None)
        self._unknown.pop(request, None)
        if self.payback is not None and request == self._explorer:
            self._explorer = None
            self.payback.exploration_ended()
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

    def _decide(self, *, may_explore: bool) -> None:
        """Let who was told to ask again do so: the answers are other ones from now on."""
        if self.payback is not None:
            self._needed_blocks = max(self._min_blocks, self.payback.needed_blocks)
        deferred, self._deferred = self._deferred, {}
        told: dict[OffloadKey, None] = {}
        declined: dict[Hashable, int] = {}
        for request, missed in deferred.items():
            if request in self._unknown:
                self._deferred[request] = missed
                continue
            told |= missed
            if request in self._worthwhile:
                continue
            if len(missed) >= self._needed_blocks:
                self._ask(request)
            else:
                declined[request] = len(missed)
        if may_explore and declined:
            self._explore(declined)
        self.has_decided = bool(told)
        if told and self.decided is not None:
            self.decided(tuple(told))

    def _ask(self, request: Hashable) -> None:
        """Ask for what a request has missed so far, and from now on for all of it."""
        self._worthwhile.add(request)
        self._unknown.pop(request, None)
        for key in self._missed.pop(request):
            self._index.lookup(key, request)

    def _explore(self, declined: Mapping[Hashable, int]) -> None:
        """Ask for the largest of the requests that are declined, if what was measured is old."""
        request = max(declined, key=declined.__getitem__)
        payback = self.payback
        if payback is None or declined[request] < self._min_blocks or not payback.may_explore:
            return
        payback.explore()
        self._explorer = request
        self._ask(request)
