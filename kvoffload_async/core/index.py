"""What an owner knows of a tier's contents, so that a lookup never leaves the owner's thread.

A tier that is changed by this instance alone has an exact index. Any other tier is probed: one
batched existence probe for the keys that are new in a step, shared between requests. A tier may be
asked only where loading from it can pay: for requests that miss many blocks.

Loading n blocks takes `latency + n * block_s`, computing them `n * compute_s`: loading pays from
`latency / (compute_s - block_s)` blocks on, and never where a block takes no less time to load
than to compute.

What is measured is what a request goes through under the present load, queues included. Its blocks
come in one job, so the time of whole jobs counts, from their arrival in the tier's queue to their
end, and not the tier's throughput: where several jobs run at once, each takes longer than its share
of that. A line through the recent jobs' times over their blocks (least squares, neither part of it
negative, each job weighing nine tenths of the next) tells what grows with the blocks; what does not
is latency, and so is the mean time of a probe. Recent jobs that are all about as large determine no
line. What they allow for is taken at its best then, so that other sizes are tried, and measured:
for fewer blocks that the time is all the blocks', for more that none of it is.

Sources: the line is the linear cost model of a message (R. Hockney, "The communication challenge
for MPP", Parallel Computing 20, 1994); its running sums are those of T. Finch, "Incremental
calculation of weighted mean and variance" (2009), with decay.

Heads of prompts: a batch is head to tail, grouped by KV-cache group. A group's blocks are worth
nothing without those of the others for the same tokens, so it is cut at a token, over all groups.
Without positions only
the order in one group is known, and a batch of several groups is not cut.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from heapq import heappush, heapreplace
from itertools import islice, repeat
from math import inf
from typing import Any, Final

from kvoffload_async.core.ledger import StartProbe
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)


def longest_fitting_prefix(
    keys: Sequence[OffloadKey], positions: Mapping[OffloadKey, int], room: int
) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
    """Split keys into the longest head of at most `room`, and the rest, each in their order.

    Args:
        keys: Without duplicates.
        positions: Key -> the end token of its block.
        room: How many blocks fit.
    """
    if len(keys) <= room:
        return keys, ()
    ends = [positions[key] for key in keys if key in positions]
    if len(ends) < len(keys):
        is_one_group = len({get_offload_group_idx(key) for key in keys}) == 1
        return (keys[:room], keys[room:]) if is_one_group else ((), keys)
    first_out = sorted(ends)[room]
    fits = [end < first_out for end in ends]
    return (
        [key for key, is_in in zip(keys, fits, strict=True) if is_in],
        [key for key, is_in in zip(keys, fits, strict=True) if not is_in],
    )


def those_before(
    left_out: Sequence[OffloadKey],
    keys: Sequence[OffloadKey],
    positions: Mapping[OffloadKey, int],
) -> Sequence[OffloadKey]:
    """Return which of `keys` lie before all that `longest_fitting_prefix` left out of them."""
    if not left_out:
        return keys
    if left_out[0] not in positions:
        return keys[: keys.index(left_out[0])]
    first_out = min(positions[key] for key in left_out)
    return [key for key in keys if positions.get(key, first_out) < first_out]


def prefix_test(
    wanted: Sequence[OffloadKey],
    used: Collection[OffloadKey],
    positions: Mapping[OffloadKey, int],
) -> Callable[[OffloadKey], bool]:
    """Return a test for the keys that a request has used and that precede `wanted` in its prompt.

    The request must not evict these blocks to store `wanted`.
    """
    first = min(positions.get(key, 0) for key in wanted)
    return lambda key: positions.get(key, first) < first and key in used


def nearest_before(
    key: OffloadKey, positions: dict[OffloadKey, int], most: int
) -> tuple[OffloadKey, ...]:
    """Return the keys of the same group that come right before `key`, head to tail.

    Positions are looked through once, from the last one on: mostly they were learned head to tail,
    and then all but a few are passed over at the price of a comparison.

    Args:
        key: Nothing is known to come before one without a position.
        positions: Key -> the end token of its block, of all groups, in any order.
        most: How many keys, at most; 1 at least.
    """
    end = positions.get(key)
    if end is None:
        return ()
    group = key.removeprefix(get_offload_block_hash(key))
    nearest: list[tuple[int, OffloadKey]] = []
    beyond = -inf
    for other, position in reversed(positions.items()):
        if beyond < position < end and other.endswith(group):
            if len(nearest) < most:
                heappush(nearest, (position, other))
            else:
                heapreplace(nearest, (position, other))
            if len(nearest) == most:
                beyond = nearest[0][0]
    return tuple(other for _, other in sorted(nearest))


FRESH_S: Final = 30.0
"""Without a sample for so long what was measured is old: a request may explore, and the next sample
counts alone."""
EXPLORATION_PAUSE_S: Final = 5.0
"""After an exploration that has found nothing to load, the next one begins so much later."""
MOST_BLOCKS: Final = 1 << 40
"""Nobody misses more."""

_LEAST_BLOCK_S: Final = 1e-12
_DECAY: Final = 0.9
_LEAST_SPREAD: Final = 1 / 16
"""Of the jobs' blocks, the square of the deviation over that of the mean: a quarter either way."""


