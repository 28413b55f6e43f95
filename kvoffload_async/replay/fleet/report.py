"""The figures of a fleet: each pass's, summed over its processes, and what they cost by tier."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from kvoffload_async.replay.report import Report

_GIB: Final = 1 << 30
_SAME: Final = frozenset(
    {
        *("policy", "primary_blocks", "block_bytes", "row_bytes", "concurrency", "engine"),
        *("device_blocks", "layers"),
    }
)
"""Figures that are not summed: they are alike in all processes."""


@dataclass(frozen=True, slots=True)
class FleetPass:
    """One pass of all processes.

    Attributes:
        name: `"alone"`, `"lockstep"` or `"free"`.
        members: The figures of each process; of one that was killed and replaced, of both.
        wall_s: Seconds that the pass took.
        killed: Processes that were killed on the way.
    """

    name: str
    members: tuple[Report, ...]
    wall_s: float
    killed: int = 0

    @property
    def total(self) -> Report:
        """The sum over the processes; owner's times are those of the slowest one."""
        return _summed(self.members, self.wall_s)

    @property
    def costs(self) -> dict[str, dict[str, float]]:
        """What would be paid for, by tier: requests, and GiB moved in either direction."""
        return {
            name: {
                "requests": tier["requests"],
                "stored_gib": tier["stored_bytes"] / _GIB,
                "loaded_gib": tier["loaded_bytes"] / _GIB,
            }
            for name, tier in self.total.tiers.items()
        }


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a fleet has shown.

    Attributes:
        passes: Those that were made, in their order; the last one may have been interrupted.
        unbounded: The hit ratio of one cache without a bound.
        interrupted: Whether the fleet was stopped on the way.
        fleet: Number of processes.
        spread: How requests were spread over them.
    """

    passes: tuple[FleetPass, ...]
    unbounded: float
    interrupted: bool
    fleet: int
    spread: str

    @property
    def complaints(self) -> list[str]:
        """What must never happen, and did."""
        return [
            f"{one.name}: {complaint}" for one in self.passes for complaint in one.total.complaints
        ]

    def named(self, name: str) -> FleetPass | None:
        """Return a pass, if it was made."""
        return next((one for one in self.passes if one.name == name), None)

    def ratio(self, name: str) -> float | None:
        """Return a pass's hit ratio, if it was made."""
        one = self.named(name)
        return None if one is None else one.total.hit_ratio

    def to_json(self) -> str:
        """Return one JSON object: those of a plain replay for the lockstep pass, and a fleet's.

        `alone`, `shared`, `shared_free_running` and `unbounded` are hit ratios.
        """
        shown = self.named("lockstep") or self.passes[-1]
        figures: dict[str, Any] = asdict(shown.total)
        figures |= {
            "interrupted": self.interrupted,
            "fleet": self.fleet,
            "spread": self.spread,
            "alone": self.ratio("alone"),
            "shared": self.ratio("lockstep"),
            "shared_free_running": self.ratio("free"),
            "unbounded": self.unbounded,
            "passes": {
                one.name: {
                    "hit_ratio": one.total.hit_ratio,
                    "jobs_submitted": one.total.jobs_submitted,
                    "job_results": one.total.job_results,
                    "job_failures": one.total.job_failures,
                    "corrupt_blocks": one.total.corrupt_blocks,
                    "wall_s": one.wall_s,
                    "killed": one.killed,
                    "costs": one.costs,
                    "members": [
                        {"requests": report.requests, "hit_ratio": report.hit_ratio}
                        for report in one.members
                    ],
                }
                for one in self.passes
            },
        }
        return json.dumps(figures, indent=2)


def _summed(reports: Sequence[Report], wall_s: float) -> Report:
    first = reports[0]
    sums: dict[str, Any] = {
        option.name: sum(getattr(report, option.name) for report in reports)
        for option in fields(Report)
        if option.name not in _SAME and isinstance(getattr(first, option.name), int)
    }
    hits: Counter[str] = Counter()
    for report in reports:
        hits.update(report.hits)
    return replace(
        first,
        **sums
        | {
            "interrupted": any(report.interrupted for report in reports),
            "hits": dict(hits),
            "hit_ratio": hits.total() / max(1, sums["block_refs"]),
            "wall_s": wall_s,
            "block_refs_per_s": sums["block_refs"] / max(wall_s, 1e-9),
            "owner_us_per_step": _greatest([report.owner_us_per_step for report in reports]),
            "tiers": {
                name: {
                    figure: sum(report.tiers[name][figure] for report in reports)
                    for figure in figures
                }
                for name, figures in first.tiers.items()
            },
        },
    )


def _greatest(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in times) for name in times[0]}
