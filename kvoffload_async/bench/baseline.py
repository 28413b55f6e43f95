"""What the machine itself can do: the same bytes copied, written and read, and nothing else.

A tier has two baselines. The plain one is `pwritev` and `preadv` in few large calls, by several
Python threads: extents of about `EXTENT_BYTES`, written into and read from one file. Files are
preallocated anew for every measurement.

The native baseline is the bare native engine: the threads and the system calls of a tier, checksums
too, and no tier. A job is one batch, as it is in a tier, with at most `in_flight` of them under
way. The bytes lie in as many files as there are threads, extent by extent in turn, since the kernel
lets one thread at a time write into a file; `slab` does the same.
"""

from __future__ import annotations

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from kvoffload_async.bench.contender import EXTENT_BYTES, Place, UnfitError
from kvoffload_async.bench.plan import Jobs, Plan, Sample, of_pass
from kvoffload_async.block_io.contract import Run
from kvoffload_async.block_io.native_io import open_engine
from kvoffload_async.errors import InputError
from kvoffload_async.runtime.buffer import PrimaryBuffer

if TYPE_CHECKING:
    from kvoffload_async.block_io.native_io import Engine, Memory


Bytes = npt.NDArray[np.uint8]


class Payload:
    """Rows as a primary tier has them, beside a copy that nobody writes; a context manager.

    Attributes:
        view: The rows, shape `[num_rows, row_bytes]`, as a tier gets them.
        bytes: The same in one dimension, and `flat` as an array.
        truth: What stored rows hold and loaded ones must hold, as bytes in a row: random, so that
            neither compression nor deduplication helps.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        """Make both.

        Raises:
            ConfigError: The system does not give that much memory.
        """
        self._row_bytes = row_bytes
        self._buffers = [PrimaryBuffer(num_rows, row_bytes) for _ in range(2)]
        work, truth = self._buffers
        self.view: memoryview = work.view
        self.bytes = self.view.cast("B")
        self.flat: Bytes = np.asarray(self.bytes)
        self.truth: Bytes = np.asarray(truth.view).reshape(-1)
        words = self.truth.view(np.uint64)
        words[:] = np.random.default_rng().integers(2**64, size=words.size, dtype=np.uint64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        nothing: Any = np.empty(0, dtype=np.uint8)
        self.flat = self.truth = nothing  # they would keep the memory
        self.bytes.release()
        for buffer in self._buffers:
            buffer.release()

    def fill(self) -> None:
        """Put into the rows what is to be stored."""
        np.copyto(self.flat, self.truth)

    def wipe(self) -> None:
        """Empty the rows, so that only what is loaded can be right."""
        self.flat.fill(0)

    def wrong_rows(self, num_rows: int) -> int:
        """Return how many of the first rows do not hold what they must."""
        size = self._row_bytes
        return sum(
            not np.array_equal(self.flat[start : start + size], self.truth[start : start + size])
            for start in range(0, num_rows * size, size)
        )


_START_S = 30.0

Moves = Mapping[str, Callable[[], Sample]]
"""What stores and loads all rows, by the name of the pass."""


class Baseline(ABC):
    """Writes and reads the rows of one payload.

    Attributes:
        kind: Which one it is.
        directory: The one that it writes in.
        name: What its samples are kept under.
        place: Where the directory is.
    """

    kind: ClassVar[str]

    def __init__(self, place: Place) -> None:
        """Measure in a place."""
        self.place = place
        self.directory = str(place.path)
        self.name = f"{self.kind} {self.directory}"

    def measure(self, plan: Plan, payload: Payload, jobs: Jobs) -> dict[str, Sample]:
        """Return a sample each of storing and loading; the payload's rows are right afterwards.

        Raises:
            InputError: The place has no room, or cannot do what is asked.
            UnfitError: It moves fewer bytes than it should, or other ones.
        """
        samples: dict[str, Sample] = {}
        with self._as_unusable(), self._open(plan, payload, jobs) as moves:
            payload.fill()
            if plan.steady:  # what is full writes over what it has written before
                moves["store"]()
            samples["store"] = moves["store"]()
            payload.wipe()
            samples["load"] = moves["load"]()
        if payload.wrong_rows(jobs.num_keys):
            raise UnfitError(f"{self.name}: returned other bytes than were written to it")
        return samples

    @abstractmethod
    def _open(self, plan: Plan, payload: Payload, jobs: Jobs) -> AbstractContextManager[Moves]:
        """Open new files, and what moves bytes to and from them."""

    @contextmanager
    def _new_files(self, count: int, size_bytes: int, *, direct: bool) -> Iterator[list[int]]:
        """Open so many files of that size each."""
        with self.place.new_directory() as directory, ExitStack() as stack:
            files = []
            flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
            for number in range(count):
                file = os.open(Path(directory, f"baseline-{number}"), flags, 0o600)
                stack.callback(os.close, file)
                os.posix_fallocate(file, 0, size_bytes)
                files.append(file)
            yield files

    @contextmanager
    def _as_unusable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self.directory}: the baseline cannot be measured here ({error.strerror}); name "
                "another directory"
            ) from error


class PlainBaseline(Baseline):
    """Plain system calls in Python threads, without checksums."""

    kind: ClassVar[str] = "plain"

    @contextmanager
    def _open(self, plan: Plan, payload: Payload, jobs: Jobs) -> Iterator[Moves]:
        extents = _extents(payload.bytes, jobs)
        with self._new_files(1, jobs.num_bytes, direct=plan.direct) as (file,):

            def write(start: int) -> None:
                _check(os.pwritev(file, [extents[start]], start), extents[start])

            def read(start: int) -> None:
                _check(os.preadv(file, [extents[start]], start), extents[start])

            def moved_by(call: Callable[[int], None]) -> Callable[[], Sample]:
                return lambda: _timed(call, list(extents), plan.threads, jobs, plan.in_flight)

            yield {"store": moved_by(write), "load": moved_by(read)}


def measure_memcpy(plan: Plan, payload: Payload, jobs: Jobs) -> Sample:
    """Return a sample of copying the bytes from memory to memory."""
    extents = {
        start: (payload.flat[start : start + size], payload.truth[start : start + size])
        for start, size in _cuts(jobs)
    }

    def copy(start: int) -> None:
        np.copyto(*extents[start])

    return _timed(copy, list(extents), plan.threads, jobs, plan.in_flight)


def _cuts(jobs: Jobs) -> list[tuple[int, int]]:
    """Return start and size of every extent: whole blocks, joined up to `EXTENT_BYTES`."""
    size = max(1, EXTENT_BYTES // jobs.block_bytes) * jobs.block_bytes
    return [(start, min(size, jobs.num_bytes - start)) for start in range(0, jobs.num_bytes, size)]


def _extents(flat: memoryview, jobs: Jobs) -> dict[int, memoryview]:
    return {start: flat[start : start + size] for start, size in _cuts(jobs)}


def _check(moved_bytes: int, extent: memoryview) -> None:
    if moved_bytes != extent.nbytes:
        raise UnfitError(f"a plain call moved {moved_bytes} of {extent.nbytes} bytes")


def _timed(
    call: Callable[[int], None], starts: Sequence[int], threads: int, jobs: Jobs, in_flight: int
) -> Sample:
    """Run the calls on threads that are all there before the clock starts."""
    waiting = deque(starts)
    ended_s: dict[int, float] = {}
    gate = threading.Barrier(threads + 1)

    def serve() -> None:
        gate.wait(_START_S)
        while True:
            try:
                start = waiting.popleft()
            except IndexError:
                return
            call(start)
            ended_s[start] = time.perf_counter()

    with ThreadPoolExecutor(threads, "kvoffload-bench-baseline") as pool:
        tasks = [pool.submit(serve) for _ in range(threads)]
        gate.wait(_START_S)
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        for task in tasks:
            task.result()
        wall_s, cpu_s = max(ended_s.values()) - begun_s, time.process_time() - cpu_s
    job_ends_s = _job_ends(jobs, {start: ended - begun_s for start, ended in ended_s.items()})
    latencies_s = _latencies(job_ends_s, in_flight)
    return of_pass(jobs, wall_s=wall_s, cpu_s=cpu_s, latencies_s=latencies_s)


def _job_ends(jobs: Jobs, ended_s: dict[int, float]) -> list[float]:
    """Return when each job's last extent ended; an extent may belong to several jobs."""
    starts = sorted(ended_s)
    ends = [ended_s[start] for start in starts]
    extent_bytes = starts[1] - starts[0] if len(starts) > 1 else jobs.num_bytes
    job_bytes = jobs.keys_per_job * jobs.block_bytes
    return [
        max(ends[first // extent_bytes : (first + job_bytes - 1) // extent_bytes + 1])
        for first in range(0, jobs.num_bytes, job_bytes)
    ]


def _latencies(job_ends_s: list[float], in_flight: int) -> list[float]:
    """Return how long each job took, had it been submitted when one before it ended.

    That is what a pass of a tier does: at most `in_flight` jobs are under way.
    """
    freed_s = sorted(job_ends_s)
    return [
        ended_s - (freed_s[i - in_flight] if i >= in_flight else 0.0)
        for i, ended_s in enumerate(job_ends_s)
    ]


STALL_S: Final = 60.0
"""How long a pass may go without the end of a batch."""
_CLOSE_S: Final = 30.0
_PREFIX: Final = b"baseline"


class NativeBaseline(Baseline):
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
