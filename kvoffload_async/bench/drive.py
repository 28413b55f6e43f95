"""One pass over an open tier, as a scheduler makes it: submit, end the step, poll."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvoffload_async.bench.contender import OpenTier, Result, UnfitError
from kvoffload_async.bench.plan import Jobs
from kvoffload_async.bench.sample import Sample, of_owner, of_pass
from kvoffload_async.bench.switches import count_switches, switches_since
from kvoffload_async.types import OffloadKey

STEP_S: Final = 0.0002
"""What the owner sleeps between two polls that find nothing."""
STALL_S: Final = 60.0
"""How long a pass may go without the end of a job: longer than a tier's own deadlines."""
_POLLS: Final = 1000
_LOOKUP_S: Final = 10.0
_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """How a pass has gone.

    Attributes:
        sample: Its figures.
        failures: Why jobs failed, one entry a failed job.
    """

    sample: Sample
    failures: tuple[str, ...]


@dataclass(slots=True)
class _Stopwatch:
    """What the owner's thread has spent, and when each job began and how long it took."""

    submits_ns: list[int] = field(default_factory=list)
    steps_ns: int = 0
    begun_ns: dict[int, int] = field(default_factory=dict)
    latencies_ns: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def owner_ns(self) -> int:
        """All of the owner's time."""
        return self.steps_ns + sum(self.submits_ns)

    def end(self, result: Result, now_ns: int) -> None:
        """Note the end of a job."""
        self.latencies_ns.append(now_ns - self.begun_ns.pop(result.job_id))
        if not result.success:
            self.failures.append(str(getattr(result, "error", None) or "no reason given"))


def drive(
    tier: OpenTier,
    jobs: Mapping[int, object],
    shape: Jobs,
    *,
    is_load: bool,
    in_flight: int,
    stall_s: float = STALL_S,
) -> PassOutcome:
    """Run jobs, given by id, with at most `in_flight` of them under way.

    Raises:
        UnfitError: No job has ended for `stall_s` seconds.
    """
    manager, step = tier.manager, tier.step
    submit = manager.submit_load if is_load else manager.submit_store
    watch = _Stopwatch()
    waiting = iter(jobs.items())
    pause = threading.Event()
    clock = time.perf_counter_ns
    switches = count_switches()
    cpu_s, start_ns = time.process_time(), clock()
    progress_ns = start_ns
    while len(watch.latencies_ns) < len(jobs):
        for job_id, job in islice(waiting, in_flight - len(watch.begun_ns)):
            watch.begun_ns[job_id] = before_ns = clock()
            submit(job)
            watch.submits_ns.append(clock() - before_ns)
        before_ns = clock()
        manager.on_schedule_end(step)
        results = list(manager.get_finished_jobs())
        now_ns = clock()
        watch.steps_ns += now_ns - before_ns
        for result in results:
            watch.end(result, now_ns)
        if results:
            progress_ns = now_ns
        elif now_ns - progress_ns > stall_s * _NS:
            raise UnfitError(f"no job has ended for {stall_s:g} s; {len(jobs)} were to end")
        else:
            pause.wait(STEP_S)
    cpu_s = time.process_time() - cpu_s
    num_switches = switches_since(switches)
    return PassOutcome(
        of_pass(
            shape,
            wall_s=(progress_ns - start_ns) / _NS,
            cpu_s=cpu_s,
            latencies_s=[ns / _NS for ns in watch.latencies_ns],
        )
        | of_owner(
            shape,
            owner_s=watch.owner_ns / _NS,
            submits_s=[ns / _NS for ns in watch.submits_ns],
        )
        | {"switches_per_job": num_switches / shape.num_jobs},
        tuple(watch.failures),
    )


def time_at_rest(tier: OpenTier, keys: Sequence[OffloadKey]) -> Sample:
    """Return what single calls take while nothing runs.

    Args:
        tier: It has no job.
        keys: What to look up; only those that are found count.
    """
    sample = {"idle_poll_us": _mean_us(tier.manager.get_finished_jobs, [()] * _POLLS)}
    found = _found(tier, keys)
    if found:
        request = tier.request
        sample["lookup_us"] = _mean_us(tier.manager.lookup, [(key, request) for key in found])
    return sample


def _found(tier: OpenTier, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Look up until the tier knows; return the keys that it has."""
    pause = threading.Event()
    deadline_s = time.monotonic() + _LOOKUP_S
    while True:
        answers = [tier.manager.lookup(key, tier.request).name for key in keys]
        if "RETRY" not in answers or time.monotonic() > deadline_s:
            return [key for key, answer in zip(keys, answers, strict=True) if answer == "HIT"]
        tier.manager.on_schedule_end(tier.step)
        tier.manager.get_finished_jobs()  # some take in the answers here
        pause.wait(STEP_S)


def _mean_us(call: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> float:
    start_ns = time.perf_counter_ns()
    for each in arguments:
        call(*each)
    return (time.perf_counter_ns() - start_ns) / 1e3 / len(arguments)
