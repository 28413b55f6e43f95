"""One measurement: figures by name, with their units in the names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvoffload_async.bench.plan import Jobs

Sample = dict[str, float]

GIB: Final = 1 << 30
_PERCENTILES: Final = (50, 90, 99)

BESIDE: Final = {
    "owner_us_per_job": "wall_us_per_job",
    "owner_us_per_key": "wall_us_per_key",
    "submit_us_per_job": "wall_us_per_job",
    "submit_us_per_key": "wall_us_per_key",
}
"""Which figure of the floor a tier's figure is compared with, where that is not the same one.

The time of the owner's thread stands beside the time in which the machine moves the bytes: a share
of 0.01 leaves the scheduler 99 % of a time that could not be shorter.
"""


def of_pass(jobs: Jobs, *, wall_s: float, cpu_s: float, latencies_s: Sequence[float]) -> Sample:
    """Return the figures of a pass; `latencies_s` has one entry a job."""
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
    """Return the owner's time in all calls of a pass, and in each submit call, the median one."""
    owner_us = owner_s * 1e6
    submit_us = float(np.median(submits_s)) * 1e6
    return {
        "owner_us_per_job": owner_us / jobs.num_jobs,
        "owner_us_per_key": owner_us / jobs.num_keys,
        "submit_us_per_job": submit_us,
        "submit_us_per_key": submit_us / jobs.keys_per_job,
    }
