"""The options that every tier takes, and what their values may be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, TypedDict

from kvoffload_async.config import (
    Parser,
    at_least,
    or_none,
    parse_bool,
    parse_label,
    parse_name,
    parse_rate,
    parse_seconds,
)
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.facade.storage import parse_run_config
from kvoffload_async.runtime.bridge import Bridge

MAX_THREADS: Final = 1024
"""More of one tier's than this are a mistake: each takes memory, and most would wait."""


class TierOptions(TypedDict, total=False):
    """The options that every tier takes; times in seconds."""

    runtime: Bridge | None
    io_timeout_s: float
    probe_timeout_s: float
    open_timeout_s: float
    close_timeout_s: float
    n_read_threads: int | None
    n_write_threads: int
    enable_kv_events: bool
    min_blocks: int
    prefill_blocks_per_s: float | None
    backpressure_detector: Backpressure | None
    model: str | None
    fingerprint: str | None
    namespace: str | None
    rank: int
    run_config: Mapping[str, Any] | None


_PARSERS: Final[Mapping[str, Parser]] = {
    "io_timeout_s": parse_seconds,
    "probe_timeout_s": parse_seconds,
    "open_timeout_s": parse_seconds,
    "close_timeout_s": parse_seconds,
    "n_read_threads": or_none(at_least(1, MAX_THREADS)),
    "n_write_threads": at_least(1, MAX_THREADS),
    "enable_kv_events": parse_bool,
    "min_blocks": at_least(1),
    "prefill_blocks_per_s": or_none(parse_rate),
    "model": or_none(parse_name),
    "fingerprint": or_none(parse_label),
    "namespace": or_none(parse_label),
    "rank": at_least(0),
    "run_config": lambda value, _key: parse_run_config(value),
}


def check_tier_options(options: Mapping[str, Any]) -> None:
    """Check those of `TierOptions` that a configuration can give; others are ignored.

    Raises:
        ConfigError: A value is of the wrong type, or impossible.
    """
    for name in options.keys() & _PARSERS.keys():
        _PARSERS[name](options[name], name)


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the defaults of a constructor's own parameters, by name."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
