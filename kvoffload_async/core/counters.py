"""Counters of the primary tier; what they mean is said in `kvoffload_async.statistics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrimaryCounters:
    """What the primary has done so far."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    refused_stores: int = 0
