"""Baselines: the raw speed of copying, writing and reading the same bytes.

A tier has two baselines, and a third one on full stores. The plain baseline uses `pwritev` and
`preadv` in a few large calls on several Python threads: extents of about `EXTENT_BYTES` in one
file. Files are preallocated anew for every measurement.

The native baseline uses the native engine alone: a tier's threads, system calls and checksums, but
no tier. A job is one batch, as in a tier, with at most `in_flight` batches in flight. Extents are
striped over as many files as there are threads, because the kernel serialises writes to one file;
`slab` does the same.

The recycling baseline has one file per block, as `fs` has. It makes the system calls that storing a
block in the place of an evicted one takes, on several Python threads, without checksums.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from kvoffload_async.bench.contender import EXTENT_BYTES, Place, UnfitError
from kvoffload_async.bench.plan import Jobs, Plan, Sample, of_pass
from kvoffload_async.block_io.contract import Run
from kvoffload_async.errors import InputError
from kvoffload_async.runtime.buffer import PrimaryBuffer

if TYPE_CHECKING:
    from kvoffload_async.block_io.native_io import Engine, Memory


Bytes = npt.NDArray[np.uint8]


class Payload:
    """Rows like those of a primary, and a reference copy of their content; a context manager.

    Attributes:
        view: The rows, shape `[num_rows, row_bytes]`, as passed to a tier.
        bytes: The rows in one dimension; `flat` is the same as an array.
        truth: The expected content of all rows, consecutively: random, to defeat compression and
            deduplication.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        """Allocate the rows and the reference copy.

        Raises:
            ConfigError: There is not enough memory.
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
        self.flat = self.truth = nothing  # release the references to the memory
        self.bytes.release()
        for buffer in self._buffers:
            buffer.release()

    def fill(self) -> None:
        """Copy the expected content into the rows."""
        np.copyto(self.flat, self.truth)

    def wipe(self) -> None:
        """Clear the rows, so that only loaded bytes can match."""
        self.flat.fill(0)

    def wrong_rows(self, num_rows: int) -> int:
        """Return how many of the first `num_rows` rows differ from the expected content."""
        size = self._row_bytes
        return sum(
            not np.array_equal(self.flat[start : start + size], self.truth[start : start + size])
            for start in range(0, num_rows * size, size)
        )


_START_S = 30.0

Moves = Mapping[str, Callable[[], Sample]]
"""Functions that store and load all rows once, by pass name."""


class Baseline(ABC):
    """A measurement of raw I/O, which writes and reads the rows of one payload.

    Attributes:
        kind: Kind of baseline.
        directory: Directory of its files.
        name: Key of its samples.
        place: Place of the directory.
    """

    kind: ClassVar[str]

    def __init__(self, place: Place) -> None:
        """Create a baseline that writes in the directory `place`."""
        self.place = place
        self.directory = str(place.path)
        self.name = f"{self.kind} {self.directory}"

    def measure(self, plan: Plan, payload: Payload, jobs: Jobs) -> dict[str, Sample]:
        """Return samples of storing and loading; afterwards the rows have the expected content.

        Raises:
            InputError: The place has no space, or does not support the requested I/O.
            UnfitError: Fewer bytes than expected were moved, or wrong ones.
        """
        samples: dict[str, Sample] = {}
        try:
            with self._open(plan, payload, jobs) as moves:
                payload.fill()
                if plan.steady:  # in the steady state a full tier overwrites its files
                    moves["store"]()
                samples["store"] = moves["store"]()
                payload.wipe()
                samples["load"] = moves["load"]()
        except OSError as error:
            raise InputError(
                f"{self.directory}: the baseline cannot be measured here ({error.strerror}); name "
                "another directory"
            ) from error
        if payload.wrong_rows(jobs.num_keys):
            raise UnfitError(f"{self.name}: returned other bytes than were written to it")
        return samples

    @abstractmethod
    def _open(self, plan: Plan, payload: Payload, jobs: Jobs) -> AbstractContextManager[Moves]:
        """Open new files; yield the functions that store and load the rows."""

    @contextmanager
    def _new_files(self, count: int, size_bytes: int) -> Iterator[list[int]]:
        """Create `count` files of `size_bytes` each; yield their descriptors."""
        with self.place.new_directory() as directory, ExitStack() as stack:
            files = []
            for number in range(count):
                path = Path(directory, f"baseline-{number}")
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                stack.callback(os.close, file)
                os.posix_fallocate(file, 0, size_bytes)
                files.append(file)
            yield files


class PlainBaseline(Baseline):
    """Baseline: system calls from Python threads, without checksums."""

    kind: ClassVar[str] = "plain"

    @contextmanager
    def _open(self, plan: Plan, payload: Payload, jobs: Jobs) -> Iterator[Moves]:
        content, starts = payload.bytes[: jobs.num_bytes], extents(jobs)
        with self._new_files(1, jobs.num_bytes) as (file,):

            def move(call: Callable[..., int], start: int) -> None:
                extent = content[start : start + starts.step]
                _check(call(file, [extent], start), extent)

            yield {
                "store": partial(_timed, partial(move, os.pwritev), starts, plan, jobs),
                "load": partial(_timed, partial(move, os.preadv), starts, plan, jobs),
            }


def measure_memcpy(plan: Plan, payload: Payload, jobs: Jobs) -> Sample:
    """Return a sample of copying the rows' bytes within memory."""
    starts = extents(jobs)

    def copy(start: int) -> None:
        end = min(start + starts.step, jobs.num_bytes)
        np.copyto(payload.flat[start:end], payload.truth[start:end])

    return _timed(copy, starts, plan, jobs)


