"""The actor that runs a tier: a bounded queue, one task per job, exactly one result per job.

When the tier's coroutine returns, the job is finished before the loop runs anything else, so that
later announcements of the tier (such as evictions of the job's blocks) are posted after it. All
other jobs are finished by the task's done-callback: a task cancelled before its first step never
runs its body, but still ends its job.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from kvoffload_async.abc.events import (
    BlockFailures,
    CallEnded,
    JobFinished,
    JobOverdue,
    TierOperation,
)
from kvoffload_async.abc.tier import MOST_RENEWALS, AsyncTier, CloseReport
from kvoffload_async.error_log import LogRate
from kvoffload_async.errors import (
    BlockMissingError,
    BusyError,
    CorruptBlockError,
    JobCancelledError,
    JobNotStartedError,
    Remedies,
    RepeatedKeyError,
    SlowDownError,
    TierBusyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    UnknownSlotError,
    drop_tracebacks,
    remedy_of,
    text_of,
)
from kvoffload_async.tables.keymap import LEAST_KEY_BYTES, MAX_KEY_BYTES
from kvoffload_async.tiers._environment import (
    ActorEnvironment,
    Watch,
    error_of,
    guarded,
    log_trace,
    validate_result,
)
from kvoffload_async.tiers._probes import Probes, Reconciler
from kvoffload_async.types import JobId, JobMetadata, OffloadKey

logger = logging.getLogger(__name__)

_EXPECTED = (BlockMissingError, BusyError, TierClosedError)
"""Errors that are not faults of the tier: due to another process, back-pressure or shutdown."""


class JobLog:
    """Logs the ends of jobs: errors at level ERROR, everything else at DEBUG.

    Stores that a full tier refuses, jobs that were not started in time, and those of a server that
    asks for fewer calls are logged once a minute, because there may be many for a long time. An
    overdue job is logged as an error at its deadline, and not again when its copy ends.

    Thread: loop.
    """

    def __init__(self, name: str, remedies: Remedies) -> None:
        """Start without jobs; `name` is the tier's `type`."""
        self._name = name
        self._remedies = remedies
        limited: Sequence[type[TierError]] = (TierFullError, JobNotStartedError, SlowDownError)
        self._limited = {kind: LogRate() for kind in limited}
        self._overdue: set[int] = set()

    def overdue(self, job: JobMetadata, timeout_s: float) -> TierTimeoutError:
        """Log that a running job's deadline has passed; return the error."""
        self._overdue.add(job.job_id)
        error = self.timeout(job, timeout_s)
        logger.error(
            "%s; its copy continues and keeps its slots until it ends%s", error, self._remedy(error)
        )
        return error

    def timeout(self, job: JobMetadata, timeout_s: float) -> TierTimeoutError:
        """Return the error for a job whose deadline has passed."""
        return TierTimeoutError(
            f"tier {self._name}: {described(job)} timed out after {timeout_s} s"
        )

    def ended(
        self,
        job: JobMetadata,
        failures: Mapping[int, TierError],
        error: TierError | None,
        *,
        seconds: float,
        now_s: float,
    ) -> None:
        """Log the end of a job, which no longer accesses memory; drop the frames of its errors."""
        was_overdue = job.job_id in self._overdue
        self._overdue.discard(job.job_id)
        first = error or next(iter(failures.values()), None)
        if first is None:
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("tier %s: %s ended after %.4f s", self._name, described(job), seconds)
            return
        if (refusals := self._limited.get(type(first))) is not None:
            more = refusals.note(now_s)
            is_error = more is not None and not was_overdue
        else:
            more, is_error = "", not was_overdue and not isinstance(first, _EXPECTED)
        if first.__cause__ is not None:
            log_trace(first)
        for raised in (error, *failures.values()):
            drop_tracebacks(raised)
        logger.log(
            logging.ERROR if is_error else logging.DEBUG,
            "tier %s: %s failed after %.4f s: %s%s%s",
            self._name,
            described(job),
            seconds,
            text_of(first),
            more or "",
            self._remedy(first) if is_error else "",
        )

    def _remedy(self, error: TierError) -> str:
        text = remedy_of(error, self._remedies)
        return f" ({text})" if text else ""


def described(job: JobMetadata) -> str:
    """Describe a job in one phrase."""
    what = "load" if job.is_promotion else "store"
    return (
        f"{what} of {len(job.keys)} blocks for request {job.req_context.req_id} (job {job.job_id})"
    )


