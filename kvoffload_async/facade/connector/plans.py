"""Which prefix of a request can be loaded, and which keys and blocks a load or a store copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoffload_async.errors import StateError
from kvoffload_async.facade.connector.protocol import (
    NULL_BLOCK,
    ConnectorGeometry,
    SchedulerRequest,
)
from kvoffload_async.facade.connector.requests import ConnectorRequest
from kvoffload_async.types import GPULoadStoreSpec, LookupResult, OffloadKey, as_block_ids


class LookupMany(Protocol):
    """Looks keys up, as `OffloadingManager.lookup_many` does for a request."""

    def __call__(self, keys: Sequence[OffloadKey], *, stop_at_miss: bool) -> Sequence[LookupResult]:
        """Return the answers, in key order."""
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """The usable prefix.

    Attributes:
        tokens: Its length from the start of the prompt. If it is longer than what is computed,
            a whole number of chunks of each group; else nothing is to be loaded.
        is_deferred: Whether it is to be asked again in a later step.
        keys: What it consists of, without what lies before the computed tokens.
    """

    tokens: int
    is_deferred: bool
    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """What one group can load.

    Attributes:
        tokens: Where it ends.
        keys: The keys of its blocks.
        is_pending: Whether the bytes of a part of it are still on the way.
        may_grow: Whether an answer that is not there yet may make it end further right.
    """

    tokens: int
    keys: Sequence[OffloadKey] = ()
    is_pending: bool = False
    may_grow: bool = False


def match_prefix(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    computed_tokens: int,
    limit_tokens: int,
    lookup: LookupMany,
) -> Match:
    """Return the longest prefix that every group can load, at most `limit_tokens`.

    Each key is looked up at most once, although groups shorten each other: the search is repeated
    until the common length does not shrink any more.
    """
    answers: dict[OffloadKey, LookupResult] = {}

    def ask(keys: Sequence[OffloadKey], *, stop_at_miss: bool) -> list[LookupResult]:
        new = [key for key in keys if key not in answers]
        if new:
            answers.update(zip(new, lookup(new, stop_at_miss=stop_at_miss), strict=False))
        return [answers[key] for key in keys if key in answers]

    may_grow = False
    limit = limit_tokens
    while True:
        runs = []
        shortest = limit
        for group in range(len(state.groups)):
            run = _longest_run(
                state, geometry, group, first_token=computed_tokens, last_token=shortest, ask=ask
            )
            runs.append(run)
            shortest = min(shortest, run.tokens)
            # For good: in the next round the missing answer may lie beyond the limit that it set.
            may_grow = may_grow or run.may_grow
        if shortest == limit:
            break
        limit = shortest
    keys = tuple(key for run in runs for key in run.keys)
    return Match(limit, may_grow or any(run.is_pending for run in runs), keys)


def _longest_run(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    group: int,
    *,
    first_token: int,
    last_token: int,
    ask: LookupMany,
) -> _Run:
    tokens_per_chunk = geometry.tokens_per_chunk(group)
    keys = state.groups[group].keys
    first = first_token // tokens_per_chunk
    last = min(last_token // tokens_per_chunk, len(keys))
    if last <= first:
        return _Run(min(first_token, last_token))
    needed = geometry.chunks_per_window(group)
    if needed is None:
        start, end, is_pending, may_grow = _scan_rightwards(keys, first, last, ask)
    else:
        start, end, is_pending, may_grow = _scan_leftwards(keys, first, last, needed, ask)
    return _Run(end * tokens_per_chunk, keys[start:end], is_pending, may_grow)


def _scan_rightwards(
    keys: Sequence[OffloadKey], first: int, last: int, ask: LookupMany
) -> tuple[int, int, bool, bool]:
    """Full attention: every chunk is needed, so a miss ends the run.

    Nothing else ends it, so that all probes of a prefix start in one step.
    """
    answers = ask(keys[first:last], stop_at_miss=True)
    if LookupResult.MISS in answers:
        answers = answers[: answers.index(LookupResult.MISS)]
    is_pending = answers.count(LookupResult.HIT) < len(answers)
    return first, first + len(answers), is_pending, False


def _scan_leftwards(
    keys: Sequence[OffloadKey], first: int, last: int, needed: int, ask: LookupMany
) -> tuple[int, int, bool, bool]:
    """Sliding window: as many chunks in a row as it covers, the rightmost such run.

    A run that reaches back to the computed tokens may be shorter. The chunks are looked up from the
    right, past misses, and no more of them than the window still needs.
    """
    length = 0
    is_pending = may_grow = False
    start = last
    while start > first and length < needed:
        missing = range(start - 1, max(first, start - needed + length) - 1, -1)
        for answer in ask([keys[chunk] for chunk in missing], stop_at_miss=False):
            start -= 1
            if answer in {LookupResult.MISS, LookupResult.RETRY}:
                may_grow = may_grow or answer is LookupResult.RETRY
                length, is_pending = 0, False
                continue
            length += 1
            is_pending = is_pending or answer is LookupResult.HIT_PENDING
    return start, start + length, is_pending, may_grow


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One copy, before it has slots.

    Attributes:
        keys: One a chunk, group after group.
        device: Their device blocks, group after group.
    """

    keys: tuple[OffloadKey, ...]
    device: GPULoadStoreSpec


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """The chunks that a request could store.

    Attributes:
        keys: The keys to store, grouped by KV-cache group.
        ends: For each group, the first chunk that it does not reach.
    """

    keys: tuple[OffloadKey, ...]
    ends: tuple[int, ...]


