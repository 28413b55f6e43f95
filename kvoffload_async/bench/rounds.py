"""The order of measurements: in each round first the baselines, then every contender.

So a temporary disturbance of the machine affects all of them alike. In every round a contender
starts with a new store, which is empty or, if requested and it has a capacity, filled with other
blocks. Keys are new in each round.

A pass uses an open tier like a scheduler: submit, end the step, poll.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Final

from kvoffload_async.bench.baseline import STALL_S, Baseline, Payload, measure_memcpy
from kvoffload_async.bench.contender import Contender, OpenTier, UnfitError
from kvoffload_async.bench.plan import Jobs, Plan, Sample, Work, of_owner, of_pass
from kvoffload_async.types import JobMetadata, OffloadKey, as_block_ids, make_offload_key

_LINE: Final = "voluntary_ctxt_switches:"


def count_switches() -> dict[int, int]:
    """Return the voluntary context switches of each Python thread except the caller's.

    A thread switches voluntarily when it waits for work, a system call, or the GIL. Threads of
    native code, which never wait for the GIL, are not counted.
    """
    own = threading.get_ident()
    others = [thread.native_id for thread in threading.enumerate() if thread.ident != own]
    return {number: _switches_of(number) for number in others if number is not None}


def switches_since(before: dict[int, int]) -> int:
    """Return the number of switches since `before`, a result of `count_switches`."""
    return sum(count - before.get(thread, 0) for thread, count in count_switches().items())


def _switches_of(thread: int) -> int:
    try:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return next(int(line.removeprefix(_LINE)) for line in lines if line.startswith(_LINE))


STEP_S: Final = 0.0002
"""Seconds that the owner sleeps after a poll without results."""
_POLLS: Final = 1000
_LOOKUP_S: Final = 10.0
_NS: Final = 1_000_000_000


def drive(
    tier: OpenTier,
    jobs: Mapping[int, JobMetadata],
    shape: Jobs,
    *,
    is_load: bool,
    in_flight: int,
) -> tuple[Sample, list[str]]:
    """Run a tier's jobs, given by id, with at most `in_flight` jobs in flight.

    Returns:
        The figures of the pass, and an error text for each failed job.

    Raises:
        UnfitError: No job ended for `STALL_S` seconds.
    """
    manager, step = tier.manager, tier.step
    submit = manager.submit_load if is_load else manager.submit_store
    begun_ns: dict[int, int] = {}
    submits_ns: list[int] = []
    latencies_ns: list[int] = []
    failures: list[str] = []
    steps_ns = 0
    waiting = iter(jobs.items())
    pause = threading.Event()
    clock = time.perf_counter_ns
    switches = count_switches()
    cpu_s, start_ns = time.process_time(), clock()
    progress_ns = start_ns
    while len(latencies_ns) < len(jobs):
        for job_id, job in islice(waiting, in_flight - len(begun_ns)):
            begun_ns[job_id] = before_ns = clock()
            submit(job)
            submits_ns.append(clock() - before_ns)
        before_ns = clock()
        manager.on_schedule_end(step)
        results = list(manager.get_finished_jobs())
        now_ns = clock()
        steps_ns += now_ns - before_ns
        for result in results:
            latencies_ns.append(now_ns - begun_ns.pop(result.job_id))
            if not result.success:  # other engines' results have no reason
                failures.append(str(getattr(result, "error", None) or "no reason given"))
        if results:
            progress_ns = now_ns
        elif now_ns - progress_ns > STALL_S * _NS:
            raise UnfitError(f"no job has ended for {STALL_S:g} s; {len(jobs)} were to end")
        else:
            pause.wait(STEP_S)
    cpu_s = time.process_time() - cpu_s
    num_switches = switches_since(switches)
    sample = of_pass(
        shape,
        wall_s=(progress_ns - start_ns) / _NS,
        cpu_s=cpu_s,
        latencies_s=[ns / _NS for ns in latencies_ns],
    ) | of_owner(
        shape,
        owner_s=(steps_ns + sum(submits_ns)) / _NS,
        submits_s=[ns / _NS for ns in submits_ns],
    )
    return sample | {"switches_per_job": num_switches / shape.num_jobs}, failures


def time_at_rest(tier: OpenTier, keys: Sequence[OffloadKey]) -> Sample:
    """Return the duration of single calls to an idle tier.

    Args:
        tier: An open tier without jobs.
        keys: Keys to look up; only hits are measured.
    """
    sample = {"idle_poll_us": _mean_us(tier.manager.get_finished_jobs, [()] * _POLLS)}
    found = _found(tier, keys)
    if found:
        request = tier.request
        sample["lookup_us"] = _mean_us(tier.manager.lookup, [(key, request) for key in found])
    return sample


def _found(tier: OpenTier, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Look up keys until all answers are final; return the keys found."""
    pause = threading.Event()
    deadline_s = time.monotonic() + _LOOKUP_S
    while True:
        answers = [tier.manager.lookup(key, tier.request).name for key in keys]
        if "RETRY" not in answers or time.monotonic() > deadline_s:
            return [key for key, answer in zip(keys, answers, strict=True) if answer == "HIT"]
        tier.manager.on_schedule_end(tier.step)
        tier.manager.get_finished_jobs()  # some tiers receive the answers here
        pause.wait(STEP_S)


