"""Per-tier counters in addition to vLLM's own, and the labels that describe a tier.

vLLM already counts bytes, times, hits and failures per tier. The names begin with `vllm:` because
vLLM unregisters only such metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from kvoffload_async.integrations.vllm import convert

FAILED_JOBS = "vllm:kvoffload_async_failed_jobs"
OVERDUE_JOBS = "vllm:kvoffload_async_overdue_jobs"
CONFIG_INFO_KEYS = ("kvoffload_async_version", "kvoffload_async_tier", "kvoffload_async_place")

Stats = Any
"""vLLM's `OffloadingConnectorStats`."""


def definitions() -> dict[str, Any]:
    """Return vLLM's definitions of the counters."""
    return convert.counter_definitions(
        {FAILED_JOBS: "Jobs of a secondary tier with a failed block, by the kind of error."},
        labels=("tier", "error"),
    ) | convert.counter_definitions(
        {OVERDUE_JOBS: "Jobs of a secondary tier whose copy was still running at their deadline."},
        labels=("tier",),
    )


def stats(counted: Mapping[tuple[str, tuple[str, ...]], int]) -> Stats | None:
    """Return increments by (counter, label values) as vLLM's stats; None if there are none."""
    return convert.counter_stats(
        (name, labels, amount) for (name, labels), amount in counted.items()
    )


def config_info(kind: str, place: str) -> Mapping[str, str]:
    """Return a tier's labels, keyed by `CONFIG_INFO_KEYS`."""
    return dict(zip(CONFIG_INFO_KEYS, (version("kvoffload-async"), kind, place), strict=True))