class BreakEven:
    """Measures a tier's probes and loads; says how many blocks have to be missed.

    Thread: owner.

    Attributes:
        explorations: Requests that were let through to measure anew.
    """

    def __init__(self, prefill_blocks_per_s: float) -> None:
        """Start without a measurement: until there is one, any number of blocks pays.

        Args:
            prefill_blocks_per_s: Blocks that the accelerator computes in a second of prefill.
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
        """Note the time, once a step; what comes in until the next time has happened then."""
        self._now_s = now_s

    def probe_ended(self, seconds: float, *, worked: bool) -> None:
        """Take in how long a probe took.

        One that failed says only that it may take longer than is known, as at its deadline; what
        fails is the breaker's.
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
        """Take in how long a load of some blocks took that has brought all of them."""
        if self._is_old(self._loaded_at_s):
            self._loads = _Line()
        self._loads.add(num_blocks, seconds)
        self._loaded_at_s = self._now_s

    # -- what follows ---------------------------------------------------------------------------

    @property
    def needed_blocks(self) -> float:
        """The least number of blocks that pays; infinity: none does."""
        if not self._loads.weight:
            return 0
        blocks = self._break_even(self._best())
        return math.ceil(blocks) if blocks <= MOST_BLOCKS else math.inf

    @property
    def latency_s(self) -> float | None:
        """What loading takes however few the blocks are; None: no load was measured."""
        return self._probe_s + self._best()[0] if self._loads.weight else None

    @property
    def blocks_per_s(self) -> float | None:
        """How fast the rest of it goes; None: no load was measured, or it is all latency."""
        block_s = self._best()[1] if self._loads.weight else 0.0
        return 1 / block_s if block_s > _LEAST_BLOCK_S else None

    # -- exploring ------------------------------------------------------------------------------

    @property
    def may_explore(self) -> bool:
        """Whether what was measured is old, and nobody measures it anew."""
        pause_s = FRESH_S if self._is_exploring else EXPLORATION_PAUSE_S
        began_ago_s = self._now_s - self._explored_at_s
        return self._is_old(self._loaded_at_s) and began_ago_s >= pause_s

    def explore(self) -> None:
        """Let a request through."""
        self.explorations += 1
        self._explored_at_s = self._now_s
        self._is_exploring = True

    def exploration_ended(self) -> None:
        """Note that the request that was let through has ended; no other waits for it any more."""
        self._is_exploring = False

    # -- inside ---------------------------------------------------------------------------------

    def _is_old(self, sampled_at_s: float) -> bool:
        return self._now_s - sampled_at_s >= FRESH_S

    def _break_even(self, line: tuple[float, float]) -> float:
        fixed_s, block_s = line
        gain_s = self._compute_s - block_s
        return (self._probe_s + fixed_s) / gain_s if gain_s > 0 else math.inf

    def _best(self) -> tuple[float, float]:
        return min(self._loads.candidates(), key=self._break_even)


