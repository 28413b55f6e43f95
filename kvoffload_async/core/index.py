"""Indexes of a tier's contents on the owner's side: a lookup never leaves the owner's thread.

A tier that only this instance changes has an exact index. Other tiers are probed: one batched
existence probe per step for the step's new keys, shared between requests. Probes can be limited to
requests that miss enough blocks for a load to pay.

Loading n blocks takes `latency + n * block_s`, computing them `n * compute_s`. So loading pays from
`latency / (compute_s - block_s)` blocks on, and never if a block takes at least as long to load as
to compute.

The model is fitted to the duration of whole jobs, queueing included, since one job loads all blocks
of a request; throughput would hide the effect of concurrent jobs. A least-squares fit of duration
over blocks, with weights that decay by a tenth per job and no negative coefficient, yields
`block_s` and the fixed time. The latency is the fixed time plus the mean probe time. Jobs of nearly
equal sizes determine no slope. Then the more favourable extreme is assumed, all fixed time or all
per-block time, so that other sizes are tried and measured.

Sources: the line is the linear cost model of a message (R. Hockney, "The communication challenge
for MPP", Parallel Computing 20, 1994); its running sums are those of T. Finch, "Incremental
calculation of weighted mean and variance" (2009), with decay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, Final

from kvoffload_async.core.ledger import StartProbe
from kvoffload_async.statistics import BreakEvenStatistics
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext, get_offload_group_idx

FRESH_S: Final = 30.0
"""Seconds without a sample after which measurements are stale: a request may explore, and the next
sample replaces them."""
EXPLORATION_PAUSE_S: Final = 5.0
"""Seconds between the starts of explorations that measure no load."""
MOST_BLOCKS: Final = 1 << 40
"""Upper bound of the break-even point; above it no load pays."""

_LEAST_BLOCK_S: Final = 1e-12
_DECAY: Final = 0.9
_LEAST_SPREAD: Final = 1 / 16
"""Minimum squared coefficient of variation of the job sizes for which a slope is fitted."""

_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_RETRY: Final = LookupResult.RETRY


class BreakEven:
    """Measures a tier's probes and loads, and computes the number of blocks from which loads pay.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        explorations: Number of requests admitted below the break-even point to measure the tier.
    """

    def __init__(self, prefill_blocks_per_s: float) -> None:
        """Start without measurements: until the first load, any number of blocks pays.

        Args:
            prefill_blocks_per_s: Prefill throughput of the accelerator, in blocks per second.
        """
        self.explorations = 0
        self._compute_s = 1 / prefill_blocks_per_s
        self._now_s = 0.0
        self._probe_s = 0.0
        self._probed_at_s = -math.inf
        self._loads = _Line()
        self._loaded_at_s = -math.inf
        self._explored_at_s = -math.inf
        self._is_exploring = False

    # -- measuring ------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Set the time, once per step, in seconds; later measurements get this timestamp."""
        self._now_s = now_s

    def probe_ended(self, seconds: float, *, worked: bool) -> None:
        """Record the duration of a probe, in seconds.

        A failed probe counts only if it took longer than the mean, as after a timeout.
        """
        is_first = self._is_old(self._probed_at_s)
        if not worked and (is_first or seconds <= self._probe_s):
            return
        if is_first:
            self._probe_s = seconds
        else:
            self._probe_s += (1 - _DECAY) * (seconds - self._probe_s)
        self._probed_at_s = self._now_s

    def load_ended(self, num_blocks: int, seconds: float) -> None:
        """Record the duration, in seconds, of a load that succeeded for all its blocks."""
        loads = _Line() if self._is_old(self._loaded_at_s) else self._loads
        loads.add(num_blocks, seconds)
        self._loads = loads  # last, because other threads read it, and an empty line has no slope
        self._loaded_at_s = self._now_s

    # -- results --------------------------------------------------------------------------------

    @property
    def needed_blocks(self) -> float:
        """Break-even point: the least number of blocks for which a load pays, or infinity."""
        if not self._loads.weight:
            return 0
        blocks = self._break_even(self._best())
        return math.ceil(blocks) if blocks <= MOST_BLOCKS else math.inf

    @property
    def latency_s(self) -> float | None:
        """Fixed part of a load's time, in seconds, probe included; None before the first load."""
        return self._probe_s + self._best()[0] if self._loads.weight else None

    @property
    def blocks_per_s(self) -> float | None:
        """Blocks loaded per second after the latency; None without loads or per-block time."""
        block_s = self._best()[1] if self._loads.weight else 0.0
        return 1 / block_s if block_s > _LEAST_BLOCK_S else None

    # -- exploring ------------------------------------------------------------------------------

    @property
    def may_explore(self) -> bool:
        """Whether the load measurements are stale and no exploration is under way."""
        pause_s = FRESH_S if self._is_exploring else EXPLORATION_PAUSE_S
        began_ago_s = self._now_s - self._explored_at_s
        return self._is_old(self._loaded_at_s) and began_ago_s >= pause_s

    def explore(self) -> None:
        """Record that a request below the break-even point is admitted, to measure the tier."""
        self.explorations += 1
        self._explored_at_s = self._now_s
        self._is_exploring = True

    def exploration_ended(self) -> None:
        """Record that the exploring request has ended; another may explore."""
        self._is_exploring = False

    # -- internal -------------------------------------------------------------------------------

    def _is_old(self, sampled_at_s: float) -> bool:
        return self._now_s - sampled_at_s >= FRESH_S

    def _break_even(self, line: tuple[float, float]) -> float:
        fixed_s, block_s = line
        gain_s = self._compute_s - block_s
        return (self._probe_s + fixed_s) / gain_s if gain_s > 0 else math.inf

    def _best(self) -> tuple[float, float]:
        return min(self._loads.candidates(), key=self._break_even)


