"""Hit ratios of a trace under eviction policies and capacities, without moving bytes.

LRU is simulated at every capacity in one pass: a block is found by a cache that is at least as
large as the block's *stack distance*, the number of distinct blocks used since its last use
(Mattson et al., 1970). Other policies run in the engine's own block accounting.

With a `Traffic`, requests arrive on virtual time, and blocks of those that wait are prefetched from
the tier: at most a quarter of the primary, first come, first served, as in `core.room`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, islice, product
from typing import Any, Final

from kvoffload_async.core.admission import Admission
from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import InputError
from kvoffload_async.facade.primary import create_admission
from kvoffload_async.registry import create_policy
from kvoffload_async.replay.device import Prompt
from kvoffload_async.replay.source import Arrival
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext, make_offload_key

LRU: Final = "lru"
_MOST_OF_HITS: Final = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one policy at one capacity, over the counted requests.

    Attributes:
        policy: Name of the eviction policy.
        capacity: Number of blocks.
        hit_ratio: Blocks found, as a part of the block references.
        prefix_hit_ratio: Blocks in the longest head that was found, likewise.
        optimum: The prefix hit ratio of an optimum that knows the whole trace.
        gap_closed: Part of the way from LRU to the optimum, in prefix hits; None if they are equal.
        writes: Blocks stored; with a tier, in the tier.
        waited_s: Mean seconds from a request's arrival to its start; None without a `Traffic`.
        prefetched: Blocks promoted before their request started; None: without prefetch.
        in_vain: Those of them that were evicted before their request used them.
    """

    policy: str
    capacity: int
    hit_ratio: float
    prefix_hit_ratio: float
    optimum: float
    gap_closed: float | None
    writes: int
    waited_s: float | None = None
    prefetched: int | None = None
    in_vain: int | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """Results of a simulation.

    Attributes:
        requests: Requests that count; `block_refs` are their blocks.
        distinct_blocks: Distinct blocks of the whole trace.
        endless_hit_ratio: Prefix hit ratio of a cache that never evicts.
        blocks_for_90_percent: Least capacity at which LRU has 90 % of these hits.
        rows: A row for each policy and capacity.
        curve: LRU's prefix hit ratio by capacity, at about 200 capacities.
        interrupted: Whether rows are missing because of an interrupt.
    """

    requests: int
    block_refs: int
    distinct_blocks: int
    endless_hit_ratio: float
    blocks_for_90_percent: int
    rows: tuple[Row, ...]
    curve: tuple[tuple[int, float], ...]
    interrupted: bool

    def to_json(self) -> str:
        """Return the results as one JSON object, without the curve."""
        figures = asdict(self)
        del figures["curve"]
        return json.dumps(figures, indent=2)


class LruCurve:
    """Computes the hits of an LRU cache at every capacity.

    A Fenwick tree has a one at the last use of each block; uses are numbered, tail first within a
    request, as the engine ranks them.
    """

    def __init__(self) -> None:
        self._last_use: dict[int, int] = {}
        self._tree = [0]
        self._by_distance: Counter[int] = Counter()
        self._by_head_distance: Counter[int] = Counter()
        self.block_refs = 0

    def use(self, block_ids: Sequence[int], *, counts: bool) -> None:
        """Serve a request with distinct blocks; its hits enter the results if `counts`."""
        last_use = self._last_use
        if counts:
            self._count(block_ids)
        for block_id in reversed(block_ids):
            self._mark_last(last_use.get(block_id))
            last_use[block_id] = len(self._tree) - 1

    def results(self) -> tuple[_Steps, _Steps]:
        """Return the hits and the prefix hits by capacity."""
        return _Steps(self._by_distance), _Steps(self._by_head_distance)

    @property
    def distinct_blocks(self) -> int:
        """Number of distinct blocks seen."""
        return len(self._last_use)

    def _count(self, block_ids: Sequence[int]) -> None:
        tree, num_blocks = self._tree, len(self._last_use)
        head_distance: int | None = 0
        self.block_refs += len(block_ids)
        for block_id in block_ids:
            node = self._last_use.get(block_id)
            if node is None:
                head_distance = None
                continue
            distance = num_blocks + 1
            while node:
                distance -= tree[node]
                node &= node - 1
            self._by_distance[distance] += 1
            if head_distance is not None:
                head_distance = max(head_distance, distance)
                self._by_head_distance[head_distance] += 1

    def _mark_last(self, previous: int | None) -> None:
        """Append a block's last use to the tree, and remove its previous use."""
        tree = self._tree
        size = len(tree)
        if previous is not None:
            while previous < size:
                tree[previous] -= 1
                previous += previous & -previous
        total, below, end = 1, size - 1, size & (size - 1)
        while below > end:
            total += tree[below]
            below &= below - 1
        tree.append(total)


