"""How long a prefix of a request can be loaded, over all of its KV-cache groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoffload_async.facade.connector.protocol import ConnectorGeometry
from kvoffload_async.facade.connector.requests import ConnectorRequest
from kvoffload_async.types import LookupResult, OffloadKey

Lookup = Callable[[OffloadKey], LookupResult]


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
    lookup: Lookup,
) -> Match:
    """Return the longest prefix that every group can load, at most `limit_tokens`.

    Each key is asked for at most once, although groups shorten each other: the search goes round
    until the common length does not shrink any more.
    """
    answers: dict[OffloadKey, LookupResult] = {}

    def ask(key: OffloadKey) -> LookupResult:
        answer = answers.get(key)
        if answer is None:
            answer = answers[key] = lookup(key)
        return answer

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
    ask: Lookup,
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
    keys: Sequence[OffloadKey], first: int, last: int, ask: Lookup
) -> tuple[int, int, bool, bool]:
    """Full attention: every chunk is needed, so a miss ends the run.

    Nothing else does, so that all probes of a prefix start in one step.
    """
    is_pending = False
    end = first
    for chunk in range(first, last):
        answer = ask(keys[chunk])
        if answer is LookupResult.MISS:
            break
        is_pending = is_pending or answer is not LookupResult.HIT
        end = chunk + 1
    return first, end, is_pending, False


def _scan_leftwards(
    keys: Sequence[OffloadKey], first: int, last: int, needed: int, ask: Lookup
) -> tuple[int, int, bool, bool]:
    """Sliding window: as many chunks in a row as it covers, the rightmost such run.

    One that reaches back to the computed tokens may be shorter.
    """
    length = 0
    is_pending = may_grow = False
    start = last
    while start > first and length < needed:
        start -= 1
        answer = ask(keys[start])
        if answer in {LookupResult.MISS, LookupResult.RETRY}:
            may_grow = may_grow or answer is LookupResult.RETRY
            length, is_pending = 0, False
            continue
        length += 1
        is_pending = is_pending or answer is LookupResult.HIT_PENDING
    return start, start + length, is_pending, may_grow