def extents(jobs: Jobs) -> range:
    """Return the offset of every extent: whole blocks, joined up to `EXTENT_BYTES`."""
    return range(0, jobs.num_bytes, _extent_blocks(jobs) * jobs.block_bytes)


def _extent_blocks(jobs: Jobs) -> int:
    return max(1, EXTENT_BYTES // jobs.block_bytes)


def _check(moved_bytes: int, extent: memoryview) -> None:
    if moved_bytes != extent.nbytes:
        raise UnfitError(f"a plain call moved {moved_bytes} of {extent.nbytes} bytes")


def _timed(call: Callable[[int], None], starts: range, plan: Plan, jobs: Jobs) -> Sample:
    """Run a call for each extent, on threads, and measure the time after the threads' start."""
    waiting = deque(starts)
    ended_s: dict[int, float] = {}
    gate = threading.Barrier(plan.threads + 1)

    def serve() -> None:
        gate.wait(_START_S)
        while True:
            try:
                start = waiting.popleft()
            except IndexError:
                return
            call(start)
            ended_s[start] = time.perf_counter()

    with ThreadPoolExecutor(plan.threads, "kvoffload-bench-baseline") as pool:
        tasks = [pool.submit(serve) for _ in range(plan.threads)]
        gate.wait(_START_S)
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        for task in tasks:
            task.result()
        wall_s, cpu_s = max(ended_s.values()) - begun_s, time.process_time() - cpu_s
    job_ends_s = _job_ends(jobs, starts, [ended_s[start] - begun_s for start in starts])
    latencies_s = _latencies(job_ends_s, plan.in_flight)
    return of_pass(jobs, wall_s=wall_s, cpu_s=cpu_s, latencies_s=latencies_s)


def _job_ends(jobs: Jobs, starts: range, ended_s: list[float]) -> list[float]:
    """Return the end time of each job's last extent; an extent may belong to several jobs."""
    job_bytes = jobs.keys_per_job * jobs.block_bytes
    return [
        max(ended_s[first // starts.step : (first + job_bytes - 1) // starts.step + 1])
        for first in range(0, jobs.num_bytes, job_bytes)
    ]


def _latencies(job_ends_s: list[float], in_flight: int) -> list[float]:
    """Return each job's latency, as if the job had been submitted when an earlier job ended.

    A tier's pass behaves like that: at most `in_flight` jobs are in flight.
    """
    starts_s = [0.0] * in_flight + sorted(job_ends_s)
    return [end_s - start_s for start_s, end_s in zip(starts_s, job_ends_s, strict=False)]


_FOLDERS: Final = 256
_ATTRIBUTE: Final = "user.kvoffload.bench"
_VALUES: Final = (b"0" * 17, b"1" * 17)


class RecyclingBaseline(Baseline):
    """Baseline: system calls from Python threads that overwrite and rename existing files."""

    kind: ClassVar[str] = "recycling"

    @contextmanager
    def _open(self, plan: Plan, payload: Payload, jobs: Jobs) -> Iterator[Moves]:
        with self.place.new_directory() as directory, ExitStack() as stack:
            files = _Files(directory, payload.bytes, jobs.block_bytes, stack)
            starts = range(0, jobs.num_bytes, jobs.block_bytes)
            for start in starts:
                files.create(start)
            yield {
                "store": partial(_timed, files.recycle, starts, plan, jobs),
                "load": partial(_timed, files.read, starts, plan, jobs),
            }


class _Files:
    """Files of blocks in `_FOLDERS` folders, each file with an extended attribute."""

    def __init__(
        self, directory: str, content: memoryview, block_bytes: int, stack: ExitStack
    ) -> None:
        """Create the folders; `stack` closes their descriptors."""
        self._content = content
        self._block_bytes = block_bytes
        self._names: dict[int, tuple[int, str]] = {}
        self._folders = []
        for number in range(_FOLDERS):
            path = Path(directory, f"{number:02x}")
            path.mkdir()
            self._folders.append(os.open(path, os.O_PATH | os.O_DIRECTORY))
            stack.callback(os.close, self._folders[-1])

    def create(self, start: int) -> None:
        """Create the file of the block at an offset in the rows."""
        folder, name = self._names[start] = self._new_name()
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        self._fill(file, start, _VALUES[0])

    def recycle(self, start: int) -> None:
        """Store a block under a new name, by overwriting and renaming its present file."""
        old_folder, old_name = self._names[start]
        folder, name = self._names[start] = self._new_name()
        temp = f"{name}.tmp"
        os.rename(old_name, temp, src_dir_fd=old_folder, dst_dir_fd=folder)
        with suppress(FileNotFoundError):
            os.stat("unverified", dir_fd=self._folders[0])
            raise UnfitError(f"{name}: a file that does not exist was found")
        file = os.open(temp, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
        if os.fstat(file).st_nlink != 1 or os.getxattr(file, _ATTRIBUTE) not in _VALUES:
            raise UnfitError(f"{name}: the file is another one than was written")
        self._fill(file, start, _VALUES[1])
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)

    def read(self, start: int) -> None:
        """Read a block into its row."""
        folder, name = self._names[start]
        row = self._content[start : start + self._block_bytes]
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            os.getxattr(file, _ATTRIBUTE)
            _check(os.preadv(file, [row], 0), row)
        finally:
            os.close(file)

    def _fill(self, file: int, start: int, value: bytes) -> None:
        row = self._content[start : start + self._block_bytes]
        try:
            _check(os.pwritev(file, [row], 0), row)
            os.setxattr(file, _ATTRIBUTE, value)
        finally:
            os.close(file)

    def _new_name(self) -> tuple[int, str]:
        key = os.urandom(32)
        return self._folders[key[0]], f"{key.hex()}_g0.bin"


STALL_S: Final = 60.0
"""Seconds without an ended batch or job after which a pass hangs; exceeds tiers' deadlines."""
_CLOSE_S: Final = 30.0
_PREFIX: Final = b"baseline"


class NativeBaseline(Baseline):
    """Baseline: a native I/O engine of its own, created for each measurement."""

    kind: ClassVar[str] = "native"

    @contextmanager
    def _open(self, plan: Plan, payload: Payload, jobs: Jobs) -> Iterator[Moves]:
        from kvoffload_async.block_io.native_io import open_engine  # noqa: PLC0415 - may be missing

        size = _extent_blocks(jobs)
        file_bytes = -(-jobs.num_keys // (size * plan.threads)) * size * jobs.block_bytes
        with self._new_files(plan.threads, file_bytes) as files:
            engine = open_engine(plan.threads)
            memory = engine.map(payload.bytes, jobs.block_bytes, jobs.block_bytes)
            try:
                move = partial(_move_batches, engine, memory, jobs, files, plan.in_flight)
                yield {
                    "store": partial(move, is_store=True),
                    "load": partial(move, is_store=False),
                }
            finally:
                memory.release()
                if engine.close(_CLOSE_S):
                    raise UnfitError(f"{self.name}: a thread hangs in a system call")


def _move_batches(
    engine: Engine,
    memory: Memory,
    jobs: Jobs,
    files: Sequence[int],
    in_flight: int,
    *,
    is_store: bool,
) -> Sample:
    """Run each job once, as a batch of a native engine; raises UnfitError if a batch fails."""
    size = jobs.keys_per_job
    keys = [index.to_bytes(8, "big") for index in range(size)]
    batches = [range(first, first + size) for first in range(0, jobs.num_keys, size)]
    waiting = deque((rows, list(runs_of(rows, jobs, files))) for rows in batches)
    begun_s: dict[int, float] = {}
    latencies_s: list[float] = []
    ends = select.poll()
    ends.register(engine.fd, select.POLLIN)
    cpu_s, start_s = time.process_time(), time.perf_counter()
    while waiting or begun_s:
        while waiting and len(begun_s) < in_flight:
            (rows, runs), submit_s = waiting.popleft(), time.perf_counter()
            begun_s[engine.extents(memory, is_store, rows, runs, keys, _PREFIX)] = submit_s
        if not ends.poll(STALL_S * 1000):
            raise UnfitError(f"no native batch has ended for {STALL_S:g} s")
        ended = engine.take()
        end_s = time.perf_counter()
        for ticket, (errors, _digests) in ended:
            if errors:
                raise UnfitError(f"a native batch has failed: {errors}")
            latencies_s.append(end_s - begun_s.pop(ticket))
    cpu_s = time.process_time() - cpu_s
    return of_pass(jobs, wall_s=end_s - start_s, cpu_s=cpu_s, latencies_s=latencies_s)


def runs_of(blocks: range, jobs: Jobs, files: Sequence[int]) -> Iterator[Run]:
    """Yield the locations of blocks in the files, over which extents are striped."""
    size = _extent_blocks(jobs)
    at = blocks.start
    while at < blocks.stop:
        extent, skipped = divmod(at, size)
        count = min(blocks.stop - at, size - skipped)
        offset = (extent // len(files) * size + skipped) * jobs.block_bytes
        yield Run(files[extent % len(files)], offset, count)
        at += count