class _Line:
    """Seconds over blocks, of the recent loads."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._blocks = 0.0
        self._seconds = 0.0
        self._blocks_squared = 0.0
        """The sum of the squares of what is away from the mean, as is the one below."""
        self._product = 0.0

    def add(self, num_blocks: int, seconds: float) -> None:
        self.weight = _DECAY * self.weight + 1
        away = num_blocks - self._blocks
        self._blocks += away / self.weight
        self._seconds += (seconds - self._seconds) / self.weight
        self._blocks_squared = _DECAY * self._blocks_squared + away * (num_blocks - self._blocks)
        self._product = _DECAY * self._product + away * (seconds - self._seconds)

    def candidates(self) -> tuple[tuple[float, float], ...]:
        """Return (what does not grow with the blocks, seconds a block): one, or the extremes."""
        blocks, seconds = self._blocks, self._seconds
        squares = self.weight * blocks * blocks
        if self._blocks_squared < _LEAST_SPREAD * squares:
            return (seconds, 0.0), (0.0, seconds / blocks)
        block_s = max(0.0, self._product / self._blocks_squared)
        fixed_s = seconds - block_s * blocks
        if fixed_s >= 0:
            return ((fixed_s, block_s),)
        # The best line through the origin.
        through = self._product + self.weight * blocks * seconds
        return ((0.0, through / (self._blocks_squared + squares)),)


OnResolved = Callable[[Sequence[OffloadKey]], object]
"""Called with keys whose answer has changed or become known; must not call back into the core."""


class KeyIndex(ABC):
    """Answers whether a tier has a key.

    Thread: owner.

    Attributes:
        listeners: Each is called with the keys of every probe that was answered.
        notifies: Whether the listeners are called for every key that was answered with RETRY.
    """

    notifies: bool = True

    def __init__(self) -> None:
        self.listeners: list[OnResolved] = []

    @abstractmethod
    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return HIT, MISS or RETRY for each key, in order.

        Args:
            keys: The keys, without duplicates.
            request: Who asks.
            stop_at_miss: Whether the answers end with the first MISS; later keys are not asked for.
        """

    def lookup(self, key: OffloadKey, request: Hashable) -> LookupResult:
        """Return the answer of `lookup_many` for one key."""
        return self.lookup_many((key,), request)[0]

    @abstractmethod
    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Blocks were stored, or found; a `KeyMap` may be kept."""

    @abstractmethod
    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Blocks are gone (`surely`), or could not be loaded for a reason that may pass."""

    @abstractmethod
    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that are known to be absent. Asks nobody."""

    @abstractmethod
    def peek(self, key: OffloadKey) -> LookupResult:
        """Return HIT, or MISS, or RETRY while an answer is outstanding. Asks nobody."""

    def next_probe(self) -> StartProbe | None:
        """Return the probe to start now, at the end of a step."""
        return None

    def answered(  # noqa: B027 - an exact index never asks
        self, generation: int, present: frozenset[OffloadKey]
    ) -> None:
        """A probe ended."""

    def left_alone(self) -> None:  # noqa: B027 - nobody waits for an exact index
        """No probe may be started now: lookups skip the tier."""

    def forget_request(self, request: Hashable) -> None:  # noqa: B027 - nor remembers who asked
        """A request ended."""

    def watch(self, listener: OnResolved) -> None:
        """Call `listener` with the keys of every probe that is answered from now on; idempotent."""
        if listener not in self.listeners:
            self.listeners.append(listener)

    def _notify(self, keys: Sequence[OffloadKey]) -> None:
        for listener in self.listeners:
            listener(keys)

    @property
    def is_exact(self) -> bool:
        """Whether all of the tier's contents are known here."""
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is outstanding."""
        return False

    @property
    def probes_outstanding(self) -> int:
        """Probes that have no answer yet."""
        return 0


class ExactIndex(KeyIndex):
    """The contents of a tier that nobody else changes.

    Bytes a block: 38 at a million and 30 at ten, up to twice that once blocks have come and gone;
    and 69 for a key of 36, unless it is the object that the primary has too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._present = KeyMap()

    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return HIT or MISS for each key."""
        hit, miss = LookupResult.HIT, LookupResult.MISS
        answers = [miss if number is None else hit for number in self._present.find(keys)]
        return answers[: answers.index(miss) + 1] if stop_at_miss and miss in answers else answers

    def peek(self, key: OffloadKey) -> LookupResult:
        """Return HIT or MISS."""
        return LookupResult.MISS if self._present.get(key) is None else LookupResult.HIT

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Add keys."""
        if isinstance(keys, KeyMap):
            keys.merge(self._present)  # what is known so far is little: a tier tells all at once
            self._present = keys
        else:
            self._present.update(keys, repeat(0))

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Drop keys that are surely gone; the others may well load next time."""
        if surely:
            self._present.discard(keys)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that are not there."""
        found = self._present.find(keys)
        return [key for key, number in zip(keys, found, strict=True) if number is None]

    @property
    def is_exact(self) -> bool:
        """True."""
        return True

    def __len__(self) -> int:
        return len(self._present)


