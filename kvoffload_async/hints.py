"""Hints of a request: the vocabulary, and the parsers of the forms in which clients give them.

The vocabulary is a mapping of at most three entries; see `Hints`:

    {"priority": "low" | "normal" | "high", "retain_s": 600, "max_offload_tokens": 4096}

A client gives it in `kv_transfer_params` under `HINTS_KEY`, or as payload of an action of type
`ACTION_TYPE` and version `ACTION_VERSION` in vLLM's envelope of hints; a program, to
`OffloadEngine.request`. What a client gives is never an error: hints with other names, actions of
other types or versions, and invalid values are counted and ignored. The time to read it does not
depend on its size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from enum import StrEnum
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from kvoffload_async.config import reject_unknown, shown
from kvoffload_async.errors import ConfigError
from kvoffload_async.statistics import HintResult
from kvoffload_async.types import (
    ALL_TIERS,
    MOST_RETAIN_S,
    NO_HINTS,
    Hints,
    LoadTierFilter,
    Locality,
    Medium,
    Priority,
    ReqContext,
    TierMatcher,
)

HINTS_KEY: Final = "kvoffload_hints"
LOAD_TIERS_KEY: Final = "kv_load_tiers"
"""vLLM's key of the tiers from which a request may load: a list of {"medium", "locality"}."""
ACTION_TYPE: Final = "kvoffload.hints"
ACTION_VERSION: Final = "1"

_MOST_ENTRIES: Final = 16
"""Maximum number of entries that are read of each mapping or list of a request."""

Counts = dict[HintResult, int]
E = TypeVar("E", bound=StrEnum)


class _Hint(NamedTuple):
    is_valid: Callable[[Any], bool]
    convert: Callable[[Any], Any]
    allowed: str


_PRIORITIES: Final = frozenset(map(str, Priority))
_VOCABULARY: Final = {
    "priority": _Hint(
        lambda value: isinstance(value, str) and value in _PRIORITIES,
        Priority,
        '"low", "normal" or "high"',
    ),
    "retain_s": _Hint(
        lambda value: type(value) in {int, float} and 0 <= value <= MOST_RETAIN_S,
        float,
        f"a number of seconds from 0 to {MOST_RETAIN_S}",
    ),
    "max_offload_tokens": _Hint(
        lambda value: type(value) is int and 0 <= value < 1 << 63,
        int,
        "a number of tokens, 0 to store nothing",
    ),
}


def parse_hints(given: object) -> Hints:
    """Return the hints that a program gives as a mapping; None: no hints.

    Raises:
        ConfigError: It is no mapping, a name is unknown, or a value is invalid.
    """
    if given is None:
        return NO_HINTS
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'hints: {shown(given)} is not valid; give a mapping such as {{"retain_s": 600}}'
        )
    reject_unknown(given, _VOCABULARY, "hints")
    for key, value in given.items():
        if not _VOCABULARY[key].is_valid(value):
            raise ConfigError(
                f"hints: {key}: {shown(value)} is not valid; it must be {_VOCABULARY[key].allowed}"
            )
    return Hints(**{key: _VOCABULARY[key].convert(value) for key, value in given.items()})


def parse_tiers(given: object) -> LoadTierFilter:
    """Return a filter that a program gives; raises ConfigError unless it consists of matchers."""
    if isinstance(given, Collection) and all(isinstance(each, TierMatcher) for each in given):
        return frozenset(given)
    raise ConfigError(
        f"load_tier_filter: {shown(given)} is not valid; give a set of TierMatcher(...)"
    )


def read_hints(ctx: ReqContext, counts: Counts) -> None:
    """Add the client's hints to those of a request that begins, and count them by result.

    A hint of the program takes precedence over one in the envelope, that over one in
    `kv_transfer_params`, and a later one over an earlier one.

    Raises:
        ConfigError: A hint of the program, in `ctx.hints`, is invalid.
    """
    read: dict[str, Any] = {}
    params = ctx.kv_transfer_params
    if isinstance(params, dict):
        if (given := params.get(HINTS_KEY)) is not None:
            _read_mapping(given, read, counts)
        if (tiers := params.get(LOAD_TIERS_KEY)) is not None and ctx.load_tier_filter == ALL_TIERS:
            ctx.load_tier_filter = _read_tiers(tiers, counts)
    if ctx.kv_hints is not None:
        _read_envelope(ctx.kv_hints, read, counts)
    if ctx.hints is not NO_HINTS:
        own = {each.name: getattr(ctx.hints, each.name) for each in fields(Hints)}
        own = {name: value for name, value in own.items() if value != getattr(NO_HINTS, name)}
        checked = parse_hints(own)
        read |= {name: getattr(checked, name) for name in own}
        counts["applied"] += len(own)
    if read:
        ctx.hints = Hints(**read)


def _read_mapping(given: object, read: dict[str, Any], counts: Counts) -> None:
    if not isinstance(given, dict) or len(given) > _MOST_ENTRIES:
        counts["invalid"] += 1
        return
    for key, value in given.items():
        hint = _VOCABULARY.get(key)
        if hint is None:
            counts["unknown"] += 1
        elif hint.is_valid(value):
            read[key] = hint.convert(value)
            counts["applied"] += 1
        else:
            counts["invalid"] += 1


def _read_envelope(envelope: object, read: dict[str, Any], counts: Counts) -> None:
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple):
        counts["invalid"] += 1
        return
    for action in islice(actions, _MOST_ENTRIES):
        kind = _field(action, "action_type"), _field(action, "action_version")
        if kind == (ACTION_TYPE, ACTION_VERSION):
            _read_mapping(_field(action, "payload"), read, counts)
        else:
            counts["unknown"] += 1
    counts["invalid"] += max(0, len(actions) - _MOST_ENTRIES)


def _field(structure: object, name: str) -> object:
    if isinstance(structure, dict):
        return structure.get(name)
    return getattr(structure, name, None)


def _read_tiers(given: object, counts: Counts) -> LoadTierFilter:
    """Return the filter that vLLM reads from the same list: all tiers if no entry is valid."""
    if not isinstance(given, list) or len(given) > _MOST_ENTRIES:
        counts["invalid"] += 1
        return ALL_TIERS
    matchers: set[TierMatcher] = set()
    for entry in given:
        try:
            medium = _member(Medium, _field(entry, "medium"))
            matchers.add(TierMatcher(medium, _member(Locality, _field(entry, "locality"))))
        except ValueError:
            counts["invalid"] += 1
    if given and not matchers:
        return ALL_TIERS
    counts["applied"] += 1
    return frozenset(matchers)


def _member(kind: type[E], name: object) -> E | None:
    if name is None:
        return None
    members = {str(member): member for member in kind}
    if isinstance(name, str) and len(name) <= _MOST_ENTRIES and name.upper() in members:
        return members[name.upper()]
    raise ValueError(f"no {kind.__name__}")
