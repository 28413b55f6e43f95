"""Test environment of a tier: a primary with known bytes, threads, deadlines, comparisons."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.events import BlockFailures, BlocksAppeared, BlocksEvicted, TierEvent
from kvoffload_async.abc.tier import AsyncTier, CloseReport
from kvoffload_async.errors import text_of
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.tiers._environment import ActorEnvironment
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    OffloadKey,
    ReqContext,
    as_block_ids,
    make_offload_key,
)

T = TypeVar("T")

Rows = npt.NDArray[np.uint8]

DEADLINE_S = 30.0
"""Deadline of each wait; only to end a test that hangs, even on a loaded machine."""

_THREADS_END_S = 20.0
"""Seconds in which threads must exit; on a loaded machine a finished thread may take a while."""

GUARD = 0xA5
"""Byte that fills every slot until it is written."""


def key_of(number: int) -> OffloadKey:
    """Return the `number`-th key of a test."""
    return make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest())


def content_of(key: OffloadKey, num_bytes: int) -> Rows:
    """Return the test content of a key: `num_bytes` bytes derived from it."""
    return np.frombuffer(hashlib.shake_128(key).digest(num_bytes), dtype=np.uint8)


def make_job(
    job_id: JobId, keys: Sequence[OffloadKey], slots: Iterable[int], *, is_promotion: bool
) -> JobMetadata:
    """Return a job with a request of its own."""
    return JobMetadata(
        job_id, tuple(keys), as_block_ids(slots), is_promotion, ReqContext(f"r{job_id}")
    )


class _Surroundings:
    """Memory and threads of a test; a context manager that fails if any of them is left."""

    def __init__(self, num_slots: int, slot_bytes: int, timeout_s: float) -> None:
        self.slot_bytes = slot_bytes
        self.timeout_s = timeout_s
        self._next_job_id = 0
        self._threads_before = set(threading.enumerate())
        self.buffer = PrimaryBuffer(num_slots, slot_bytes)
        self.bridge = Bridge(LoopThread())
        self.rows: Rows = np.asarray(self.buffer.view)
        self.rows[:] = GUARD

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.close()
        except AssertionError:
            if error is None:  # otherwise it would hide the original error
                raise

    def fill(self, keys: Sequence[OffloadKey], slots: Iterable[int]) -> None:
        """Write the keys' content into slots."""
        for key, slot in zip(keys, slots, strict=True):
            self.rows[slot] = content_of(key, self.slot_bytes)

    def job(
        self, keys: Sequence[OffloadKey], slots: Iterable[int], *, is_promotion: bool
    ) -> JobMetadata:
        """Return a job with a new id."""
        self._next_job_id += 1
        return make_job(self._next_job_id, keys, slots, is_promotion=is_promotion)

    def store_job(self, keys: Sequence[OffloadKey], slots: Iterable[int]) -> JobMetadata:
        """Write the keys' content into slots and return a store of them."""
        slots = list(slots)
        self.fill(keys, slots)
        return self.job(keys, slots, is_promotion=False)

    def load_job(self, keys: Sequence[OffloadKey], slots: Iterable[int]) -> JobMetadata:
        """Clear slots and return a load into them."""
        slots = list(slots)
        self.rows[slots] = GUARD
        return self.job(keys, slots, is_promotion=True)

    def holds(self, key: OffloadKey, slot: int) -> bool:
        """Return whether a slot contains the key's content."""
        return bool(np.array_equal(self.rows[slot], content_of(key, self.slot_bytes)))

    def is_untouched(self, slot: int) -> bool:
        """Return whether a slot was never written."""
        return bool((self.rows[slot] == GUARD).all())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, within the deadline."""
        return self.bridge.runner.run(coroutine, self.timeout_s)

    def on_loop(self, call: Callable[[], object]) -> None:
        """Run a function on the loop's thread and wait for it."""

        async def perform() -> None:
            call()

        self.run(perform())

    def close(self) -> None:
        """Stop the threads and unmap the memory; raises AssertionError for leftovers."""
        tasks = self.run(_task_names())
        self.bridge.close(self.timeout_s)
        self.rows = np.empty((0, 0), dtype=np.uint8)
        unmapped = self.buffer.release()
        threads = self._threads_left()
        assert not tasks, f"tasks were left on the loop: {tasks}"
        assert not threads, f"threads were left: {threads}"
        assert unmapped, "the primary's buffer is still referenced"

    def _threads_left(self) -> list[str]:
        """Return the names of threads that do not exit within a grace period."""
        deadline_s = time.monotonic() + _THREADS_END_S
        while left := set(threading.enumerate()) - self._threads_before:
            if time.monotonic() >= deadline_s:
                break
            for thread in left:
                if thread.is_alive():  # else it is only being started
                    thread.join(max(0.0, deadline_s - time.monotonic()))
        return sorted(thread.name for thread in left)


