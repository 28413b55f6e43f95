"""Results of a benchmark: medians over the rounds, their range, their ratio to the baseline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any

from kvoffload_async.bench.baseline import Baseline
from kvoffload_async.bench.plan import BESIDE, Sample
from kvoffload_async.bench.rounds import MEMCPY, Samples


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value over all rounds.

    Attributes:
        median: Median; `low` and `high` are the extremes.
        of_baseline: Ratio of the median to the baseline's, if there is one: the native baseline,
            or the plain one if native code is not used.
        of_plain: Ratio to the plain baseline's median.
        of_recycling: Ratio to the recycling baseline's median, on full stores.
        of_memcpy: Ratio to the median of copying within memory.
    """

    median: float
    low: float
    high: float
    of_baseline: float | None = None
    of_plain: float | None = None
    of_recycling: float | None = None
    of_memcpy: float | None = None


Passes = dict[str, dict[str, Figure]]
"""Figures by pass and figure name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Results of a contender at one block size.

    Attributes:
        passes: Its figures.
        verified_blocks: Loaded blocks compared with the stored ones, outside the measured time;
            `wrong_blocks` of them differed.
        failed_jobs: Number of failed jobs; `reason` is the first one's error.
    """

    passes: Passes
    verified_blocks: int
    wrong_blocks: int
    failed_jobs: int
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """Results at one block size.

    Attributes:
        block_bytes: The block size.
        rounds: Number of rounds.
        num_jobs: Jobs per pass, of `keys_per_job` blocks each.
        one_job_keys: Blocks of the single large job.
        memcpy: Figures of copying within memory.
        baselines: Figures of the baselines, by directory and kind.
        contenders: Results by contender.
    """

    block_bytes: int
    rounds: int
    num_jobs: int
    keys_per_job: int
    one_job_keys: int
    memcpy: dict[str, Figure]
    baselines: dict[str, dict[str, Passes]]
    contenders: dict[str, Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of a benchmark.

    Attributes:
        interrupted: Whether rounds or block sizes are missing because it was stopped early.
        settings: Settings of the benchmark.
        machine: Properties of the machine.
        contenders: Per contender: its options, its directory, and its reference `baseline`.
        sizes: Results by block size.
    """

    interrupted: bool
    settings: dict[str, Any]
    machine: dict[str, Any]
    contenders: dict[str, dict[str, Any]]
    sizes: tuple[SizeReport, ...]

    @property
    def complaints(self) -> list[str]:
        """Errors found: wrong blocks and failed jobs."""
        found = []
        for size in self.sizes:
            for name, standing in size.contenders.items():
                where = f"{name}, blocks of {size.block_bytes} bytes"
                if standing.wrong_blocks:
                    found.append(f"{where}: {standing.wrong_blocks} loaded blocks were wrong")
                if standing.failed_jobs:
                    found.append(f"{where}: {standing.failed_jobs} jobs failed: {standing.reason}")
        return found

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(asdict(self), indent=2)


def summarize(samples: Samples, baselines: Mapping[str, Sequence[Baseline]]) -> SizeReport:
    """Return the results of one block size, from its samples.

    Args:
        samples: The measurements.
        baselines: Baselines of each contender, the reference first; empty for a tier in
            memory.
    """
    work = samples.work
    memcpy = _figures(samples.passes[MEMCPY, "copy"])
    raw: dict[str, dict[str, Passes]] = {}
    for baseline in dict.fromkeys(chain.from_iterable(baselines.values())):
        raw.setdefault(baseline.directory, {})[baseline.kind] = {
            what: _figures(each, of_memcpy=memcpy)
            for what, each in _passes_of(samples, baseline.name)
        }
    standings: dict[str, Standing] = {}
    for name, beneath in baselines.items():
        kinds = {baseline.kind: raw[baseline.directory][baseline.kind] for baseline in beneath}
        standings[name] = Standing(
            passes={
                what: _figures(
                    each,
                    of_memcpy=memcpy,
                    of_baseline=kinds[beneath[0].kind].get(what, {}) if beneath else memcpy,
                    of_plain=kinds.get("plain", {}).get(what, {}),
                    of_recycling=kinds.get("recycling", {}).get(what, {}),
                )
                for what, each in _passes_of(samples, name)
            },
            verified_blocks=samples.rounds * work.stored_bytes // work.block_bytes,
            wrong_blocks=samples.wrong_blocks[name],
            failed_jobs=len(samples.failures[name]),
            reason=next(iter(samples.failures[name]), None),
        )
    return SizeReport(
        block_bytes=work.block_bytes,
        rounds=samples.rounds,
        num_jobs=work.many.num_jobs,
        keys_per_job=work.many.keys_per_job,
        one_job_keys=work.one.num_keys if work.one else 0,
        memcpy=memcpy,
        baselines=raw,
        contenders=standings,
    )


def _passes_of(samples: Samples, name: str) -> list[tuple[str, list[Sample]]]:
    return [(what, each) for (who, what), each in samples.passes.items() if who == name]


def _figures(samples: Sequence[Sample], **beside: Mapping[str, Figure]) -> dict[str, Figure]:
    """Return the figures of one pass, over all rounds.

    Args:
        samples: One per round; at least one.
        **beside: Figures to compare with, by the name of the ratio in `Figure`.
    """
    return {
        name: _figure(name, [sample[name] for sample in samples if name in sample], beside)
        for name in samples[0]
    }


def _figure(
    name: str, values: Sequence[float], beside: Mapping[str, Mapping[str, Figure]]
) -> Figure:
    middle = median(values)
    ratios = {
        ratio: middle / other.median
        for ratio, figures in beside.items()
        if (other := figures.get(BESIDE.get(name, name))) and other.median
    }
    return Figure(middle, min(values), max(values), **ratios)