LISTED_KEYS: Final = 512
"""Maximum number of keys of a call of `list_keys`."""


def _page(
    keys: Collection[OffloadKey], cursor: str | None
) -> tuple[frozenset[OffloadKey], None, str | None]:
    """Return a valid answer of `list_keys`, without keys of a length that no block can have.

    Others who can write to a tier's storage may have put such names there.

    Raises:
        TierUnavailableError: The answer is not valid.
    """
    found = frozenset(keys)
    are_keys = all(isinstance(key, bytes) for key in found) and len(found) <= LISTED_KEYS
    if not (are_keys and isinstance(cursor, str | None)):
        raise TierUnavailableError(
            f"the tier broke its contract: list_keys returned {len(found)} keys and {cursor!r:.99}"
        )
    return (
        frozenset(key for key in found if LEAST_KEY_BYTES <= len(key) <= MAX_KEY_BYTES),
        None,
        cursor,
    )


_NO_WORK = (TierUnavailableError, TierBusyError)
"""Errors of blocks that are no evidence of a working tier: it failed, or never began them."""
_CANCEL_GRACE_S = 0.2
_TIMER_RESOLUTION_S = 0.001
_FAILED_OPEN_CLOSE_S = 5.0


@dataclass(slots=True, eq=False)
class _Side:
    """The jobs of one direction; `TierBounds` limits how many run."""

    name: str
    waiting: dict[JobId, _Run] = field(default_factory=dict)
    running: dict[JobId, _Run] = field(default_factory=dict)
    running_blocks: int = 0
    worked_s: float = -math.inf
    """Loop time at which a job last made progress, or ended and found the tier working."""


@dataclass(slots=True, eq=False)
class _Run:
    """One accepted job; `task` is None while it is queued, `watch` until the tier gets the job."""

    job: JobMetadata
    side: _Side
    accepted_s: float
    """Loop time of acceptance, for deadlines; `arrived_s` and `began_s` use the actor's clock."""
    due_s: float
    """Loop time of the deadline."""
    arrived_s: float
    began_s: float | None = None
    task: asyncio.Task[None] | None = None
    watch: Watch | None = None
    is_finished: bool = False