_PENDING, _IN_FLIGHT, _ABSENT, _PRESENT = range(4)
_PHASES: Final = 4
"""A verdict is one integer: the phase, and `_PHASES` more for each request that asked."""

_ANSWERS: Final = (LookupResult.RETRY, LookupResult.RETRY, LookupResult.MISS, LookupResult.HIT)


_Chains = dict[tuple[Hashable, int, int], list[OffloadKey]]
"""Chains by request, KV-cache group, and number among those of both."""


class ProbedIndex(KeyIndex):
    """The contents of a shared tier, as far as live requests have asked.

    A verdict lives as long as a request that asked for it. A probe in flight is kept when its
    requests end, so that a newcomer shares it; its answer carries the probe's generation, and a
    generation is answered once, so that a late answer is never taken for that of a later probe.
    """

    def __init__(
        self,
        concurrent_probes: int,
        keys_per_probe: int = 4096,
        *,
        keeps_order: bool = False,
        keys_before: int = 0,
    ) -> None:
        """Start empty.

        Args:
            concurrent_probes: Probes in flight at once; a hung one delays no other.
            keys_per_probe: Bound on one batch; the rest waits for the next step.
            keeps_order: Whether probes say which keys are a chain; see `_chains`.
            keys_before: How many of the keys before each chain they say, at most; see `_before`.
        """
        super().__init__()
        self._concurrent_probes = concurrent_probes
        self._keys_per_probe = keys_per_probe
        self._keeps_order = keeps_order
        self._keys_before = keys_before
        self._verdicts = KeyMap()
        self._by_request: dict[Hashable, dict[OffloadKey, None]] = {}
        self._pending: dict[OffloadKey, Hashable] = {}
        """Queued keys in the order of their lookups, with the first request that asked."""
        self._is_awaited = False
        """Whether somebody was told to wait for a queued key, and not yet that none is probed."""
        self._in_flight: dict[int, tuple[OffloadKey, ...]] = {}
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
        self._verdicts.update(new, new_verdicts)
        return answers

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Flip the verdicts that live requests hold to present."""
        self._flip(tuple(keys), _PRESENT)

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Flip the verdicts that live requests hold to absent, so that none asks for ever."""
        self._flip(keys, _ABSENT)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those for which a live request has the answer that they are absent."""
        known = self._known(keys).items()
        return [key for key, verdict in known if verdict % _PHASES == _ABSENT]

    def peek(self, key: OffloadKey) -> LookupResult:
        """Return what live requests have found out, MISS where none has asked."""
        verdict = self._verdicts.get(key)
        return LookupResult.MISS if verdict is None else _ANSWERS[verdict % _PHASES]

    def next_probe(self) -> StartProbe | None:
        """Batch the queued keys, unless as many probes are in flight as may be."""
        if not self._pending or len(self._in_flight) >= self._concurrent_probes:
            return None
        self._generation += 1
        keys = tuple(islice(self._pending, self._keys_per_probe))
        chains = self._chains(keys) if self._keeps_order else {}
        for key in keys:
            del self._pending[key]
        self._enter(keys, _IN_FLIGHT)
        self._in_flight[self._generation] = keys
        in_order = tuple(map(tuple, chains.values()))
        return StartProbe(self._generation, keys, in_order, self._before(chains))

    def answered(self, generation: int, present: frozenset[OffloadKey]) -> None:
        """Resolve the keys that were asked in this generation and are still waiting for it."""
        keys = self._in_flight.pop(generation, ())
        self._enter([key for key in keys if key in present], _PRESENT)
        absent = [key for key in keys if key not in present]
        if absent:
            self._enter(absent, _ABSENT)
        self._forget_unasked(keys)
        self._notify(keys)

    def left_alone(self) -> None:
        """Let who waits for queued keys ask again, once; the keys stay queued.

        Told in every step, who waits for one of them elsewhere would ask in every step.
        """
        if self._is_awaited:
            self._is_awaited = False
            self._notify(tuple(self._pending))

    def forget_request(self, request: Hashable) -> None:
        """Drop the request's share of every verdict; a probe in flight is kept."""
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
        """Probes that have no answer yet."""
        return len(self._in_flight)

    def __len__(self) -> int:
        return len(self._verdicts)

    def _chains(self, keys: Sequence[OffloadKey]) -> _Chains:
        """Return queued keys as chains: of one request and KV-cache group, head to tail.

        A group that is looked up from its tail on, for a sliding window, has chains of one key:
        there a block may be present, and of use, without those before it.
        """
        chains: _Chains = {}
        last: dict[tuple[Hashable, int], tuple[int, int]] = {}
        for key in keys:
            request, group = self._pending[key], get_offload_group_idx(key)
            position = request.key_positions.get(key, 0) if isinstance(request, ReqContext) else 0
            number, before = last.get((request, group), (0, position))
            if position < before:
                number += 1
            last[request, group] = (number, position)
            chains.setdefault((request, group, number), []).append(key)
        return chains

    def _before(self, chains: _Chains) -> tuple[tuple[OffloadKey, ...], ...]:
        """Return for each chain the keys right before it, whether they were ever asked for or not.

        None before the chains of a group that is looked up from its tail on: there are several.
        """
        if self._keys_before <= 0:
            return ()
        return tuple(
            nearest_before(chain[0], request.key_positions, self._keys_before)
            if isinstance(request, ReqContext) and (request, group, 1) not in chains
            else ()
            for (request, group, _), chain in chains.items()
        )

    def _known(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return the verdicts of those of the keys that have one."""
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
        """Forget the verdicts that no request holds any more, unless a probe is in flight."""
        known = self._known(keys).items()
        unasked = [key for key, verdict in known if verdict < _PHASES and verdict != _IN_FLIGHT]
        self._verdicts.discard(unasked)
        for key in unasked:
            self._pending.pop(key, None)


class CostGatedIndex(KeyIndex):
    """Asks another index only for requests that miss enough blocks for a load to pay.

    A lookup reaches this index with the keys that the primary and the nearer tiers lack. The number
    of missed blocks of a request is known at the end of the step of its first lookup, or later
    while a nearer tier does not know all keys yet. Until then the answer is RETRY; afterwards it is
    MISS for a request that misses too few blocks. If such a request misses more blocks in a later
    lookup, it is answered from then on.

    Thread: owner.

    Attributes:
        break_even: Measures how many blocks a load needs to pay, beside the configured minimum;
            None: only the minimum counts.
        has_decided: Whether the end of the last step has changed the answer for a request.
        unknown: By request, the keys that a nearer tier does not know yet. To be read only.
    """

    def __init__(
        self, index: KeyIndex, min_blocks: int, break_even: BreakEven | None = None
    ) -> None:
        """Start with no request.

        Args:
            index: The index to ask; owned by this object from now on.
            min_blocks: Blocks that a request must miss, at least.
            break_even: See the class.
        """
        self.listeners = index.listeners
        self.break_even = break_even
        self.has_decided = False
        self.unknown: dict[Hashable, dict[OffloadKey, None]] = {}
        self._index = index
        self._min_blocks = min_blocks
        self._needed_blocks: float = min_blocks
        self._worthwhile: set[Hashable] = set()
        self._missed: dict[Hashable, dict[OffloadKey, None]] = {}
        """By request that has not missed enough blocks: the keys that it has asked for."""
        self._deferred: dict[Hashable, dict[OffloadKey, None]] = {}
        """By undecided request: the keys that were answered with RETRY because they are too few,
        and have to be asked for again. A decided request stays until the end of the step."""
        self._news: dict[Hashable, None] = {}
        """Requests in `unknown` for which `settle` has to ask the nearer tiers."""
        self._blocked: dict[OffloadKey, dict[Hashable, None]] = {}
        """First unknown key -> the other requests in `unknown`, which wait for that key."""
        self._explorer: Hashable = None

    @property
    def needed_blocks(self) -> float:
        """Blocks that a request must miss now; infinity: no number is enough."""
        return self._needed_blocks

    def lookup_many(
        self, keys: Sequence[OffloadKey], request: Hashable, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Return the other index's answers; RETRY, then MISS, where too few blocks are missed."""
        if request not in self._worthwhile:
            missed = self._missed.get(request)
            if missed is None:
                missed = self._missed[request] = self._deferred[request] = {}
            if len(missed.keys() | keys) < self._needed_blocks:
                missed.update(dict.fromkeys(keys))
                if not self.declines(request):
                    return [LookupResult.RETRY] * len(keys)
                return [LookupResult.MISS] * (1 if stop_at_miss else len(keys))
            self._ask(request)
        return self._index.lookup_many(keys, request, stop_at_miss=stop_at_miss)

    def declines(self, request: Hashable) -> bool:
        """Tell whether a request is told MISS because it misses too few blocks."""
        return request in self._missed and request not in self._deferred

    def expect(self, keys: Sequence[OffloadKey], request: Hashable) -> None:
        """Note that a request may miss blocks of which a nearer tier does not know yet."""
        if not keys or request in self._worthwhile or self.declines(request):
            return
        unknown = self.unknown.get(request)
        if unknown is None:
            unknown = self.unknown[request] = {}
            self._news[request] = None
        unknown.update(dict.fromkeys(keys))

    def resolved(self, keys: Sequence[OffloadKey]) -> None:
        """Learn that a nearer tier knows more of these keys now."""
        if self._blocked:
            for key in keys:
                self._news.update(self._blocked.pop(key, {}))

    def settle(
        self, ask_nearer: Callable[[OffloadKey, Hashable], LookupResult], *, all_requests: bool
    ) -> None:
        """Count the blocks that nearer tiers were found to lack; before each end of a step.

        Args:
            ask_nearer: Returns what the nearer tiers know of a key; RETRY: one does not know yet.
            all_requests: Whether to ask for all requests; else for those with news.
        """
        news, self._news = self._news, {}
        if all_requests:
            news = dict.fromkeys(self.unknown)
            self._blocked.clear()
        for request in news:
            self._settle(request, ask_nearer)

    def _settle(
        self, request: Hashable, ask_nearer: Callable[[OffloadKey, Hashable], LookupResult]
    ) -> None:
        unknown = self.unknown[request]
        for key in tuple(unknown):
            answer = ask_nearer(key, request)
            if answer is LookupResult.RETRY:
                self._blocked.setdefault(key, {})[request] = None
                return
            del unknown[key]
            if answer is LookupResult.MISS and request in self._missed:
                self._missed[request][key] = None
        del self.unknown[request]

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
        self._forget_unknown(request)
        if self.break_even is not None and request == self._explorer:
            self._explorer = None
            self.break_even.exploration_ended()
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
        if self.break_even is not None:
            self._needed_blocks = max(self._min_blocks, self.break_even.needed_blocks)
        deferred, self._deferred = self._deferred, {}
        told: dict[OffloadKey, None] = {}
        declined: dict[Hashable, int] = {}
        for request, missed in deferred.items():
            if request in self.unknown:
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
        if told:
            self._notify(tuple(told))

    def _ask(self, request: Hashable) -> None:
        """Ask for what a request has missed so far, and from now on for all of it."""
        self._worthwhile.add(request)
        self._forget_unknown(request)
        self._index.lookup_many(tuple(self._missed.pop(request)), request)

    def _forget_unknown(self, request: Hashable) -> None:
        unknown = self.unknown.pop(request, None)
        if unknown is None:
            return
        self._news.pop(request, None)
        first = next(iter(unknown))
        blocked = self._blocked.get(first, {})
        blocked.pop(request, None)
        if not blocked:
            self._blocked.pop(first, None)

    def _explore(self, declined: Mapping[Hashable, int]) -> None:
        """Ask for the largest of the requests that are declined, if what was measured is old."""
        request = max(declined, key=declined.__getitem__)
        break_even = self.break_even
        if break_even is None or declined[request] < self._min_blocks or not break_even.may_explore:
            return
        break_even.explore()
        self._explorer = request
        self._ask(request)


class AskedIndex(KeyIndex):
    """Asks the tier itself for every key, during the lookup; keeps nothing.

    Thread: owner.
    """

    notifies = False

    def __init__(
        self,
        ask: Callable[[OffloadKey, Any], LookupResult],
        request_ended: Callable[[Any], object],
    ) -> None:
        """Ask nothing yet.

        Args:
            ask: Returns HIT, MISS or RETRY at once, for a key and the request that looks it up.
            request_ended: Called with each request for which nothing more will be submitted.
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
            if stop_at_miss and answers[-1] is LookupResult.MISS:
                break
        return answers

    def peek(self, key: OffloadKey) -> LookupResult:
        """Return HIT: the tier may have the key."""
        return LookupResult.HIT

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return none: no key is known to be absent."""
        return []

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Do nothing: the tier is asked anew."""

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Do nothing: the tier is asked anew."""

    def forget_request(self, request: Hashable) -> None:
        """Pass the end of a request on."""
        self._request_ended(request)