def _mean_us(call: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> float:
    start_ns = time.perf_counter_ns()
    for each in arguments:
        call(*each)
    return (time.perf_counter_ns() - start_ns) / 1e3 / len(arguments)


MEMCPY: Final = "memcpy"
ONE_JOB: Final = "_one_job"
"""Suffix of the passes with one large job."""
_HASH_BYTES: Final = 32


@dataclass(slots=True)
class Samples:
    """Measurements at one block size.

    Attributes:
        work: The work.
        rounds: Number of completed rounds.
        passes: One sample per round, by (contender or baseline, pass).
        failures: Error texts of failed jobs, by contender.
        wrong_blocks: Loaded blocks with wrong bytes, by contender.
    """

    work: Work
    rounds: int = 0
    passes: defaultdict[tuple[str, str], list[Sample]] = field(
        default_factory=lambda: defaultdict(list)
    )
    failures: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    wrong_blocks: Counter[str] = field(default_factory=Counter)

    def forget_incomplete_round(self) -> None:
        """Drop the samples of an incomplete round."""
        for samples in self.passes.values():
            del samples[self.rounds :]


def measure(
    plan: Plan,
    baselines: Sequence[Baseline],
    contenders: Sequence[Contender],
    *,
    on_turn: Callable[[], None],
    should_stop: Callable[[], bool],
) -> Iterator[Samples]:
    """Yield the samples of each block size, completed rounds only.

    If stopped early, the current block size has the samples of the rounds before.

    Args:
        plan: Settings of the benchmark.
        baselines: Baselines to measure.
        contenders: Contenders to measure.
        on_turn: Called after each turn: of memcpy, of each baseline, and of each contender.
        should_stop: Returns whether to stop early.

    Raises:
        OffloadError: A contender cannot be measured; the message names it.
    """
    gc.collect()
    gc.freeze()  # shortens garbage collections during the measurement
    try:
        for work in plan.works:
            samples = Samples(work)
            with Payload(work.num_rows, work.block_bytes) as payload:
                one_round: list[Callable[[], None]] = [
                    partial(_measure_memcpy, plan, payload, samples),
                    *(partial(_measure_baseline, one, plan, payload, samples) for one in baselines),
                    *(_Turn(one, plan, payload, samples).run for one in contenders),
                ]
                while samples.rounds < plan.rounds and not should_stop():
                    for turn in one_round:
                        if should_stop():
                            break
                        gc.collect()
                        turn()
                        on_turn()
                    else:
                        samples.rounds += 1
            if samples.rounds:
                samples.forget_incomplete_round()
                yield samples
            if samples.rounds < plan.rounds:
                return
    finally:
        gc.unfreeze()


def rehearse(plan: Plan, contenders: Sequence[Contender]) -> None:
    """Store and load one block with each contender, to detect errors before the start.

    Raises:
        OffloadError: A contender cannot be opened or measured.
    """
    block_bytes = plan.works[0].block_bytes
    for contender in contenders:
        samples = Samples(Work(Jobs(1, 1, block_bytes), None))
        with Payload(1, block_bytes) as payload:
            _Turn(contender, replace(plan, steady=False), payload, samples).run()
        name = contender.name
        if samples.failures[name]:
            raise UnfitError(f"{name}: the first block has failed: {samples.failures[name][0]}")
        if samples.wrong_blocks[name]:
            raise UnfitError(f"{name}: the first block was loaded with wrong bytes")


def _measure_memcpy(plan: Plan, payload: Payload, samples: Samples) -> None:
    sample = measure_memcpy(plan, payload, samples.work.many)
    samples.passes[MEMCPY, "copy"].append(sample)


def _measure_baseline(baseline: Baseline, plan: Plan, payload: Payload, samples: Samples) -> None:
    if plan.warm_up:
        baseline.place.warm_up(payload.bytes, samples.work.stored_bytes)
    work = samples.work
    for jobs, suffix in ((work.many, ""), (work.one, ONE_JOB)):
        if jobs is not None:
            for what, sample in baseline.measure(plan, payload, jobs).items():
                samples.passes[baseline.name, f"{what}{suffix}"].append(sample)


@dataclass(slots=True, eq=False)
class _Turn:
    """One contender's measurement, repeated in every round."""

    contender: Contender
    plan: Plan
    payload: Payload
    samples: Samples
    job_ids: Iterator[int] = field(default_factory=partial(count, 1))

    def run(self) -> None:
        """Store and load blocks with a newly opened tier, and compare the loaded blocks."""
        work = self.samples.work
        with self._open() as tier:
            keys = self._store_and_load(tier, work.many, "")
            if work.one is not None:
                self._store_and_load(tier, work.one, ONE_JOB)
            at_rest = time_at_rest(tier, keys)
        self.samples.passes[self.contender.name, "at_rest"].append(at_rest)

    @contextmanager
    def _open(self) -> Iterator[OpenTier]:
        place, stored_bytes = self.contender.place, self.samples.work.stored_bytes
        if place is not None and self.plan.warm_up:
            place.warm_up(self.payload.bytes, stored_bytes)
        with place.new_directory() if place else nullcontext() as directory:
            try:
                tier = self.contender.open(self.payload.view, directory, stored_bytes)
            except OSError as error:
                raise UnfitError(f"{self.contender.name}: cannot be opened: {error}") from error
            with closing(tier):
                if self.plan.steady:
                    self._fill_up(tier, self.samples.work)
                yield tier

    def _fill_up(self, tier: OpenTier, work: Work) -> None:
        capacity_bytes = self.contender.capacity_bytes(work.stored_bytes) or 0
        for _ in range(-(-capacity_bytes // work.many.num_bytes)):
            self._drive(tier, _new_keys(work.many), work.many, is_load=False)

    def _store_and_load(self, tier: OpenTier, jobs: Jobs, suffix: str) -> list[OffloadKey]:
        name, passes = self.contender.name, self.samples.passes
        keys = _new_keys(jobs)
        self.payload.fill()
        passes[name, f"store{suffix}"].append(self._drive(tier, keys, jobs, is_load=False))
        self.payload.wipe()
        passes[name, f"load{suffix}"].append(self._drive(tier, keys, jobs, is_load=True))
        self.samples.wrong_blocks[name] += self.payload.wrong_rows(jobs.num_keys)
        return keys

    def _drive(
        self, tier: OpenTier, keys: Sequence[OffloadKey], jobs: Jobs, *, is_load: bool
    ) -> Sample:
        """Run the jobs of a pass; record the failures."""
        name = self.contender.name
        made = {}
        for first in range(0, jobs.num_keys, jobs.keys_per_job):
            rows = range(first, first + jobs.keys_per_job)
            job_id = next(self.job_ids)
            made[job_id] = tier.make_job(
                job_id, [keys[row] for row in rows], as_block_ids(rows), is_load=is_load
            )
        try:
            sample, failures = drive(
                tier, made, jobs, is_load=is_load, in_flight=self.plan.in_flight
            )
        except UnfitError as error:
            raise UnfitError(f"{name}: {error}") from error
        self.samples.failures[name] += failures
        return sample


def _new_keys(jobs: Jobs) -> list[OffloadKey]:
    return [make_offload_key(os.urandom(_HASH_BYTES)) for _ in range(jobs.num_keys)]
