"""The order of a bench: round after round, first the floors, then every contender.

What disturbs the machine for a while so disturbs all of them alike. In every round a contender
starts with a new store, or goes on with the one it has; empty at first or, where that is asked for
and it has a capacity, full of other blocks; and with keys that nobody has seen.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from kvoffload_async.bench.contender import Contender, OpenTier, UnfitError
from kvoffload_async.bench.drive import PassOutcome, drive, time_at_rest
from kvoffload_async.bench.floor import Floor, measure_memcpy
from kvoffload_async.bench.payload import Payload
from kvoffload_async.bench.plan import Jobs, Plan, Work
from kvoffload_async.bench.sample import Sample
from kvoffload_async.types import OffloadKey, as_block_ids, make_offload_key

MEMCPY: Final = "memcpy"
ONE_JOB: Final = "_one_job"
"""What the name of a pass ends with that is one large job."""
_HASH_BYTES: Final = 32


@dataclass(slots=True)
class Samples:
    """Everything that was measured at one block size.

    Attributes:
        work: What was moved.
        rounds: Rounds that are complete.
        passes: A sample a round, by who was measured and what it did.
        failed_jobs: Jobs that failed, by contender, and `reasons` one of their reasons.
        wrong_blocks: Loaded blocks with wrong bytes, by contender.
        verified_blocks: Loaded blocks that were compared, by contender.
    """

    work: Work
    rounds: int = 0
    passes: defaultdict[tuple[str, str], list[Sample]] = field(
        default_factory=lambda: defaultdict(list)
    )
    failed_jobs: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    reasons: dict[str, str] = field(default_factory=dict)
    wrong_blocks: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    verified_blocks: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def forget_incomplete_round(self) -> None:
        """Leave as many samples of everything as there are complete rounds."""
        for samples in self.passes.values():
            del samples[self.rounds :]


def measure(
    plan: Plan,
    floors: Sequence[Floor],
    contenders: Sequence[Contender],
    *,
    on_turn: Callable[[], None],
    should_stop: Callable[[], bool],
) -> Iterator[Samples]:
    """Yield the samples of one block size after the other; of complete rounds only.

    Those of a block size in whose rounds it is stopped are of the rounds before that, if any.

    Args:
        plan: What to do.
        floors: Where the machine is measured.
        contenders: Who is measured.
        on_turn: Called after each one's turn, `turns` times in all.
        should_stop: Whether to end early.

    Raises:
        OffloadError: Somebody cannot be measured; the message says who.
    """
    gc.collect()
    gc.freeze()  # so that collections between turns are short, and those within hardly any
    try:
        for work in plan.works:
            samples = Samples(work)
            with Payload(work.num_rows, work.block_bytes) as payload, ExitStack() as kept:
                takers = [_Turn(one, plan, payload, samples, kept) for one in contenders]
                while samples.rounds < plan.rounds and not should_stop():
                    for turn in _turns(plan, floors, takers, payload, samples):
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


def turns(plan: Plan, floors: Sequence[Floor], contenders: Sequence[Contender]) -> int:
    """Return how many turns there are in all."""
    return len(plan.works) * plan.rounds * (1 + len(floors) + len(contenders))


def rehearse(plan: Plan, contenders: Sequence[Contender]) -> None:
    """Have everybody store and load one block, so that errors come before it all begins.

    Raises:
        OffloadError: Somebody cannot be opened, or cannot be measured.
    """
    block_bytes = plan.works[0].block_bytes
    for contender in contenders:
        samples = Samples(Work(Jobs(1, 1, block_bytes), None))
        brief = replace(plan, steady=False, keep=False)
        with Payload(1, block_bytes) as payload, ExitStack() as kept:
            _Turn(contender, brief, payload, samples, kept).run()
        name = contender.name
        if samples.reasons:
            raise UnfitError(f"{name}: the first block has failed: {samples.reasons[name]}")
        if samples.wrong_blocks[name]:
            raise UnfitError(f"{name}: the first block came back with other bytes")


def _turns(
    plan: Plan,
    floors: Sequence[Floor],
    takers: Sequence[_Turn],
    payload: Payload,
    samples: Samples,
) -> Iterator[Callable[[], None]]:
    yield partial(_measure_memcpy, plan, payload, samples)
    for floor in floors:
        yield partial(_measure_floor, floor, plan, payload, samples)
    for taker in takers:
        yield taker.run


def _measure_memcpy(plan: Plan, payload: Payload, samples: Samples) -> None:
    sample = measure_memcpy(plan, payload, samples.work.many)
    samples.passes[MEMCPY, "copy"].append(sample)


def _measure_floor(floor: Floor, plan: Plan, payload: Payload, samples: Samples) -> None:
    if plan.warm_up:
        floor.place.warm_up(payload.bytes, samples.work.stored_bytes)
    work = samples.work
    for jobs, suffix in ((work.many, ""), (work.one, ONE_JOB)):
        if jobs is not None:
            for what, sample in floor.measure(plan, payload, jobs).items():
                samples.passes[floor.name, f"{what}{suffix}"].append(sample)


class _Turn:
    """One contender's turn in every round."""

    def __init__(
        self,
        contender: Contender,
        plan: Plan,
        payload: Payload,
        samples: Samples,
        kept: ExitStack,
    ) -> None:
        self._contender = contender
        self._plan = plan
        self._payload = payload
        self._samples = samples
        self._kept = kept
        self._tier: OpenTier | None = None
        self._next_job = 0

    def run(self) -> None:
        """Store and load, and compare what was loaded."""
        if not self._plan.keep:
            with self._open() as tier:
                self._measure(tier)
            return
        if self._tier is None:
            self._tier = self._kept.enter_context(self._open())
        self._measure(self._tier)

    def _measure(self, tier: OpenTier) -> None:
        work, name = self._samples.work, self._contender.name
        keys = self._store_and_load(tier, work.many, "store", "load")
        if work.one is not None:
            self._store_and_load(tier, work.one, f"store{ONE_JOB}", f"load{ONE_JOB}")
        self._samples.passes[name, "at_rest"].append(time_at_rest(tier, keys))

    @contextmanager
    def _open(self) -> Iterator[OpenTier]:
        place = self._contender.place
        if place is not None and self._plan.warm_up:
            place.warm_up(self._payload.bytes, self._samples.work.stored_bytes)
        with place.new_directory() if place else nullcontext() as directory:
            try:
                tier = self._contender.open(
                    self._payload.view, directory, self._samples.work.stored_bytes
                )
            except OSError as error:
                raise UnfitError(f"{self._contender.name}: cannot be opened: {error}") from error
            try:
                if self._plan.steady:
                    self._fill_up(tier, self._samples.work)
                yield tier
            finally:
                tier.close()

    def _fill_up(self, tier: OpenTier, work: Work) -> None:
        capacity_bytes = self._contender.capacity_bytes(work.stored_bytes) or 0
        for _ in range(-(-capacity_bytes // work.many.num_bytes)):
            self._count_failures(self._drive(tier, _new_keys(work.many), work.many, is_load=False))

    def _store_and_load(
        self, tier: OpenTier, jobs: Jobs, store: str, load: str
    ) -> list[OffloadKey]:
        name = self._contender.name
        keys = _new_keys(jobs)
        self._payload.fill()
        self._note(store, self._drive(tier, keys, jobs, is_load=False))
        self._payload.wipe()
        self._note(load, self._drive(tier, keys, jobs, is_load=True))
        self._samples.wrong_blocks[name] += self._payload.wrong_rows(jobs.num_keys)
        self._samples.verified_blocks[name] += jobs.num_keys
        return keys

    def _drive(
        self, tier: OpenTier, keys: Sequence[OffloadKey], jobs: Jobs, *, is_load: bool
    ) -> PassOutcome:
        made = {}
        for first in range(0, jobs.num_keys, jobs.keys_per_job):
            rows = range(first, first + jobs.keys_per_job)
            self._next_job += 1
            made[self._next_job] = tier.make_job(
                self._next_job, [keys[row] for row in rows], as_block_ids(rows), is_load=is_load
            )
        try:
            return drive(tier, made, jobs, is_load=is_load, in_flight=self._plan.in_flight)
        except UnfitError as error:
            raise UnfitError(f"{self._contender.name}: {error}") from error

    def _note(self, what: str, outcome: PassOutcome) -> None:
        self._samples.passes[self._contender.name, what].append(outcome.sample)
        self._count_failures(outcome)

    def _count_failures(self, outcome: PassOutcome) -> None:
        name = self._contender.name
        if outcome.failures:
            self._samples.failed_jobs[name] += len(outcome.failures)
            self._samples.reasons[name] = outcome.failures[0]


def _new_keys(jobs: Jobs) -> list[OffloadKey]:
    return [make_offload_key(os.urandom(_HASH_BYTES)) for _ in range(jobs.num_keys)]