def plan_load(state: ConnectorRequest, geometry: ConnectorGeometry, total_tokens: int) -> CopyPlan:
    """Return the copy that fills the device blocks from the local tokens up to `total_tokens`.

    Of a sliding window only the blocks that it reaches are filled, and nulls among them skipped.

    Raises:
        StateError: There are not blocks enough.
    """
    per_chunk = geometry.blocks_per_chunk
    keys: list[OffloadKey] = []
    blocks: list[int] = []
    sizes: list[int] = []
    indices: list[int] = []
    for index, group in enumerate(state.groups):
        tokens = geometry.groups[index].tokens_per_block
        last = total_tokens // tokens
        if last > len(group.block_ids):
            raise StateError(
                f"request {state.ctx.req_id!r}: {total_tokens} tokens do not fit into "
                f"{len(group.block_ids)} blocks of group {index}"
            )
        first = state.local_tokens // tokens
        window = geometry.chunks_per_window(index)
        if window is not None:
            first = max(first, last - window * per_chunk)
        while first < last and group.block_ids[first] == NULL_BLOCK:
            first += 1
        if first < last:
            keys += group.keys[first // per_chunk : last // per_chunk]
        blocks += group.block_ids[first:last]
        sizes.append(last - first)
        indices.append(first)
    return CopyPlan(tuple(keys), _device_spec(blocks, sizes, indices))


def offer_store(state: ConnectorRequest, geometry: ConnectorGeometry, tokens: int) -> StoreOffer:
    """Return the chunks that are full with `tokens` tokens and were not offered before.

    A chunk is full if it has a key and its device blocks; one with a null among them is let go.
    """
    tokens = min(tokens, _token_limit(state.request, geometry))
    per_chunk = geometry.blocks_per_chunk
    keys: list[OffloadKey] = []
    ends: list[int] = []
    for index, group in enumerate(state.groups):
        full = tokens // geometry.tokens_per_chunk(index)
        end = min(full, len(group.keys), len(group.block_ids) // per_chunk)
        keys += [
            group.keys[chunk]
            for chunk in range(group.next_chunk, end)
            if NULL_BLOCK not in _blocks_of(group.block_ids, chunk, per_chunk)
        ]
        ends.append(end)
    return StoreOffer(tuple(keys), tuple(ends))


def ends_before(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    ends: Sequence[int],
    left_out: Collection[OffloadKey],
) -> tuple[int, ...]:
    """Return, for each group, the first chunk that is not before what there was no room for."""
    if not left_out:
        return tuple(ends)
    tokens = min(state.ctx.key_positions[key] for key in left_out) - 1
    return tuple(
        min(end, tokens // geometry.tokens_per_chunk(index)) for index, end in enumerate(ends)
    )


def plan_store(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    ends: Sequence[int],
    accepted: Collection[OffloadKey],
) -> CopyPlan:
    """Return the copy of exactly the accepted ones of the offered chunks."""
    per_chunk = geometry.blocks_per_chunk
    accepted = frozenset(accepted)
    keys: list[OffloadKey] = []
    blocks: list[int] = []
    sizes: list[int] = []
    indices: list[int] = []
    for group, end in zip(state.groups, ends, strict=True):
        chunks = [c for c in range(group.next_chunk, end) if group.keys[c] in accepted]
        for chunk in chunks:
            keys.append(group.keys[chunk])
            blocks += _blocks_of(group.block_ids, chunk, per_chunk)
        sizes.append(len(chunks) * per_chunk)
        indices.append(chunks[0] * per_chunk if chunks else 0)
    return CopyPlan(tuple(keys), _device_spec(blocks, sizes, indices))


def final_tokens(request: SchedulerRequest) -> int:
    """Return how many tokens of an ended request have KV: the last sampled one's has none."""
    return min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1))


def _token_limit(request: SchedulerRequest, geometry: ConnectorGeometry) -> int:
    limit = request.num_tokens
    if geometry.max_offload_tokens is not None:
        limit = min(limit, geometry.max_offload_tokens)
    if geometry.offload_prompt_only:
        limit = min(limit, request.num_prompt_tokens)
    return limit


def _blocks_of(block_ids: Sequence[int], chunk: int, per_chunk: int) -> Sequence[int]:
    return block_ids[chunk * per_chunk : (chunk + 1) * per_chunk]


def _device_spec(
    blocks: Sequence[int], sizes: Sequence[int], indices: Sequence[int]
) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(as_block_ids(blocks), tuple(sizes), tuple(indices))
