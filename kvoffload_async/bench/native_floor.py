"""The bare native engine: the threads and the system calls of a tier, checksums too, and no tier.

A job is one batch, as it is in a tier, with at most `in_flight` of them under way. The bytes lie in
as many files as there are threads, extent by extent in turn, since the kernel lets one thread at a
time write into a file; `slab` does the same.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvoffload_async.bench.contender import UnfitError
from kvoffload_async.bench.floor import Floor, Moves
from kvoffload_async.bench.places import EXTENT_BYTES
from kvoffload_async.bench.plan import Jobs, Plan
from kvoffload_async.bench.sample import Sample, of_pass
from kvoffload_async.block_io import Run
from kvoffload_async.block_io.native_io import open_engine

if TYPE_CHECKING:
    from kvoffload_async.bench.payload import Payload
    from kvoffload_async.block_io.native_io import Engine, Memory

STALL_S: Final = 60.0
"""How long a pass may go without the end of a batch."""
_CLOSE_S: Final = 30.0
_PREFIX: Final = b"floor"


class NativeFloor(Floor):
    """A native engine of its own, anew in every measurement."""

    kind: ClassVar[str] = "native"

    @contextmanager
    def _open(self, plan: Plan, payload: Payload, jobs: Jobs) -> Iterator[Moves]:
        size = _extent_blocks(jobs)
        file_bytes = -(-jobs.num_keys // (size * plan.threads)) * size * jobs.block_bytes
        with self._new_files(plan.threads, file_bytes, direct=plan.direct) as files:
            engine = open_engine(plan.threads)
            memory = engine.map(payload.bytes, jobs.block_bytes, jobs.block_bytes)
            try:
                passes = _Passes(engine, memory, jobs, files, plan.in_flight)
                yield {
                    "store": partial(passes.run, is_store=True),
                    "load": partial(passes.run, is_store=False),
                }
            finally:
                memory.release()
                if engine.close(_CLOSE_S):
                    raise UnfitError(f"{self.name}: a thread hangs in a system call")


class _Passes:
    """All jobs as batches of an engine, over and over."""

    def __init__(
        self, engine: Engine, memory: Memory, jobs: Jobs, files: Sequence[int], in_flight: int
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._jobs = jobs
        self._in_flight = in_flight
        size = jobs.keys_per_job
        self._rows = [range(first, first + size) for first in range(0, jobs.num_keys, size)]
        self._runs = [list(runs_of(rows, jobs, files)) for rows in self._rows]
        self._keys = [index.to_bytes(8, "big") for index in range(size)]
        self._digests: dict[int, bytes] = {}
        self._ends = select.poll()
        self._ends.register(engine.fd, select.POLLIN)

    def run(self, *, is_store: bool) -> Sample:
        """Move everything once; what is loaded must have the checksums of what was stored.

        Raises:
            UnfitError: Something failed, or is not what was stored.
        """
        waiting = deque(range(self._jobs.num_jobs))
        begun: dict[int, tuple[int, float]] = {}
        latencies_s: list[float] = []
        cpu_s, start_s = time.process_time(), time.perf_counter()
        while waiting or begun:
            while waiting and len(begun) < self._in_flight:
                job, submit_s = waiting.popleft(), time.perf_counter()
                begun[self._submit(job, is_store=is_store)] = job, submit_s
            if not self._ends.poll(STALL_S * 1000):
                raise UnfitError(f"no native batch has ended for {STALL_S:g} s")
            ended = self._engine.take()
            end_s = time.perf_counter()
            for ticket, outcome in ended:
                job, submit_s = begun.pop(ticket)
                latencies_s.append(end_s - submit_s)
                self._check(job, outcome, is_store=is_store)
        cpu_s = time.process_time() - cpu_s
        return of_pass(self._jobs, wall_s=end_s - start_s, cpu_s=cpu_s, latencies_s=latencies_s)

    def _submit(self, job: int, *, is_store: bool) -> int:
        return self._engine.extents(
            self._memory, is_store, self._rows[job], self._runs[job], self._keys, _PREFIX
        )

    def _check(self, job: int, outcome: Any, *, is_store: bool) -> None:  # noqa: ANN401 - as given
        errors, digests = outcome
        if errors:
            raise UnfitError(f"a native batch has failed: {errors}")
        if is_store:
            self._digests[job] = digests
        elif digests != self._digests[job]:
            raise UnfitError("a native batch returned other bytes than were written")


def runs_of(blocks: range, jobs: Jobs, files: Sequence[int]) -> Iterator[Run]:
    """Yield where blocks lie: extents of all blocks in turn over the files."""
    size = _extent_blocks(jobs)
    at = blocks.start
    while at < blocks.stop:
        extent, skipped = divmod(at, size)
        count = min(blocks.stop - at, size - skipped)
        offset = (extent // len(files) * size + skipped) * jobs.block_bytes
        yield Run(files[extent % len(files)], offset, count)
        at += count


def _extent_blocks(jobs: Jobs) -> int:
    return max(1, EXTENT_BYTES // jobs.block_bytes)