class _Steps:
    """A count of hits that grows with the capacity."""

    def __init__(self, by_distance: dict[int, int]) -> None:
        self.distances = sorted(by_distance)
        self._sums = [0, *accumulate(by_distance[each] for each in self.distances)]

    @property
    def total(self) -> int:
        """The count at unlimited capacity."""
        return self._sums[-1]

    def at(self, capacity: int) -> int:
        """Return the count at a capacity."""
        return self._sums[bisect_left(self.distances, capacity + 1)]

    def least(self, count: float) -> int:
        """Return the smallest capacity, at least 1, at which `count` is reached."""
        reached = bisect_left(self._sums, count)
        return self.distances[reached - 1] if reached else 1


def optimal_hits(requests: Sequence[Sequence[int]], capacity: int, first: int) -> int:
    """Return the maximum hits of any cache of this capacity, from request number `first` on.

    It evicts, or does not store, the block whose next use is farthest away, and of those of one
    request the last (Belady, 1966). So its hits are heads of prompts.
    """
    never = len(requests)
    next_use = [[(never, 0)] * len(block_ids) for block_ids in requests]
    coming: dict[int, tuple[int, int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        for index, block_id in enumerate(requests[number]):
            next_use[number][index] = coming.get(block_id, (never, 0))
        coming.update((b, (number, index)) for index, b in enumerate(requests[number]))
    cached: dict[int, tuple[int, int]] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for number, block_ids in enumerate(requests):
        if number >= first:
            hits += sum(block_id in cached for block_id in block_ids)
        for block_id, use in zip(block_ids, next_use[number], strict=True):
            if use[0] == never:
                cached.pop(block_id, None)
                continue
            cached[block_id] = use
            heappush(farthest, (-use[0], -use[1], block_id))
        while len(cached) > capacity:
            request, index, block_id = heappop(farthest)
            if cached.get(block_id) == (-request, -index):
                del cached[block_id]
    return hits


BLOCK_S: Final = 0.05
"""Virtual seconds in which a request computes a block; a trace's block has 512 tokens."""
TOKEN_S: Final = 0.02
"""Virtual seconds in which it generates a token."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """When requests arrive, and how many run at once; a request runs until its last token.

    Attributes:
        arrivals: The requests of a trace.
        speed: How many times as fast as their times they arrive.
        concurrency: Requests that run at once; others wait, first come, first served.
    """

    arrivals: Sequence[Arrival]
    speed: float
    concurrency: int


class PolicyRun:
    """Simulates one policy in the engine's primary, optionally above an LRU tier.

    Attributes:
        hits: Blocks found in either; `prefix_hits` are those in the heads of prompts.
        writes: Blocks stored; with a tier, in the tier.
        prefetched: Blocks promoted before their request was served.
        in_vain: Those of them that were evicted before a request used them.
    """

    def __init__(self, policy: str, capacity: int, tier_blocks: int, *, only_reuse: bool) -> None:
        """Create an empty primary and tier; raises ConfigError if the policy is unknown."""
        self._primary = Primary(capacity, create_policy(policy, capacity), accept_prefix=True)
        self._primary.may_decline = not tier_blocks
        self._tier: dict[OffloadKey, None] = {}  # most recent last
        self._tier_blocks = tier_blocks
        self._admission: Admission | None = None
        if tier_blocks and only_reuse:
            self._admission = create_admission(self._primary, [tier_blocks])
        self.hits = self.prefix_hits = self.writes = 0
        self.prefetched = self.in_vain = 0
        self._most_early = capacity // 4
        self._early: dict[int, Sequence[OffloadKey]] = {}
        """Waiting request -> its pinned blocks."""
        self._promoted: dict[int, Sequence[OffloadKey]] = {}
        self._unused: set[OffloadKey] = set()
        """Prefetched blocks that no request has used."""

    def serve_all(
        self,
        requests: Iterable[Sequence[OffloadKey]],
        first: int,
        should_stop: Callable[[], bool],
    ) -> None:
        """Serve requests; those from request number `first` on are counted."""
        for number, keys in enumerate(requests):
            self._serve(number, keys, counts=number >= first)
            if should_stop():
                break

    def serve_arrivals(
        self,
        requests: Sequence[Sequence[OffloadKey]],
        first: int,
        should_stop: Callable[[], bool],
        traffic: Traffic,
        *,
        prefetch: bool,
    ) -> dict[str, Any]:
        """Serve requests as `serve_all`, in the order of their arrival.

        A request is served in an instant, when it starts, and runs for as long as it computes.

        Returns:
            `waited_s`, and with prefetch also `prefetched` and `in_vain` of a `Row`.
        """
        places = [0.0] * traffic.concurrency
        due_s = [arrival.at_s / traffic.speed for arrival in traffic.arrivals]
        waited_s, coming = 0.0, 0
        for number, keys in enumerate(requests):
            start_s = max(due_s[number], places[0])
            coming = max(coming, number)
            while prefetch and coming < len(requests) and due_s[coming] < start_s:
                if not self._prefetch(coming, requests[coming]):
                    break
                coming += 1
            loaded = self._serve(number, keys, counts=number >= first)
            tokens_s = TOKEN_S * traffic.arrivals[number].output_tokens
            heapreplace(places, start_s + BLOCK_S * (len(keys) - loaded) + tokens_s)
            waited_s += start_s - due_s[number]
            if should_stop():
                break
        queue: dict[str, Any] = {"waited_s": waited_s / max(1, len(requests))}
        if prefetch:
            queue |= {"prefetched": self.prefetched, "in_vain": self.in_vain}
        return queue

    def _prefetch(self, number: int, keys: Sequence[OffloadKey]) -> bool:
        """Promote the prefix of a request that waits; return False if it finds no room."""
        primary = self._primary
        left = self._most_early - sum(map(len, self._early.values()))
        head, loaded, absent = self._find(keys)
        if len(head) > left:
            if self._early or not left:  # only the first in the queue gets a part
                return False
            head, loaded, absent = self._find(keys[:left])
        primary.pin(loaded)
        if primary.room < len(absent):
            primary.unpin(loaded)
            return False
        primary.reserve(absent)
        primary.complete_write(absent, success=True)
        primary.pin(absent)
        if head:
            self._early[number], self._promoted[number] = head, absent
        self.prefetched += len(absent)
        self._unused.update(absent)
        return True

    def _give_way(self, count: int) -> None:
        """Unpin prefetched blocks, those of the last request first, until there is room."""
        while self._early and self._primary.room < count:
            self._primary.unpin(self._early.popitem()[1])

    def _find(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[Sequence[OffloadKey], list[OffloadKey], list[OffloadKey]]:
        """Return the prefix that is found, and its blocks in the primary and in the tier alone."""
        answers = self._primary.lookup_many(keys)
        found = [
            answer is LookupResult.HIT or key in self._tier
            for key, answer in zip(keys, answers, strict=True)
        ]
        head = keys[: found.index(False)] if False in found else keys
        pairs = list(zip(head, answers, strict=False))
        loaded = [key for key, answer in pairs if answer is LookupResult.HIT]
        return head, loaded, [key for key, answer in pairs if answer is LookupResult.MISS]

    def _serve(self, number: int, keys: Sequence[OffloadKey], *, counts: bool) -> int:
        """Serve a request with distinct keys; its prefix in the tier is promoted first.

        Returns:
            The number of blocks that need not be computed.
        """
        primary = self._primary
        positions = {key: position for position, key in enumerate(keys, 1)}
        ctx = ReqContext(str(number), key_positions=positions)
        primary.open_request(ctx)
        primary.unpin(self._early.pop(number, ()))
        head, loaded, absent = self._find(keys)
        self._unused.difference_update(loaded)
        in_vain = self._unused.intersection(self._promoted.pop(number, ()))
        self.in_vain += len(in_vain)
        self._unused -= in_vain
        if counts:
            in_primary = primary.lookup_many(keys)
            self.hits += sum(
                answer is LookupResult.HIT or key in self._tier
                for key, answer in zip(keys, in_primary, strict=True)
            )
        if absent:
            primary.pin(loaded)
            self._give_way(len(absent))
            promoted = absent[: len(primary.reserve(absent))]
            primary.complete_write(promoted, success=True)
            primary.unpin(loaded)
            loaded += promoted
        primary.prepare_load(ctx, loaded)
        primary.complete_load(ctx, loaded)
        self._give_way(len(keys))
        granted = primary.prepare_store(ctx, keys)
        stored = granted.keys_to_store if granted is not None else ()
        primary.complete_store(ctx, stored, success=True)
        if self._tier_blocks:
            writes = self._write_back(ctx, stored)
        else:
            writes = len(stored)
            primary.close_request(ctx)
        if counts:
            self.prefix_hits += len(head)
            self.writes += writes
        return len(head)

    def _write_back(self, ctx: ReqContext, stored: Sequence[OffloadKey]) -> int:
        """End a request, write its stored or reused blocks to the tier, and return the writes."""
        tier, admission = self._tier, self._admission
        undecided: Sequence[OffloadKey] = ()
        if admission is not None:
            stored, undecided = admission.split(0, ctx, stored, is_final=False)
        writes = self._write(stored)
        if admission is not None:
            stored, _ = admission.split(0, ctx, undecided, is_final=True)
            writes += self._write(stored)
            admission.end_request(ctx, self._primary.used_by(ctx))
        reused = self._primary.close_request(ctx)
        lacking: Sequence[OffloadKey] = [key for key in reused if key not in tier]
        if admission is not None:
            lacking, _ = admission.split(0, ReqContext(""), lacking, is_final=True)
        writes += self._write(lacking)
        for key in reversed([key for key in reused if key in tier]):
            tier[key] = tier.pop(key)
        return writes

    def _write(self, keys: Sequence[OffloadKey]) -> int:
        tier = self._tier
        new = [key for key in keys if key not in tier][: self._tier_blocks]
        surplus = len(tier) + len(new) - self._tier_blocks
        for key in list(islice(tier, max(0, surplus))):
            del tier[key]
        tier.update(dict.fromkeys(new))
        if self._admission is not None:
            self._admission.note_stored(0, len(new))
        return len(new)


def simulate(
    requests: Iterable[Sequence[int]],
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    warm_half: bool = False,
    tier_blocks: int = 0,
    only_reuse: bool = False,
    traffic: Traffic | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Simulation:
    """Simulate eviction policies on a trace of requests.

    Args:
        requests: The requests' block ids.
        policies: Names of eviction policies.
        capacities: Capacities in blocks. Empty: some between the smallest useful one and the number
            of distinct blocks.
        warm_half: Count only the requests of the second half.
        tier_blocks: Capacity of an LRU tier below the primary; 0: none. The optimum is that of one
            cache of both capacities.
        only_reuse: Whether that tier has `admission` "reuse".
        traffic: When the requests arrive; then each policy has a row without prefetch and one with
            it. Needs a tier.
        should_stop: Checked between the requests; the rows so far are returned.

    Raises:
        InputError: No request is left to count.
        ConfigError: A policy is unknown.
    """
    trace = [list(dict.fromkeys(block_ids)) for block_ids in requests]
    first = len(trace) // 2 if warm_half else 0
    _require_blocks(trace, first, warm_half=warm_half)
    for policy in policies:
        create_policy(policy, 1)
    curve = LruCurve()
    for number, block_ids in enumerate(trace):
        curve.use(block_ids, counts=number >= first)
        if should_stop():
            break
    hits, prefix_hits = curve.results()
    refs, distinct = max(1, curve.block_refs), curve.distinct_blocks
    least = prefix_hits.least(_MOST_OF_HITS * prefix_hits.total)
    keys: list[list[OffloadKey]] = []
    if tier_blocks or set(policies) != {LRU}:
        keys = [list(map(make_offload_key, Prompt(0, ids).block_hashes)) for ids in trace]
    rows: list[Row] = []
    for capacity in capacities or _steps_up_to(distinct):
        if should_stop():
            break
        optimum = optimal_hits(trace, capacity + tier_blocks, first)
        lru = prefix_hits.at(capacity + tier_blocks)
        for policy, prefetch in product(policies, (False,) if traffic is None else (False, True)):
            found, heads, writes = hits.at(capacity), lru, refs - hits.at(capacity)
            queue: dict[str, Any] = {}
            if tier_blocks or policy != LRU:
                run = PolicyRun(policy, capacity, tier_blocks, only_reuse=only_reuse)
                if traffic is None:
                    run.serve_all(keys, first, should_stop)
                else:
                    queue = run.serve_arrivals(keys, first, should_stop, traffic, prefetch=prefetch)
                found, heads, writes = run.hits, run.prefix_hits, run.writes
            gap = optimum - lru
            rows.append(
                Row(
                    policy=policy,
                    capacity=capacity,
                    hit_ratio=found / refs,
                    prefix_hit_ratio=heads / refs,
                    optimum=optimum / refs,
                    gap_closed=(heads - lru) / gap if gap else None,
                    writes=writes,
                    **queue,
                )
            )
    return Simulation(
        requests=len(trace) - first,
        block_refs=refs,
        distinct_blocks=distinct,
        endless_hit_ratio=prefix_hits.total / refs,
        blocks_for_90_percent=least,
        rows=tuple(rows),
        curve=tuple((size, prefix_hits.at(size) / refs) for size in _curve_points(distinct)),
        interrupted=should_stop(),
    )


def _require_blocks(trace: Sequence[Sequence[int]], first: int, *, warm_half: bool) -> None:
    if not any(trace[first:]) or (warm_half and not first):
        raise InputError(
            f"a trace of {len(trace)} requests leaves no block to count; give a longer one or "
            "a smaller --blocks-per-chunk" + (", or omit --warm-half" if warm_half else "")
        )


def _steps_up_to(most: int) -> list[int]:
    """Return 1, 2 and 5 times the powers of ten from 1,000 on, below `most`, and `most` itself."""
    steps = [factor * 10**power for power in range(3, len(str(most))) for factor in (1, 2, 5)]
    return [*(step for step in steps if step < most), most]


def _curve_points(most: int) -> list[int]:
    return sorted({max(1, round(most ** (step / 200))) for step in range(201)})