async def _task_names() -> list[str]:
    await asyncio.sleep(0)
    return sorted(t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task())


class TierHarness(_Surroundings):
    """A single open tier without a manager; a context manager that closes it.

    Attributes:
        rows: The primary's slots, shape `[num_slots, slot_bytes]`.
        events: Events announced by the tier.
    """

    def __init__(
        self,
        tier: AsyncTier,
        num_slots: int = 16,
        slot_bytes: int = 4096,
        timeout_s: float = DEADLINE_S,
    ) -> None:
        """Open the tier with a new buffer. Closing the harness closes the tier."""
        super().__init__(num_slots, slot_bytes, timeout_s)
        self.tier = tier
        self.events: list[TierEvent] = []
        bounds = tier.bounds
        self._pool = self.bridge.create_pool(
            bounds.concurrent_loads, bounds.concurrent_stores, bounds.concurrent_probes
        )
        self._env = ActorEnvironment(memoryview(self.buffer.view), self._pool, self.events.append)
        try:
            self.run(tier.open(self._env))
        except BaseException:
            self.close()
            raise

    def store(
        self, keys: Sequence[OffloadKey], slots: Iterable[int] | None = None
    ) -> BlockFailures:
        """Write the keys' content into slots (by default the first ones) and store them."""
        job = self.store_job(keys, range(len(keys)) if slots is None else slots)
        return self.run(self.tier.store(job))

    def load(self, keys: Sequence[OffloadKey], slots: Iterable[int] | None = None) -> BlockFailures:
        """Clear slots (by default the first ones) and load keys into them."""
        job = self.load_job(keys, range(len(keys)) if slots is None else slots)
        return self.run(self.tier.load(job))

    def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that the tier contains."""
        return self.run(self.tier.contains(keys))

    def announced(self) -> set[OffloadKey]:
        """Return the blocks announced as present and not as evicted since."""
        keys: set[OffloadKey] = set()
        for event in self.events:
            if isinstance(event, BlocksAppeared):
                keys |= set(event.keys)
            elif isinstance(event, BlocksEvicted):
                keys -= set(event.keys)
        return keys

    def close(self) -> None:
        """Close the tier, its pool and the environment."""
        try:
            self.run(self.tier.close())
        finally:
            self._pool.close(self.timeout_s)
            self._env.kv_view.release()
            super().close()


class ManagerHarness(_Surroundings):
    """A tier behind a `SecondaryTierManager`; counts every job and result. A context manager.

    Attributes:
        manager: The manager.
        submitted: Job id -> number of submissions.
        results: All results, in order.
        released: Orphaned jobs whose copies have ended.
    """

    def __init__(
        self,
        tier: AsyncTier,
        num_slots: int = 64,
        slot_bytes: int = 4096,
        timeout_s: float = DEADLINE_S,
        *,
        io_timeout_s: float = 30.0,
        enable_kv_events: bool = False,
    ) -> None:
        """Open the tier behind a new manager."""
        super().__init__(num_slots, slot_bytes, timeout_s)
        self.submitted: Counter[JobId] = Counter()
        self.results: list[JobResult] = []
        self.released: list[JobId] = []
        try:
            self.manager = SecondaryTierManager(
                None,
                self.buffer.view,
                "tier",
                tier,
                runtime=self.bridge,
                io_timeout_s=io_timeout_s,
                enable_kv_events=enable_kv_events,
            )
        except BaseException:
            super().close()
            raise

    def submit_store(self, keys: Sequence[OffloadKey], slots: Iterable[int]) -> JobMetadata:
        """Write the keys' content into slots and submit a store of them."""
        return self.submit(self.store_job(keys, slots))

    def submit_load(self, keys: Sequence[OffloadKey], slots: Iterable[int]) -> JobMetadata:
        """Clear slots and submit a load into them."""
        return self.submit(self.load_job(keys, slots))

    def submit(self, job: JobMetadata) -> JobMetadata:
        """Submit a job unchanged."""
        submit = self.manager.submit_load if job.is_promotion else self.manager.submit_store
        submit(job)
        self.submitted[job.job_id] += 1
        return job

    def collect(self) -> list[JobResult]:
        """Collect finished and released jobs; return the new results."""
        new = list(self.manager.get_finished_jobs())
        self.results += new
        self.released += self.manager.get_released_jobs()
        return new

    def wait(self, is_done: Callable[[], bool] | None = None) -> None:
        """Collect until `is_done()`, by default until every job has a result."""
        if is_done is None:
            is_done = self._all_reported
        while True:
            self.collect()
            if is_done():
                return
            progress = self.bridge.wait_for_progress(self.timeout_s)
            assert progress, f"no progress within {self.timeout_s} s"

    def wait_released(self, job_ids: set[JobId]) -> None:
        """Collect until the copies of these orphaned jobs have ended."""
        self.wait(lambda: job_ids <= set(self.released))

    def reported(self) -> Counter[JobId]:
        """Return job id -> number of results."""
        return Counter(result.job_id for result in self.results)

    def result_of(self, job: JobMetadata) -> JobResult:
        """Return the job's only result."""
        (result,) = [result for result in self.results if result.job_id == job.job_id]
        return result

    def shutdown(self) -> CloseReport:
        """Shut the manager down and collect the remaining results."""
        report = self.manager.shutdown(self.timeout_s)
        self.collect()
        return report

    def close(self) -> None:
        """Shut the manager down; raises AssertionError unless each job has exactly one result."""
        self.shutdown()
        super().close()
        assert self.reported() == self.submitted, "not every job has exactly one result"

    def _all_reported(self) -> bool:
        return len(self.results) >= self.submitted.total()


