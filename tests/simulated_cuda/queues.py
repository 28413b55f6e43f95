"""The queues of a simulated device: which operation runs next, and which call fails."""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

_HELD_S = 60.0
"""Seconds that a call waits for a `Hold` before it fails."""
_STEP_MS = 0.001


class CudaError(RuntimeError):
    """An error of the simulated device."""


class Progress(enum.Enum):
    """When queued operations run."""

    DEMANDED = "demanded"
    """Only those that somebody waits for, and as late as possible."""
    RANDOM = "random"
    """Some after each launch; a wait also runs operations that it does not need."""
    EAGER = "eager"
    """All that can, after each launch."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which queued operations run.

    Attributes:
        progress: When they run.
        choices: Numbers that decide which of several streams goes on, and how far; repeated.
    """

    progress: Progress = Progress.DEMANDED
    choices: Sequence[int] = (0,)


@dataclass(slots=True, eq=False)
class StreamQueue:
    """The operations of a stream.

    Attributes:
        name: Number of the stream, in order of creation.
        launched: Number of operations launched.
        done: Number of operations that have run.
        operations: The others.
    """

    name: int
    launched: int = 0
    done: int = 0
    operations: deque[Operation] = field(default_factory=deque)

    @property
    def can_go_on(self) -> bool:
        """Whether its next operation may run."""
        return bool(self.operations) and self.operations[0].is_ready


class Point(NamedTuple):
    """A position in a stream: reached when so many of its operations have run."""

    queue: StreamQueue
    position: int

    @property
    def is_reached(self) -> bool:
        """Whether the device has run all operations before it."""
        return self.queue.done >= self.position


@dataclass(slots=True, eq=False)
class Operation:
    """A queued operation.

    Attributes:
        name: Its name, for messages.
        steps: The steps left.
        after: The point that a wait for an event waits for.
        hold: The hold that must be released first.
        on_end: Called when it has run.
    """

    name: str
    steps: deque[Callable[[], object]] = field(default_factory=deque)
    after: Point | None = None
    hold: Hold | None = None
    on_end: Callable[[], None] = lambda: None

    @property
    def is_ready(self) -> bool:
        """Whether it may run, as the first of its stream."""
        if self.hold is not None:
            return self.hold.is_released
        return self.after is None or self.after.is_reached


class Hold:
    """Keeps a stream from going on, as a long kernel would.

    Attributes:
        is_released: Whether the stream goes on.
    """

    def __init__(self, changed: threading.Condition) -> None:
        """Use `SimulatedCuda.hold`."""
        self._changed = changed
        self.is_released = False

    def release(self) -> None:
        """Let the stream go on. Thread: any."""
        with self._changed:
            self.is_released = True
            self._changed.notify_all()


@dataclass(slots=True)
class Fault:
    """An armed error: of which call, counted from now, and whether it stays and comes late."""

    call: str | None
    left: int
    error: Exception
    is_sticky: bool
    is_performed: bool