class _Line:
    """Decaying least-squares fit of seconds over blocks of recent loads."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._blocks = 0.0
        self._seconds = 0.0
        self._blocks_squared = 0.0
        """Sum of the squared deviations of the blocks from their mean."""
        self._product = 0.0

    def add(self, num_blocks: int, seconds: float) -> None:
        self.weight = _DECAY * self.weight + 1
        away = num_blocks - self._blocks
        self._blocks += away / self.weight
        self._seconds += (seconds - self._seconds) / self.weight
        self._blocks_squared = _DECAY * self._blocks_squared + away * (num_blocks - self._blocks)
        self._product = _DECAY * self._product + away * (seconds - self._seconds)

    def candidates(self) -> tuple[tuple[float, float], ...]:
        """Return the candidate fits, each as (fixed seconds, seconds per block).

        One pair if a line can be fitted, otherwise both extremes: all fixed, all per block.
        """
        blocks, seconds = self._blocks, self._seconds
        squares = self.weight * blocks * blocks
        if self._blocks_squared < _LEAST_SPREAD * squares:
            return (seconds, 0.0), (0.0, seconds / blocks)
        block_s = max(0.0, self._product / self._blocks_squared)
        fixed_s = seconds - block_s * blocks
        if fixed_s >= 0:
            return ((fixed_s, block_s),)
        # A negative fixed time is impossible: fit a line through the origin instead.
        through = self._product + self.weight * blocks * seconds
        return ((0.0, through / (self._blocks_squared + squares)),)


AskNearer = Callable[[Sequence[OffloadKey], Any], Sequence[LookupResult]]
"""Looks keys up in the nearer tiers on behalf of a request; returns HIT, MISS or RETRY for each."""

OnResolved = Callable[[Sequence[OffloadKey]], object]
"""Called with keys whose lookup result has changed; must not call back into the core."""


class KeyIndex(ABC):
    """Answers whether a tier has a key.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        listeners: Called with the keys of every answered probe.
        notifies: Whether listeners are called for every key that was answered with RETRY.
        is_exact: Whether the index knows all of the tier's contents.
    """

    notifies: bool = True
    is_exact: bool = False

    def __init__(self) -> None:
        self.listeners: list[OnResolved] = []

    @abstractmethod
    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return HIT, MISS or RETRY for each key, in order.

        Args:
            keys: The keys, without duplicates.
            request: The request that looks up the keys.
            stop_at_miss: Whether the answers end with the first MISS; later keys are not looked up.
        """

    def lookup(self, key: OffloadKey, request: Hashable) -> LookupResult:
        """Look up one key; see `lookup_many`."""
        return self.lookup_many((key,), request)[0]

    @abstractmethod
    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Record that the tier has these blocks; takes ownership of a `KeyMap`."""

    @abstractmethod
    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Record that the tier does not have these blocks any more.

        Args:
            keys: Keys of the blocks.
            surely: False if the blocks may still be there: a load of them failed with a transient
                error.
        """

    def following(self, key: OffloadKey | None, count: int) -> list[OffloadKey]:
        """Return the next keys of an exact index; see `KeyMap.following`."""
        return []

    def deleted(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these blocks were deleted: an answer to an earlier probe is outdated."""
        self.vanished(keys, surely=True)

    @abstractmethod
    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys known to be absent. Starts no probe."""

    @abstractmethod
    def peek(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return HIT or MISS for each key, RETRY while the answer is unknown. Starts no probe."""

    def next_probe(self) -> StartProbe | None:
        """Return the probe to start now, at the end of a step."""
        return None

    def answered(  # noqa: B027 - an exact index never asks
        self, generation: int, present: frozenset[OffloadKey]
    ) -> None:
        """Record the answer of a probe."""

    def tier_suspended(self) -> None:  # noqa: B027 - an exact index has no queued keys
        """Handle the end of a step in which the tier is suspended, so that no probe may start."""

    def forget_request(self, request: Hashable) -> None:  # noqa: B027 - nor state per request
        """Drop the state of a request that has ended."""

    def watch(self, listener: OnResolved) -> None:
        """Add a listener, to be called with the keys of each answered probe; idempotent."""
        if listener not in self.listeners:
            self.listeners.append(listener)

    def _notify(self, keys: Sequence[OffloadKey]) -> None:
        for listener in self.listeners:
            listener(keys)

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is outstanding."""
        return False

    @property
    def probes_outstanding(self) -> int:
        """Number of probes that have no answer yet."""
        return 0


class ExactIndex(KeyIndex):
    """The contents of a tier that only this instance changes.

    Memory per block: 38 bytes at a million blocks, 30 at ten million, up to twice that after churn;
    plus 69 bytes for a 36-byte key, unless the primary shares the key object.
    """

    is_exact = True

    def __init__(self) -> None:
        super().__init__()
        self._present = KeyMap()

    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return HIT or MISS for each key."""
        answers: list[LookupResult] = []
        for number in self._present.find(keys):
            answers.append(_MISS if number is None else _HIT)
            if stop_at_miss and number is None:
                break
        return answers

    def peek(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return HIT or MISS for each key."""
        found = self._present.find(keys)
        return [_MISS if each is None else _HIT for each in found]

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Add the keys of blocks that the tier has."""
        if isinstance(keys, KeyMap):
            # `keys` is the larger table: the tier's whole contents.
            keys.update(tuple(self._present), repeat(0))
            self._present = keys
        else:
            self._present.update(keys, repeat(0))

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Drop the keys if they are surely gone; after a transient error, keep them."""
        if surely:
            self._present.discard(keys)

    def following(self, key: OffloadKey | None, count: int) -> list[OffloadKey]:
        """Return the next keys; see `KeyMap.following`."""
        return self._present.following(key, count)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the absent keys."""
        found = self._present.find(keys)
        return [key for key, number in zip(keys, found, strict=True) if number is None]

    def __len__(self) -> int:
        return len(self._present)


_PENDING, _IN_FLIGHT, _ABSENT, _PRESENT = range(4)
_PHASES: Final = 4
"""A verdict is one integer: phase + `_PHASES` * number of live requests that use the verdict."""

_ANSWERS: Final = (_RETRY, _RETRY, _MISS, _HIT)


class ProbedIndex(KeyIndex):
    """Cached answers of existence probes, for the keys that live requests have looked up.

    The *verdict* on a key is kept until the last request that looked up the key ends. A probe in
    flight is kept after its requests have ended, and later requests share it. An answer contains
    the probe's generation, so that a late answer is not mistaken for that of a later probe.
    """

    def __init__(
        self,
        concurrent_probes: int,
        keys_per_probe: int = 4096,
        *,
        keeps_order: bool = False,
    ) -> None:
        """Start without cached answers.

        Args:
            concurrent_probes: Maximum number of probes in flight, so that a hung probe does not
                delay the others.
            keys_per_probe: Maximum number of keys per probe; further keys wait for the next step.
            keeps_order: Whether probes list their keys as chains; see `_chains`.
        """
        super().__init__()
        self._concurrent_probes = concurrent_probes
        self._keys_per_probe = keys_per_probe
        self._keeps_order = keeps_order
        self._verdicts = KeyMap()
        self._by_request: dict[Hashable, dict[OffloadKey, None]] = {}
        self._pending: dict[OffloadKey, Hashable] = {}
        """Queued key -> the first request that looked it up, in lookup order."""
        self._is_awaited = False
        """Whether a queued key was looked up (answer: RETRY) since the last `tier_suspended`."""
        self._in_flight: dict[int, tuple[OffloadKey, ...]] = {}
        self._deleted: set[OffloadKey] = set()
        """Keys of probes in flight that were deleted since."""
        self._generation = 0

    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return HIT, MISS, or RETRY while a probe is queued or in flight, for each key."""
        asked = self._by_request.setdefault(request, {})
        new: list[OffloadKey] = []
        new_verdicts: list[int] = []
        answers: list[LookupResult] = []
        for key, known in zip(keys, self._verdicts.find(keys), strict=True):
            verdict = _PENDING if known is None else known
            if known is None:
                self._pending[key] = request
            if key not in asked:
                asked[key] = None
                new.append(key)
                new_verdicts.append(verdict + _PHASES)
            phase = verdict % _PHASES
            answers.append(_ANSWERS[phase])
            self._is_awaited |= phase == _PENDING
            if stop_at_miss and phase == _ABSENT:
                break
        if new:
            self._verdicts.update(new, new_verdicts)
        return answers

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Set the cached verdict on each of these keys, if there is one, to "present"."""
        self._flip(tuple(keys), _PRESENT)

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Set the cached verdicts on these keys to "absent", even if not `surely`.

        Otherwise a request would load blocks again and again that the tier cannot deliver.
        """
        self._flip(keys, _ABSENT)

    def deleted(self, keys: Sequence[OffloadKey]) -> None:
        """Set the cached verdicts to "absent", also those of probes in flight at their end."""
        if self._in_flight:
            known = self._known(keys).items()
            self._deleted.update(key for key, v in known if v % _PHASES == _IN_FLIGHT)
        self._flip(keys, _ABSENT)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys with a verdict of absent."""
        known = self._known(keys).items()
        return [key for key, verdict in known if verdict % _PHASES == _ABSENT]

    def peek(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return the current verdicts; MISS for a key that no live request has looked up."""
        found = self._verdicts.find(keys)
        return [_MISS if v is None else _ANSWERS[v % _PHASES] for v in found]

    def next_probe(self) -> StartProbe | None:
        """Return a probe of the queued keys; None if there are none, or at the probe limit."""
        if not self._pending or len(self._in_flight) >= self._concurrent_probes:
            return None
        self._generation += 1
        keys = tuple(islice(self._pending, self._keys_per_probe))
        chains = self._chains(keys) if self._keeps_order else ()
        for key in keys:
            del self._pending[key]
        self._enter(keys, _IN_FLIGHT)
        self._in_flight[self._generation] = keys
        return StartProbe(self._generation, keys, chains)

    def answered(self, generation: int, present: frozenset[OffloadKey]) -> None:
        """Resolve the keys of a probe; the second answer to a probe is ignored."""
        keys = self._in_flight.pop(generation, ())
        if self._deleted:
            present = present - self._deleted
            self._deleted.difference_update(keys)
        known, phases = self._known(keys), (_ABSENT, _PRESENT)
        verdicts = [v - v % _PHASES + phases[key in present] for key, v in known.items()]
        self._verdicts.update(tuple(known), verdicts)
        self._forget_unasked(keys)
        self._notify(keys)

    def tier_suspended(self) -> None:
        """Notify the listeners of the queued keys, which stay queued.

        The tier is suspended, so a waiting lookup should be repeated: it then skips this tier.
        Notifies again only after a queued key has been looked up again.
        """
        if self._is_awaited:
            self._is_awaited = False
            self._notify(tuple(self._pending))

    def forget_request(self, request: Hashable) -> None:
        """Drop the verdicts that no other request uses; probes in flight are kept."""
        keys = list(self._by_request.pop(request, ()))
        known = self._known(keys)
        self._verdicts.update(tuple(known), [verdict - _PHASES for verdict in known.values()])
        self._forget_unasked(keys)

    @property
    def is_waiting(self) -> bool:
        """Whether a key is queued or in flight."""
        return bool(self._in_flight) or bool(self._pending)

    @property
    def probes_outstanding(self) -> int:
        """Number of probes that have no answer yet."""
        return len(self._in_flight)

    def __len__(self) -> int:
        return len(self._verdicts)

    def _chains(self, keys: Sequence[OffloadKey]) -> tuple[tuple[OffloadKey, ...], ...]:
        """Split queued keys into chains, each of one request and KV-cache group, head to tail.

        Keys of a sliding-window group were looked up tail first. Each of them is a chain of its
        own, because its block is useful without the preceding ones.
        """
        chains: dict[tuple[Hashable, int, int], list[OffloadKey]] = {}
        last: dict[tuple[Hashable, int], tuple[int, int]] = {}
        for key in keys:
            request, group = self._pending[key], get_offload_group_idx(key)
            position = request.key_positions.get(key, 0) if isinstance(request, ReqContext) else 0
            number, before = last.get((request, group), (0, position))
            if position < before:
                number += 1
            last[request, group] = (number, position)
            chains.setdefault((request, group, number), []).append(key)
        return tuple(map(tuple, chains.values()))

    def _known(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return key -> verdict for the keys that have a verdict."""
        found = zip(keys, self._verdicts.find(keys), strict=True)
        return {key: verdict for key, verdict in found if verdict is not None}

    def _enter(self, keys: Sequence[OffloadKey], phase: int) -> None:
        known = self._known(keys)
        verdicts = [verdict - verdict % _PHASES + phase for verdict in known.values()]
        self._verdicts.update(tuple(known), verdicts)

    def _flip(self, keys: Sequence[OffloadKey], phase: int) -> None:
        known = self._known(keys).items()
        self._enter([key for key, verdict in known if verdict % _PHASES >= _ABSENT], phase)

    def _forget_unasked(self, keys: Sequence[OffloadKey]) -> None:
        """Drop verdicts that no request uses any more, unless a probe of the key is in flight."""
        known = self._known(keys).items()
        unasked = [key for key, verdict in known if verdict < _PHASES and verdict != _IN_FLIGHT]
        self._verdicts.discard(unasked)
        for key in unasked:
            self._pending.pop(key, None)


class CostGatedIndex(KeyIndex):
    """Queries an inner index only for requests that miss enough blocks for a load to pay.

    The keys of its lookups are *missed*: the primary and the nearer tiers lack them. The number of
    blocks that a request misses is known at the end of the step of its first lookup, or when the
    nearer tiers have resolved all its keys. Until then the answer is RETRY. Afterwards it is MISS
    if the request misses too few blocks (the request is *declined*), until it has missed enough.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        break_even: Measures the number of blocks from which a load pays; None: only the configured
            minimum applies.
        needed_blocks: Number of blocks that a request must miss; infinity if no number suffices.
            Read-only.
        has_decided: Whether the answers for a request have changed at the end of the last step.
        unknown: Request -> keys, at least one, that a nearer tier has not resolved yet. Read-only.
    """

    def __init__(
        self, index: KeyIndex, min_blocks: int, break_even: BreakEven | None = None
    ) -> None:
        """Start with no request admitted or declined.

        Args:
            index: The inner index; this object takes ownership.
            min_blocks: Minimum number of blocks that a request must miss.
            break_even: See the class.
        """
        self.listeners, self.is_exact = index.listeners, index.is_exact
        self.break_even = break_even
        self.has_decided = False
        self.unknown: dict[Hashable, dict[OffloadKey, None]] = {}
        self._index = index
        self._min_blocks = min_blocks
        self.needed_blocks: float = min_blocks
        self._worthwhile: set[Hashable] = set()
        self._missed: dict[Hashable, dict[OffloadKey, None]] = {}
        """Request that has missed too few blocks so far -> the keys it has missed."""
        self._deferred: dict[Hashable, dict[OffloadKey, None]] = {}
        """Undecided request -> its keys answered with RETRY, which have to be looked up again. A
        decided request stays until the end of the step."""
        self._explorer: Hashable = None

    def statistics(self) -> BreakEvenStatistics | None:
        """Return the break-even point; None if it is not measured. Thread-safe."""
        measured, needed = self.break_even, self.needed_blocks
        if measured is None:
            return None
        return BreakEvenStatistics(
            needed_blocks=None if math.isinf(needed) else int(needed),
            latency_s=measured.latency_s,
            blocks_per_s=measured.blocks_per_s,
            explorations=measured.explorations,
        )

    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return the inner index's answers; RETRY while undecided, MISS for a declined request."""
        if request not in self._worthwhile:
            missed = self._missed.get(request)
            if missed is None:
                missed = self._missed[request] = self._deferred[request] = {}
            if len(missed.keys() | keys) < self.needed_blocks:
                missed.update(dict.fromkeys(keys))
                if not self.declines(request):
                    return [_RETRY] * len(keys)
                return [_MISS] * (1 if stop_at_miss else len(keys))
            self._ask(request)
        return self._index.lookup_many(keys, request, stop_at_miss=stop_at_miss)

    def declines(self, request: Hashable) -> bool:
        """Return whether a request is declined: it misses too few blocks."""
        return request in self._missed and request not in self._deferred

    def expect(self, keys: Sequence[OffloadKey], request: Hashable) -> None:
        """Record keys of a request that a nearer tier has not resolved yet."""
        if not keys or request in self._worthwhile or self.declines(request):
            return
        self.unknown.setdefault(request, {}).update(dict.fromkeys(keys))

    def resolve(self, ask_nearer: AskNearer) -> None:
        """Count the keys that all nearer tiers lack as missed; call before a step's end.

        Args:
            ask_nearer: Looks keys up in the nearer tiers; RETRY while an answer is outstanding.
        """
        for request, unknown in tuple(self.unknown.items()):
            first = next(iter(unknown))
            if ask_nearer((first,), request)[0] is _RETRY:
                continue  # so a request that waits costs a step no time per block
            keys = tuple(unknown)
            for key, answer in zip(keys, ask_nearer(keys, request), strict=True):
                if answer is _RETRY:
                    break
                del unknown[key]
                if answer is _MISS and request in self._missed:
                    self._missed[request][key] = None
            if not unknown:
                del self.unknown[request]

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Record that the tier has these blocks."""
        self._index.appeared(keys)

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Record that the tier does not have these blocks any more; see `KeyIndex.vanished`."""
        self._index.vanished(keys, surely=surely)

    def following(self, key: OffloadKey | None, count: int) -> list[OffloadKey]:
        """Return the next keys of an exact inner index."""
        return self._index.following(key, count)

    def deleted(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these blocks were deleted; see `KeyIndex.deleted`."""
        self._index.deleted(keys)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys known to be absent."""
        return self._index.lacks(keys)

    def peek(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return the inner index's answers."""
        return self._index.peek(keys)

    def next_probe(self) -> StartProbe | None:
        """End a step: admit or decline the undecided requests; return the next probe."""
        self._decide(may_explore=True)
        return self._index.next_probe()

    def answered(self, generation: int, present: frozenset[OffloadKey]) -> None:
        """Record the answer of a probe."""
        self._index.answered(generation, present)

    def tier_suspended(self) -> None:
        """End a step in which the tier is suspended: admit or decline the undecided requests."""
        self._decide(may_explore=False)
        self._index.tier_suspended()

    def forget_request(self, request: Hashable) -> None:
        """Drop the state of a request that has ended."""
        self._worthwhile.discard(request)
        self._missed.pop(request, None)
        self._deferred.pop(request, None)
        self.unknown.pop(request, None)
        if self.break_even is not None and request == self._explorer:
            self._explorer = None
            self.break_even.exploration_ended()
        self._index.forget_request(request)

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is outstanding or a request is undecided."""
        return bool(self._deferred) or self._index.is_waiting

    @property
    def probes_outstanding(self) -> int:
        """Number of probes that have no answer yet."""
        return self._index.probes_outstanding

    def _decide(self, *, may_explore: bool) -> None:
        """Admit or decline each deferred request, and notify the listeners of its keys."""
        if self.break_even is not None:
            self.needed_blocks = max(self._min_blocks, self.break_even.needed_blocks)
        deferred, self._deferred = self._deferred, {}
        decided: dict[OffloadKey, None] = {}
        declined: dict[Hashable, int] = {}
        for request, missed in deferred.items():
            if request in self.unknown:
                self._deferred[request] = missed
                continue
            decided |= missed
            if request in self._worthwhile:
                continue
            if len(missed) >= self.needed_blocks:
                self._ask(request)
            else:
                declined[request] = len(missed)
        if may_explore and declined:
            self._explore(declined)
        self.has_decided = bool(decided)
        if decided:
            self._notify(tuple(decided))

    def _ask(self, request: Hashable) -> None:
        """Admit a request: look its missed keys up, and forward all its later lookups."""
        self._worthwhile.add(request)
        self.unknown.pop(request, None)
        self._index.lookup_many(tuple(self._missed.pop(request)), request)

    def _explore(self, declined: Mapping[Hashable, int]) -> None:
        """If the measurements are stale, admit the declined request that misses most blocks."""
        request = max(declined, key=declined.__getitem__)
        break_even = self.break_even
        if break_even is None or declined[request] < self._min_blocks or not break_even.may_explore:
            return
        break_even.explore()
        self._explorer = request
        self._ask(request)


class AskedIndex(KeyIndex):
    """Queries the tier synchronously for every key of a lookup; caches nothing.

    Not thread-safe; call only from the owner's thread.
    """

    notifies = False

    def __init__(
        self,
        ask: Callable[[OffloadKey, Any], LookupResult],
        request_ended: Callable[[Any], object],
    ) -> None:
        """Create the index, without calling `ask`.

        Args:
            ask: Returns HIT, MISS or RETRY without blocking, for a key and its request.
            request_ended: Called with a request when no more jobs will be submitted for it.
        """
        super().__init__()
        self._ask = ask
        self._request_ended = request_ended

    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return the tier's answer for each key."""
        answers: list[LookupResult] = []
        for key in keys:
            answers.append(self._ask(key, request))
            if stop_at_miss and answers[-1] is _MISS:
                break
        return answers

    def peek(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return HIT for each key: only a lookup tells whether the tier has it."""
        return [_HIT] * len(keys)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return an empty list: no key is known to be absent."""
        return []

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Do nothing: every lookup queries the tier."""

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Do nothing: every lookup queries the tier."""

    def forget_request(self, request: Hashable) -> None:
        """Forward the end of a request to the tier."""
        self._request_ended(request)
