"""Plans of a request's loads and stores: the loadable prefix, and the keys and blocks to copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from kvoffload_async.errors import StateError
from kvoffload_async.facade.connector.protocol import (
    NULL_BLOCK,
    ConnectorGeometry,
    SchedulerRequest,
)
from kvoffload_async.facade.connector.requests import ConnectorRequest, DeviceContents
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.types import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    as_block_ids,
)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a request that can be loaded.

    Attributes:
        tokens: Its length from the start of the prompt. If it exceeds the computed tokens, it is
            a whole number of chunks in each group; otherwise there is nothing to load.
        is_deferred: Whether the lookup must be repeated in a later step.
        keys: Its keys, without those of computed tokens.
    """

    tokens: int
    is_deferred: bool
    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of consecutive chunks that one group can load.

    Attributes:
        tokens: End token.
        keys: The keys of its blocks.
        is_pending: Whether some of its blocks are still being written to the primary.
        may_grow: Whether a lookup without an answer yet may extend it.
    """

    tokens: int
    keys: Sequence[OffloadKey] = ()
    is_pending: bool = False
    may_grow: bool = False


class _Lookups:
    """Caches the lookup results of one prefix search.

    A deferred prefix is looked up again if it becomes shorter.
    """

    def __init__(self, manager: OffloadingManager, ctx: ReqContext) -> None:
        self._manager, self._ctx = manager, ctx
        self._prefixes: dict[int, tuple[int, bool]] = {}
        self._answers: dict[OffloadKey, LookupResult] = {}

    def prefix(self, group: int, keys: Sequence[OffloadKey]) -> tuple[int, bool]:
        """Return the length of a group's loadable prefix, and whether its lookup is deferred.

        Later calls pass the same keys, or only the first of them.
        """
        known = self._prefixes.get(group)
        if known is None or (known[1] and len(keys) < known[0]):
            known = self._prefixes[group] = self._manager.lookup_prefix(keys, self._ctx)
        return min(known[0], len(keys)), known[1]

    def many(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return the answers of `lookup_many`, in key order."""
        new = [key for key in keys if key not in self._answers]
        if new:
            self._answers.update(zip(new, self._manager.lookup_many(new, self._ctx), strict=True))
        return [self._answers[key] for key in keys]


