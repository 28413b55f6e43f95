"""What the machine itself can do: the same bytes copied, written and read, and nothing else.

There are two floors beneath a tier. The plain one is `pwritev` and `preadv` in few large calls, by
several Python threads: extents of about `EXTENT_BYTES`, written into and read from one file. The
native one is in `native_floor`. Files are preallocated anew for every measurement.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvoffload_async.bench.contender import UnfitError
from kvoffload_async.bench.payload import Payload
from kvoffload_async.bench.places import EXTENT_BYTES, Place
from kvoffload_async.bench.plan import Jobs, Plan
from kvoffload_async.bench.sample import Sample, of_pass
from kvoffload_async.errors import InputError

_START_S = 30.0

Moves = Mapping[str, Callable[[], Sample]]
"""What stores and loads all rows, by the name of the pass."""


class Floor(ABC):
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
                file = os.open(Path(directory, f"floor-{number}"), flags, 0o600)
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
                f"{self.directory}: the floor cannot be measured here ({error.strerror}); name "
                "another directory"
            ) from error


class PlainFloor(Floor):
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

    with ThreadPoolExecutor(threads, "kvoffload-bench-floor") as pool:
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