_NUM_NAMES: Final = 64
_NAMES: Final = {key_of(number): f"K[{number}]" for number in range(_NUM_NAMES)}

P = ParamSpec("P")


def promise(text: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Add a sentence of the contract to every failure of a test, the tier's own errors included."""

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                error.add_note(f"The contract of AsyncTier promises: {text}")
                raise

        return run

    return decorate


def expect(what: str, got: object, expected: object) -> None:
    """Check that two values are equal.

    Raises:
        AssertionError: They differ; the text names both, and keys by number.
    """
    if got != expected:
        raise AssertionError(f"{what}: expected {_shown(expected)}, got {_shown(got)}")


def expect_failures(
    what: str, failures: Mapping[int, Exception], expected: Mapping[int, type[Exception]]
) -> None:
    """Check the failures of a job, by position, against the expected error classes.

    Raises:
        AssertionError: A block failed that should not have, or another way, or did not fail.
    """
    wrong = failures.keys() ^ expected.keys()
    wrong |= {i for i in failures.keys() & expected if not isinstance(failures[i], expected[i])}
    if wrong:
        names = {position: kind.__name__ for position, kind in expected.items()}
        wanted = f"the failures {names}, by position in the job" if names else "no failure"
        raise AssertionError(f"{what}: expected {wanted}, got {_shown(failures)}")


def expect_rows(what: str, memory: _Surroundings, expected: Mapping[int, OffloadKey]) -> None:
    """Check that slots have the content of the expected keys.

    Raises:
        AssertionError: A slot holds other bytes; the text says where they begin to differ.
    """
    for slot, key in expected.items():
        # Copied, because the frames of an error must hold no part of the primary's buffer.
        row, content = memory.rows[slot].copy(), content_of(key, memory.slot_bytes)
        if np.array_equal(row, content):
            continue
        at = int(np.flatnonzero(row != content)[0])
        got = "untouched bytes" if (row == GUARD).all() else f"{row[at]} in byte {at}"
        raise AssertionError(
            f"{what}: expected in slot {slot} the content of block {_shown(key)}, which has "
            f"{content[at]} in byte {at}, got {got}"
        )


def expect_untouched(what: str, memory: _Surroundings, slots: Collection[int]) -> None:
    """Check that slots were never written.

    Raises:
        AssertionError: One was.
    """
    touched = [slot for slot in slots if not memory.is_untouched(slot)]
    if touched:
        raise AssertionError(f"{what}: expected no other slot to be written, got slots {touched}")


def _shown(value: Any) -> str:  # noqa: ANN401 - any value of a test
    match value:
        case bytes():
            text = _NAMES.get(OffloadKey(value), value.hex())
        case BaseException():
            text = f"{type(value).__name__}({text_of(value)!r})"
        case type():
            text = value.__name__
        case Mapping():
            text = "{" + ", ".join(f"{_shown(k)}: {_shown(v)}" for k, v in value.items()) + "}"
        case set() | frozenset():
            text = "{" + ", ".join(sorted(map(_shown, value))) + "}"
        case list() | tuple():
            text = "[" + ", ".join(map(_shown, value)) + "]"
        case _:
            text = str(value)
    return text