class TierActor:
    """Runs one tier on one event loop.

    Loads and stores have separate queues and concurrency limits, so that neither starves the other.
    A job still running at its deadline is reported but not cancelled: a copy in flight is orphaned.
    Only `close` cancels, after its own timeout. Progress that the tier reports renews a deadline.

    Thread: loop.
    """

    def __init__(
        self,
        name: str,
        tier: AsyncTier,
        env: ActorEnvironment,
        *,
        io_timeout_s: float,
        probe_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Create the actor; nothing runs before `open`.

        Args:
            name: For task names and log lines.
            tier: The tier; closed by this actor.
            env: The tier's environment; its `post` receives every event, in order.
            io_timeout_s: Seconds from a job's acceptance, or its last progress, to its deadline,
                including time in the queue.
            probe_timeout_s: Seconds until a probe is cancelled and its keys count as absent.
            clock: Monotonic seconds, for durations.
        """
        self.name = name
        self._tier = tier
        self._env = replace(env, renew=self._renew)
        self._post = env.post
        self._io_timeout_s = io_timeout_s
        self._loads = _Side(f"{name}:load")
        self._stores = _Side(f"{name}:store")
        self._due: dict[JobId, _Run] = {}
        """Jobs before their deadline, in the order of the deadlines."""
        self._next_deadline: asyncio.TimerHandle | None = None
        self._reconciler = Reconciler(name, tier, env.announcements, env.post)
        self.probes = Probes(name, tier, env.post, probe_timeout_s, clock)
        """The existence probes of the tier."""
        self._log = JobLog(name, tier.remedies)
        self._calls: dict[asyncio.Task[Any], None] = {}
        """Management calls under way."""
        self._job_end = asyncio.Event()
        """Set when a job ends, for deletions that wait for the jobs on their keys."""
        self._closing = False
        self._closing_tier: asyncio.Task[Exception | None] | None = None
        self._has_cancelled = False
        """Whether jobs still running at the deadline of `close` have been cancelled."""
        self._clock = clock
        # Cached, because `get_running_loop` makes a system call each time.
        self._loop: asyncio.AbstractEventLoop

    @property
    def waiting_jobs(self) -> int:
        """Number of queued jobs. Thread: any."""
        return len(self._loads.waiting) + len(self._stores.waiting)

    @property
    def location(self) -> str:
        """The tier's description, for messages. Thread: any."""
        try:
            return self._tier.describe()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code
            return text_of(error)

    async def open(self) -> None:
        """Open the tier; if that fails, close it and raise the error."""
        self._loop = asyncio.get_running_loop()
        try:
            await guarded(self._tier.open, self._env)
        except GeneratorExit:  # the loop has been closed: nothing can be awaited
            raise
        except BaseException as error:
            await self._close_tier(_FAILED_OPEN_CLOSE_S)
            log_trace(error)
            drop_tracebacks(error)
            raise

    def start_job(self, job: JobMetadata) -> None:
        """Accept a job; it will finish exactly once."""
        side = self._loads if job.is_promotion else self._stores
        now_s = self._loop.time()
        run = _Run(job, side, now_s, now_s + self._io_timeout_s, self._clock())
        try:
            error = self._defect_of(job, side)
            if error is None:
                side.waiting[job.job_id] = self._due[job.job_id] = run
                if self._next_deadline is None:
                    self._await_deadline(run)
                self._start_ready(side)
        except Exception as cause:  # noqa: BLE001 - third-party bounds; the job must end
            side.waiting.pop(job.job_id, None)
            error = TierUnavailableError(f"{self.name} cannot run the job: {text_of(cause)}")
        if error is not None:
            self._end(run, {}, error)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Report a use of blocks to the tier."""
        try:
            self._tier.touch(keys)
        except BaseException as error:  # noqa: BLE001 - the loop and later effects must go on
            log_trace(error)
            drop_tracebacks(error)
            logger.error("%s: touch failed: %s", self.name, text_of(error))  # noqa: TRY400 - no frames

    def call(
        self,
        call_id: int,
        operation: TierOperation,
        keys: Sequence[OffloadKey],
        cursor: str | None = None,
        age_s: float | None = None,
    ) -> None:
        """Call a method of the tier that is no job; posts exactly one `CallEnded`."""
        call = self._call(operation, keys, cursor, age_s)
        task = self._loop.create_task(call, name=f"{self.name}:{operation}")
        self._calls[task] = None
        task.add_done_callback(partial(self._call_ended, call_id, operation))

    async def close(self, timeout_s: float) -> CloseReport:
        """Refuse new jobs, fail queued ones, await running ones, cancel the rest, close the tier.

        Args:
            timeout_s: Seconds for running jobs to end and the tier to close, in total; if the jobs
                use them up, the tier still has a short grace period.

        Returns:
            Unfinished jobs and errors. The tier itself is closed only if no task is left.
        """
        self._closing = True
        self._reconciler.close()
        self.probes.close()
        loop = self._loop
        deadline_s = loop.time() + timeout_s
        for side in (self._loads, self._stores):
            for run in list(side.waiting.values()):
                self._end(run, {}, TierClosedError(f"{self.name} was shut down"))
            side.waiting.clear()
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        late = self._tasks()
        if late:
            self._has_cancelled = True
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=_CANCEL_GRACE_S)
        await asyncio.sleep(0)  # runs the done-callbacks of tasks that have just ended
        unfinished = (*self._loads.running, *self._stores.running)
        if self._tasks():
            error = TierTimeoutError(f"{self.name}: {len(self._tasks())} calls did not end")
            return CloseReport(unfinished, error)
        left_s = max(_CANCEL_GRACE_S, deadline_s - loop.time())
        return CloseReport(unfinished, await self._close_tier(left_s))

    # -- internal -------------------------------------------------------------------------------

    def _tasks(self) -> list[asyncio.Task[Any]]:
        """Return the running tasks: loads, stores, probes, calls, each in order of start."""
        runs = (*self._loads.running.values(), *self._stores.running.values())
        return [
            *(run.task for run in runs if run.task),
            *self.probes.tasks,
            *self._reconciler.tasks,
            *self._calls,
        ]

    async def _call(
        self,
        operation: TierOperation,
        keys: Sequence[OffloadKey],
        cursor: str | None,
        age_s: float | None,
    ) -> tuple[frozenset[OffloadKey], TierError | None, str | None]:
        """Return the blocks that the tier has, or those that are gone and why others are not."""
        if self._closing:
            raise TierClosedError(f"{self.name} is closed")
        try:
            async with asyncio.timeout(self._io_timeout_s):
                if operation == "contains":
                    found = await guarded(self._tier.contains, keys)
                    return frozenset(keys).intersection(found), None, None
                if operation == "list":
                    if age_s is None:
                        return _page(*await guarded(self._tier.list_keys, cursor, LISTED_KEYS))
                    older = self._tier.list_older
                    return _page(*await guarded(older, cursor, LISTED_KEYS, age_s))
                await self._jobs_ended(frozenset(keys))
                answer = await guarded(self._tier.delete, keys)
        except TimeoutError:
            raise TierTimeoutError(
                f"{operation} of {len(keys)} blocks timed out after {self._io_timeout_s} s"
            ) from None
        failures, error = validate_result(answer, len(keys))
        if error is not None:
            raise error
        gone = frozenset(key for i, key in enumerate(keys) if i not in failures)
        self._env.announcements.note(gone)
        return gone, failures[min(failures)] if failures else None, None

    async def _jobs_ended(self, keys: frozenset[OffloadKey]) -> None:
        """Wait until no job on these keys is queued or runs; the owner submits no new ones."""
        while any(
            not keys.isdisjoint(run.job.keys)
            for side in (self._loads, self._stores)
            for run in (*side.running.values(), *side.waiting.values())
        ):
            self._job_end.clear()
            await self._job_end.wait()

    def _call_ended(
        self,
        call_id: int,
        operation: TierOperation,
        task: asyncio.Task[tuple[frozenset[OffloadKey], TierError | None, str | None]],
    ) -> None:
        del self._calls[task]
        keys: frozenset[OffloadKey] = frozenset()
        error: TierError | None
        cursor: str | None = None
        if task.cancelled() or task.exception() is not None:
            error = error_of(task)
        else:
            keys, error, cursor = task.result()
        drop_tracebacks(error)
        if error is not None and not self._closing:
            logger.warning("%s: %s failed: %s", self.name, operation, text_of(error))
        self._post(CallEnded(call_id, operation, keys, cursor, error))

    async def _close_tier(self, timeout_s: float) -> Exception | None:
        """Close the tier; return a failure instead of raising, so that other tiers are closed."""
        task = self._closing_tier  # of a call that was interrupted: a tier is closed once
        if task is None:
            task = self._loop.create_task(self._closed_tier(), name=f"{self.name}:close")
            self._closing_tier = task
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            return TierTimeoutError(f"{self.name} did not close within {timeout_s} s")
        return None if task.cancelled() else task.result()

    async def _closed_tier(self) -> Exception | None:
        try:
            await guarded(self._tier.close)
        except Exception as error:  # noqa: BLE001 - third-party code
            log_trace(error)
            drop_tracebacks(error)  # before logging, because log records may be kept
            logger.warning("%s: closing failed: %s", self.name, text_of(error))
            return error
        return None

    def _defect_of(self, job: JobMetadata, side: _Side) -> TierError | None:
        """Return why a job cannot be accepted, or None."""
        if self._closing:
            return TierClosedError(f"{self.name} is closed")
        if len(set(job.keys)) < len(job.keys):
            return RepeatedKeyError(f"job {job.job_id} names a key twice")
        slots, num_slots = job.block_ids.tolist(), len(self._env.kv_view)
        if slots and (min(slots) < 0 or max(slots) >= num_slots):
            return UnknownSlotError(f"job {job.job_id} names a slot outside of 0..{num_slots - 1}")
        if len(side.waiting) >= self._tier.bounds.queued_jobs:
            return TierBusyError(f"{self.name} has too many jobs queued")
        return None

    def _start_ready(self, side: _Side) -> None:
        waiting, running, bounds = side.waiting, side.running, self._tier.bounds
        limit = bounds.concurrent_loads if side is self._loads else bounds.concurrent_stores
        while waiting:
            job_id, run = next(iter(waiting.items()))
            blocks = side.running_blocks + len(run.job.keys)
            if len(running) >= limit and blocks > bounds.concurrent_blocks:
                break
            del waiting[job_id]
            running[job_id] = run
            side.running_blocks = blocks
            run.began_s = self._clock()
            run.task = self._loop.create_task(self._perform(run), name=f"{side.name}:{job_id}")
            run.task.add_done_callback(partial(self._job_ended, run))

    async def _perform(self, run: _Run) -> None:
        operation = self._tier.load if run.side is self._loads else self._tier.store
        run.watch = self._env.announcements.begin(
            run.job.keys, includes_stores=run.side is self._loads
        )
        failures = await guarded(operation, run.job) if run.job.keys else {}
        self._finish(run, *validate_result(failures, len(run.job.keys)))

    def _job_ended(self, run: _Run, task: asyncio.Task[None]) -> None:
        del run.side.running[run.job.job_id]
        run.side.running_blocks -= len(run.job.keys)
        run.task = None  # a failed task holds its frames, and they hold the run
        self._job_end.set()
        if not run.is_finished:
            error = error_of(task)
            if self._has_cancelled and isinstance(error, JobCancelledError):
                error = TierClosedError(f"{self.name} was shut down before the job had ended")
            self._finish(run, {}, error)
        if run.side.waiting:
            self._start_ready(run.side)

    def _finish(self, run: _Run, failures: BlockFailures, error: TierError | None) -> None:
        run.is_finished = True
        if error is None and (
            len(failures) < len(run.job.keys)
            or not all(isinstance(why, _NO_WORK) for why in failures.values())
        ):
            run.side.worked_s = self._loop.time()
        self._end(run, failures, error, self._outdated(run, failures, error))

    def _outdated(
        self, run: _Run, failures: BlockFailures, error: TierError | None
    ) -> frozenset[OffloadKey]:
        """Return the blocks for which the job's result is outdated; the tier is asked about them.

        A load without failures is never outdated.
        """
        if run.watch is None:
            return frozenset()  # its task was cancelled before the tier got the job
        announcements, keys, is_load = self._env.announcements, run.job.keys, run.job.is_promotion
        outdated = announcements.end(run.watch, looks=bool(failures) or not is_load)
        if is_load:
            outdated = outdated.intersection(keys[index] for index in failures)
            # The tier has dropped corrupt blocks, so the result of a concurrent store is outdated.
            corrupt = [i for i, why in failures.items() if isinstance(why, CorruptBlockError)]
            if corrupt:
                announcements.note([keys[index] for index in corrupt])
        elif error is None:
            stored = keys if not failures else [k for i, k in enumerate(keys) if i not in failures]
            announcements.note_stored(stored)
        if outdated:
            self._reconciler.ask(outdated)
        return outdated

    def _end(
        self,
        run: _Run,
        failures: BlockFailures,
        error: TierError | None,
        outdated: frozenset[OffloadKey] = frozenset(),
    ) -> None:
        """End a job: drop its deadline, and post its result."""
        self._due.pop(run.job.job_id, None)
        if not self._due and self._next_deadline is not None:
            self._next_deadline.cancel()
            self._next_deadline = None
        seconds = self._clock() - run.arrived_s
        queue_s = None if run.began_s is None else run.began_s - run.arrived_s
        self._log.ended(run.job, failures, error, seconds=seconds, now_s=self._loop.time())
        self._post(JobFinished(run.job.job_id, failures, error, seconds, outdated, queue_s))
        self._job_end.set()

    def _await_deadline(self, run: _Run) -> None:
        """Set the timer to the next deadline."""
        self._next_deadline = self._loop.call_at(run.due_s, self._pass_deadlines)

    def _renew(self, job_id: JobId, has_moved: bool) -> float:
        """Renew the deadline of a running job within its bound; return it.

        Every renewal has the same length, so that the jobs stay in the order of the deadlines.
        """
        run = self._due.get(job_id)
        now_s = self._loop.time()
        if run is None:  # its deadline has passed
            return now_s
        if has_moved:
            run.side.worked_s = now_s
        if now_s - run.accepted_s <= (MOST_RENEWALS - 1) * self._io_timeout_s:
            run.due_s = now_s + self._io_timeout_s
            self._due[job_id] = self._due.pop(job_id)
        return run.due_s

    def _pass_deadlines(self) -> None:
        now_s = self._loop.time() + _TIMER_RESOLUTION_S
        self._next_deadline = None
        while self._due:
            job_id, run = next(iter(self._due.items()))
            if run.due_s > now_s:
                self._await_deadline(run)
                return
            del self._due[job_id]
            self._deadline_passed(run)

    def _deadline_passed(self, run: _Run) -> None:
        side, timeout_s = run.side, run.due_s - run.accepted_s
        if side.waiting.pop(run.job.job_id, None) is None:
            self._post(JobOverdue(run.job.job_id, self._log.overdue(run.job, timeout_s)))
            return
        error: TierError = self._log.timeout(run.job, timeout_s)
        if side.worked_s >= run.accepted_s:  # the tier served other jobs meanwhile
            error = JobNotStartedError(f"{error}: not started, as it queued behind other jobs")
        self._end(run, {}, error)