def match_prefix(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    computed_tokens: int,
    limit_tokens: int,
    manager: OffloadingManager,
) -> Match:
    """Return the longest prefix that every group can load, at most `limit_tokens`.

    The groups must agree on one length, so each group's result limits the others: the search
    repeats until the length is stable.
    """
    lookups = _Lookups(manager, state.ctx)
    # Prefixes first: while they wait for room, windows are not looked up.
    order = sorted(range(len(state.groups)), key=lambda at: bool(geometry.chunks_per_window(at)))
    may_grow = False
    limit = limit_tokens
    while True:
        runs = []
        shortest = limit
        for group in order:
            run = _longest_run(
                state, geometry, group, lookups, first_token=computed_tokens, last_token=shortest
            )
            runs.append(run)
            shortest = min(shortest, run.tokens)
            # Remember it: the next round ends at `shortest`, and may not reach the undecided key.
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
    lookups: _Lookups,
    *,
    first_token: int,
    last_token: int,
) -> _Run:
    tokens_per_chunk = geometry.tokens_per_chunk(group)
    keys = state.groups[group].keys
    first = first_token // tokens_per_chunk
    last = min(last_token // tokens_per_chunk, len(keys))
    if last <= first:
        return _Run(min(first_token, last_token))
    needed = geometry.chunks_per_window(group)
    if needed is None:
        length, is_pending = lookups.prefix(group, keys[first:last])
        start, end = first, first + length
        may_grow = is_pending and not length  # the length of the prefix is not known yet
    else:
        start, end, is_pending, may_grow = _scan_leftwards(keys, first, last, needed, lookups)
    return _Run(end * tokens_per_chunk, keys[start:end], is_pending, may_grow)


def _scan_leftwards(
    keys: Sequence[OffloadKey], first: int, last: int, needed: int, lookups: _Lookups
) -> tuple[int, int, bool, bool]:
    """Find the rightmost run of loadable chunks that covers a sliding window.

    A run that directly follows the computed tokens may be shorter. Chunks are looked up from the
    right; the scan continues past misses and ends when the window is covered.
    """
    length = 0
    is_pending = may_grow = False
    start = last
    while start > first and length < needed:
        missing = range(start - 1, max(first, start - needed + length) - 1, -1)
        for answer in lookups.many([keys[chunk] for chunk in missing]):
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
    """A copy whose slots in the primary are not known yet.

    Attributes:
        keys: The keys, one per chunk, grouped by KV-cache group.
        device: The device blocks of the chunks, in the same order.
    """

    keys: tuple[OffloadKey, ...]
    device: GPULoadStoreSpec


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """The chunks of a request that can be stored now.

    Attributes:
        keys: The keys to store, grouped by KV-cache group.
        ends: For each group, the index after its last chunk.
        is_limited: Whether further full chunks are left for a later offer.
    """

    keys: tuple[OffloadKey, ...]
    ends: tuple[int, ...]
    is_limited: bool = False


def plan_load(state: ConnectorRequest, geometry: ConnectorGeometry, total_tokens: int) -> CopyPlan:
    """Return the copy that loads the device blocks of the tokens `local_tokens` to `total_tokens`.

    For a sliding window, only blocks inside the window are filled, and null blocks are skipped.
    Blocks that the scheduler keeps before the window stay unfilled.

    Raises:
        StateError: The block table of a group is too short.
    """
    per_chunk = geometry.blocks_per_chunk
    parts: list[_Part] = []
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
        keys = group.keys[first // per_chunk : last // per_chunk]
        parts.append((keys, group.block_ids[first:last], first))
    return _joined(parts)


def offer_store(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    contents: DeviceContents,
    tokens: int,
    most_chunks: int | None = None,
) -> StoreOffer:
    """Return the chunks that are full at `tokens` tokens and have not been offered before.

    A chunk is full if it has a key and all its device blocks, with known content. Other chunks are
    skipped.

    Args:
        state: The request.
        geometry: Geometry of the device blocks.
        contents: The content of the device blocks.
        tokens: Number of tokens, from the start of the request, that have been computed or loaded.
        most_chunks: Maximum number of chunks per group, from the first one on; all groups end at
            the same token. None: no limit.
    """
    tokens = min(tokens, _token_limit(state.request, geometry))
    per_chunk = geometry.blocks_per_chunk
    sizes = [geometry.tokens_per_chunk(index) for index in range(len(state.groups))]
    offered: list[list[int]] = []
    ends: list[int] = []
    last_token = tokens
    for group, size in zip(state.groups, sizes, strict=True):
        end = min(tokens // size, len(group.keys), len(group.block_ids) // per_chunk)
        full = (
            chunk
            for chunk in range(group.next_chunk, end)
            if contents.have_content(_blocks_of(group.block_ids, chunk, per_chunk))
        )
        chunks = list(islice(full, most_chunks))
        if len(chunks) == most_chunks:
            last_token = min(last_token, (chunks[-1] + 1) * size)
        offered.append(chunks)
        ends.append(end)
    cut = [min(end, last_token // size) for end, size in zip(ends, sizes, strict=True)]
    keys = [
        group.keys[chunk]
        for group, chunks, end in zip(state.groups, offered, cut, strict=True)
        for chunk in chunks
        if chunk < end
    ]
    return StoreOffer(tuple(keys), tuple(cut), is_limited=cut != ends)


def ends_before(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    ends: Sequence[int],
    left_out: Collection[OffloadKey],
) -> tuple[int, ...]:
    """Return the first chunk of each group's next offer: at the first key left out, if any."""
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
    """Return the copy that stores the accepted chunks."""
    per_chunk = geometry.blocks_per_chunk
    accepted = frozenset(accepted)
    parts: list[_Part] = []
    for group, end in zip(state.groups, ends, strict=True):
        chunks = [c for c in range(group.next_chunk, end) if group.keys[c] in accepted]
        blocks = [block for c in chunks for block in _blocks_of(group.block_ids, c, per_chunk)]
        first = chunks[0] * per_chunk if chunks else 0
        parts.append(([group.keys[c] for c in chunks], blocks, first))
    return _joined(parts)


def final_tokens(request: SchedulerRequest) -> int:
    """Return the number of a finished request's tokens with KV; the last sampled token has none."""
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


_Part = tuple[Sequence[OffloadKey], Sequence[int], int]
"""A group's part of a copy: its keys, its device blocks, and the index of the first block."""


def _joined(parts: Sequence[_Part]) -> CopyPlan:
    keys = tuple(chain.from_iterable(keys for keys, _, _ in parts))
    blocks = list(chain.from_iterable(blocks for _, blocks, _ in parts))
    sizes = tuple(len(blocks) for _, blocks, _ in parts)
    indices = tuple(first for _, _, first in parts)
    return CopyPlan(keys, GPULoadStoreSpec(as_block_ids(blocks), sizes, indices))