class Queues:
    """The streams of a device. Thread: any.

    Attributes:
        changed: Guards the device; notified when an operation has run.
        counts: See `SimulatedCuda`.
        now_ms: See `SimulatedCuda`.
        failure: Why all calls fail; None if they do not.
    """

    def __init__(
        self,
        schedule: Schedule,
        queue_length: int,
        before_call: Callable[[], None],
        run: Callable[[Callable[[], object]], None],
    ) -> None:
        """Create the queues.

        Args:
            schedule: Order of the operations.
            queue_length: Operations that a stream holds before a launch blocks.
            before_call: Called at the beginning of each call, guarded.
            run: Runs a step of an operation.
        """
        self._schedule = schedule
        self._choices = itertools.cycle(schedule.choices or (0,))
        self._queue_length = queue_length
        self._before_call = before_call
        self._run = run
        self._queues: list[StreamQueue] = []
        self._faults: list[Fault] = []
        self._sleepers = 0
        self.changed = threading.Condition(threading.RLock())
        self.counts: Counter[str] = Counter()
        self.now_ms = 0.0
        self.failure: str | None = None

    @property
    def num_queued(self) -> int:
        """Operations that have not run."""
        with self.changed:
            return sum(len(queue.operations) for queue in self._queues)

    def create(self) -> StreamQueue:
        """Return the queue of a new stream."""
        queue = StreamQueue(len(self._queues))
        self._queues.append(queue)
        return queue

    def arm(self, fault: Fault) -> None:
        """Let a call fail."""
        with self.changed:
            self._faults.append(fault)

    def run_all(self) -> None:
        """See `SimulatedCuda.run_all`."""
        with self.changed:
            self._before_call()
        while self._step(self._runnable):
            pass

    # -- calls and waits ------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, name: str, queue: StreamQueue | None = None) -> Iterator[None]:
        """Hold the device during a call, raise injected errors, wait for room in `queue`."""
        with self.changed:
            self._before_call()
            self._raise_if_failed()
            self.counts[name] += 1
            fault = self._due(name)
            if fault is not None and not fault.is_performed:
                raise fault.error
            if queue is not None:
                self._wait_for_room(queue)
            yield
            if fault is not None:
                raise fault.error
        if queue is not None:
            self._go_on()

    def enqueue(self, queue: StreamQueue, operation: Operation) -> Point:
        """Queue an operation, and return the point behind it. Call inside of `calling`."""
        queue.operations.append(operation)
        queue.launched += 1
        if self._sleepers:
            self.changed.notify_all()
        return Point(queue, queue.launched)

    def wait_for(self, point: Point) -> None:
        """Run operations until a point is reached.

        Raises:
            CudaError: The device has failed, or a hold is not released in time.
        """
        needed = partial(self._needed, point)
        while True:
            with self.changed:
                self._raise_if_failed()
                if point.is_reached:
                    return
                if not self._step(needed):
                    self._sleep(point.queue)

    def _sleep(self, queue: StreamQueue) -> None:
        """Wait until an operation was launched or has run, or a hold was released."""
        self._sleepers += 1
        is_late = not self.changed.wait(_HELD_S)
        self._sleepers -= 1
        if is_late:
            raise CudaError(f"nothing can run on stream {queue.name}: it is held")

    def poll(self, point: Point) -> bool:
        """Run one step towards a point; return whether it is reached."""
        if not point.is_reached:
            self._step(partial(self._needed, point))
        return point.is_reached

    def _due(self, name: str) -> Fault | None:
        """Count the call for the armed faults; return the one that it meets."""
        met = None
        is_launch = name in ("cudaLaunchKernel", "cudaMemcpyAsync")
        for fault in self._faults:
            if fault.call in (None, name) or (fault.call == "launch" and is_launch):
                fault.left -= 1
                if fault.left < 0:
                    met = fault
        if met is not None:
            self._faults.remove(met)
            if met.is_sticky:
                self._fail_for_good(str(met.error))
        return met

    def _fail_for_good(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise CudaError(self.failure)

    def _wait_for_room(self, queue: StreamQueue) -> None:
        if len(queue.operations) >= self._queue_length:
            self.counts["blocked launches"] += 1
            self.wait_for(Point(queue, queue.launched - self._queue_length + 1))

    def _go_on(self) -> None:
        """Run what the schedule runs after a launch."""
        match self._schedule.progress:
            case Progress.DEMANDED:
                return
            case Progress.EAGER:
                limit = None
            case Progress.RANDOM:
                limit = next(self._choices) % 4
        for _ in itertools.repeat(None) if limit is None else range(limit):
            if not self._step(self._runnable):
                return

    # -- running --------------------------------------------------------------------------------

    def _needed(self, point: Point) -> list[StreamQueue]:
        """Return the streams that can go on, of those that must for this point to be reached."""
        if self._schedule.progress is not Progress.DEMANDED:
            return self._runnable()
        found: list[StreamQueue] = []
        seen: set[StreamQueue] = set()
        left = [point]
        while left:
            point = left.pop()
            queue = point.queue
            if point.is_reached or queue in seen:
                continue
            seen.add(queue)
            head = queue.operations[0]
            if head.is_ready:
                found.append(queue)
            elif head.after is not None:
                left.append(head.after)
        return found

    def _runnable(self) -> list[StreamQueue]:
        return [queue for queue in self._queues if queue.can_go_on]

    def _step(self, candidates: Callable[[], list[StreamQueue]]) -> bool:
        """Run one step of one stream; return False if none can go on."""
        with self.changed:
            queues = candidates()
            if not queues:
                return False
            queue = queues[next(self._choices) % len(queues)] if queues[1:] else queues[0]
            operation = queue.operations[0]
            self.now_ms += _STEP_MS
            if operation.steps:
                self._perform(operation, operation.steps.popleft())
            if not operation.steps:
                queue.operations.popleft()
                queue.done += 1
                operation.on_end()
                if self._sleepers:
                    self.changed.notify_all()
            return True

    def _perform(self, operation: Operation, step: Callable[[], object]) -> None:
        """Run a step; an error of it is one of the device for good."""
        try:
            self._run(step)
        except Exception as error:  # noqa: BLE001 - the device reports it with the next call
            self._fail_for_good(f"{operation.name} failed on the device: {error}")
            operation.steps.clear()
