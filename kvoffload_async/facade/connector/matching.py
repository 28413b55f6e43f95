"""How long a prefix of a request can be loaded, over all of its KV-cache groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffload_async.facade.connector.protocol import ConnectorGeometry
from kvoffload_async.facade.connector.requests import ConnectorRequest
from kvoffload_async.types import LookupResult, OffloadKey

Lookup = Callable[[OffloadKey], LookupResult]


@dataclass(frozen=True, slots=True)
class Match:
    """The usable prefix.

    Attributes:
        tokens: Its length, from the start of the prompt; a whole number of chunks of each group.
        is_deferred: Whether it is to be asked again in a later step.
        keys: What it consists of, without what lies before the computed tokens.
    """

    tokens: int
    is_deferred: bool
    keys: tuple[OffloadKey, ...]


@dataclass(slots=True)
class _Scan:
    tokens: int
    is_deferred: bool = False
    keys: tuple[OffloadKey, ...] = ()


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

    uncertain = False
    limit = limit_tokens
    while True:
        scans = []
        shortest = limit
        for group in range(len(state.groups)):
            scan = _scan_group(state, geometry, group, computed_tokens, shortest, ask)
            scans.append(scan)
            shortest = min(shortest, scan.tokens)
            if geometry.groups[group].sliding_window_tokens is not None:
                # A probe under way may yet make this group's run longer.
                uncertain = uncertain or scan.is_deferred
        if shortest == limit:
            break
        limit = shortest
    keys = tuple(key for scan in scans for key in scan.keys)
    return Match(limit, uncertain or any(scan.is_deferred for scan in scans), keys)


def _scan_group(
    state: ConnectorRequest,
    geometry: ConnectorGeometry,
    group: int,
    computed_tokens: int,
    limit_tokens: int,
    ask: Lookup,
) -> _Scan:
    tokens_per_chunk = geometry.tokens_per_chunk(group)
    keys = state.groups[group].keys
    first = computed_tokens // tokens_per_chunk
    last = min(limit_tokens // tokens_per_chunk, len(keys))
    if last <= first:
        return _Scan(min(limit_tokens, max(computed_tokens, last * tokens_per_chunk)))
    window = geometry.groups[group].sliding_window_tokens
    if window is None:
        return _scan_all(keys, first, last, tokens_per_chunk, ask)
    return _scan_window(keys, first, last, tokens_per_chunk, -(-window // tokens_per_chunk), ask)


def _scan_all(
    keys: list[OffloadKey], first: int, last: int, tokens_per_chunk: int, ask: Lookup
) -> _Scan:
    """Full attention: every chunk is needed, so only a miss stops the scan."""
    deferred = False
    end = first
    for chunk in range(first, last):
        answer = ask(keys[chunk])
        if answer is LookupResult.MISS:
            break
        deferred = deferred or answer is not LookupResult.HIT
        end = chunk + 1
    return _Scan(end * tokens_per_chunk, deferred, tuple(keys[first:end]))


def _scan_window(
    keys: list[OffloadKey], first: int, last: int, tokens_per_chunk: int, needed: int, ask: Lookup
) -> _Scan:
    """Sliding window: a run of the chunks that the window covers, searched from the right."""
    run = 0
    pending = unknown = False
    for chunk in range(last - 1, first - 1, -1):
        answer = ask(keys[chunk])
        if answer in {LookupResult.MISS, LookupResult.RETRY}:
            unknown = unknown or answer is LookupResult.RETRY
            run, pending = 0, False
            continue
        run += 1
        pending = pending or answer is LookupResult.HIT_PENDING
        if run == needed:
            break
    if not run:
        return _Scan(first * tokens_per_chunk, unknown)
    # `chunk` is the run's leftmost. A run shorter than the window reaches back to the computed
    # tokens, which is as good.
    end = chunk + run
    return _Scan(end * tokens_per_chunk, unknown or pending, tuple(keys[chunk:end]))
