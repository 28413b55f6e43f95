"""Plan of a benchmark: sizes, counts and rounds, validated before the start; figures of a pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np

from kvoffload_async.config import parse_size_bytes, suitable_threads
from kvoffload_async.errors import InputError
from kvoffload_async.runtime.buffer import PAGE_BYTES

NUM_BUFFERS = 2
"""Number of buffers in memory: the rows that tiers use, and their expected content."""
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Jobs:
    """Work of one pass: a number of jobs with a number of blocks each."""

    num_jobs: int
    keys_per_job: int
    block_bytes: int

    @property
    def num_keys(self) -> int:
        """Blocks per pass."""
        return self.num_jobs * self.keys_per_job

    @property
    def num_bytes(self) -> int:
        """Bytes per pass."""
        return self.num_keys * self.block_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Work at one block size: many jobs, and optionally one large job."""

    many: Jobs
    one: Jobs | None

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return self.many.block_bytes

    @property
    def num_rows(self) -> int:
        """Number of rows needed: the blocks of the larger pass."""
        return max(self.many.num_keys, self.one.num_keys if self.one else 0)

    @property
    def stored_bytes(self) -> int:
        """Bytes stored in a tier at the end of a round."""
        return self.many.num_bytes + (self.one.num_bytes if self.one else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a benchmark.

    Attributes:
        works: Work for each block size.
        total_bytes: Maximum bytes per pass, and the size of each of the two buffers.
        keys_per_job: Blocks per job.
        one_job: Requested blocks of the single large job.
        in_flight: Jobs in flight at once.
        rounds: Number of rounds.
        threads: Threads of the baseline.
        steady: Whether tiers with a capacity are filled before they are measured.
        warm_up: Whether page cache memory is touched before a store is opened.
    """

    works: tuple[Work, ...]
    total_bytes: int
    keys_per_job: int
    one_job: int
    rounds: int
    in_flight: int = 16
    threads: int = field(default_factory=suitable_threads)
    steady: bool = False
    warm_up: bool = True

    @property
    def stored_bytes(self) -> int:
        """Maximum bytes stored in a tier at the end of a round."""
        return max(work.stored_bytes for work in self.works)

    @classmethod
    def parse(
        cls,
        block_bytes: str,
        total_bytes: str,
        *,
        keys_per_job: int = 16,
        one_job: int = 256,
        **others: Any,  # noqa: ANN401 - of several types
    ) -> Self:
        """Return the plan with these settings, given as on the command line.

        Args:
            block_bytes: Block sizes, separated by commas.
            total_bytes: Maximum bytes per pass.
            keys_per_job: Blocks per job.
            one_job: Requested blocks of the single large job.
            **others: The other attributes, except `works`.

        Raises:
            InputError: The sizes do not fit together, or do not fit the machine.
            ConfigError: A size is invalid.
        """
        total = parse_size_bytes(total_bytes, "--total-bytes")
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
        most = int(memory_bytes * _MEMORY_SHARE) // NUM_BUFFERS
        if total > most:
            raise InputError(
                f"--total-bytes: {total_bytes!r} needs {NUM_BUFFERS * total} bytes of memory for "
                f"two buffers, more than half of what this machine has; use at most {most}"
            )
        sizes = _sizes(block_bytes.split(","))
        job_bytes = max(sizes) * keys_per_job
        if job_bytes > total:
            raise InputError(
                f"--total-bytes: {total_bytes!r} is less than one job of {keys_per_job} blocks of "
                f"{max(sizes)} bytes; use at least {job_bytes}, or smaller --block-bytes"
            )
        return cls(
            works=tuple(_work(size, total, keys_per_job, one_job) for size in sizes),
            total_bytes=total,
            keys_per_job=keys_per_job,
            one_job=one_job,
            **others,
        )


def _sizes(texts: Sequence[str]) -> list[int]:
    sizes: list[int] = []
    for text in texts:
        size = parse_size_bytes(text, "--block-bytes")
        if size % PAGE_BYTES:
            raise InputError(
                f"--block-bytes: {text!r} is not valid; it must be a multiple of {PAGE_BYTES}, "
                "since the primary's rows are whole pages"
            )
        if size in sizes:
            raise InputError(f"--block-bytes: {text!r} is given twice; leave one out")
        sizes.append(size)
    return sizes


def _work(block_bytes: int, total_bytes: int, keys_per_job: int, one_job: int) -> Work:
    one_job_keys = min(one_job, total_bytes // block_bytes)
    return Work(
        Jobs(total_bytes // (block_bytes * keys_per_job), keys_per_job, block_bytes),
        Jobs(1, one_job_keys, block_bytes) if one_job_keys else None,
    )


Sample = dict[str, float]

GIB: Final = 1 << 30
_PERCENTILES: Final = (50, 90, 99)

BESIDE: Final = {
    "owner_us_per_job": "wall_us_per_job",
    "owner_us_per_key": "wall_us_per_key",
    "submit_us_per_job": "wall_us_per_job",
    "submit_us_per_key": "wall_us_per_key",
}
"""Baseline figure that a tier's figure is compared with, if it has another name.

The owner's thread time is compared with the time in which the machine moves the bytes: a ratio of
0.01 leaves 99 % of the minimum transfer time to the scheduler.
"""


def of_pass(jobs: Jobs, *, wall_s: float, cpu_s: float, latencies_s: Sequence[float]) -> Sample:
    """Return the figures of a pass; `latencies_s` has one entry per job."""
    percentiles_ms = np.percentile(latencies_s, _PERCENTILES) * 1e3
    return {
        "gib_per_s": jobs.num_bytes / GIB / wall_s,
        "cpu_s_per_gib": cpu_s / (jobs.num_bytes / GIB),
        "wall_us_per_job": wall_s * 1e6 / jobs.num_jobs,
        "wall_us_per_key": wall_s * 1e6 / jobs.num_keys,
        **{
            f"job_ms_p{q}": float(value)
            for q, value in zip(_PERCENTILES, percentiles_ms, strict=True)
        },
    }


def of_owner(jobs: Jobs, *, owner_s: float, submits_s: Sequence[float]) -> Sample:
    """Return the owner's time in all calls of a pass, and the median time of a submit call."""
    owner_us = owner_s * 1e6
    submit_us = float(np.median(submits_s)) * 1e6
    return {
        "owner_us_per_job": owner_us / jobs.num_jobs,
        "owner_us_per_key": owner_us / jobs.num_keys,
        "submit_us_per_job": submit_us,
        "submit_us_per_key": submit_us / jobs.keys_per_job,
    }
