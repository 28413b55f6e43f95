"""A simulated CUDA device, for tests of transports without a GPU.

`SimulatedCuda` is the runtime that `CudaTransport` takes as `runtime`. Its memory is host memory,
so its tensors are on `cpu`; a tensor is on the device if the device allocated it (`empty`). Inside
of `stream(...)`, operations on the device's tensors return at once and are queued. They run when
somebody waits for them, in a thread that waits, in any order that streams and events allow:

* A `Schedule` picks the order. Copies run in several steps, between those of other streams.
* Memory is poisoned when allocated and when released, in the order of the stream that allocated it,
  as by another user of the same memory: an operation that uses it too early, too late or on another
  stream reads or leaves wrong bytes.
* A copy from or to pageable host memory, between memory that is not contiguous, or without
  `non_blocking`, waits for its stream.
* A launch into a full stream waits for room. A `Hold` keeps a stream from going on.
* Calls have the names of the CUDA runtime. `fail` injects an error into any of them; after a sticky
  one, and after an operation that fails while it runs, all calls fail.

Nothing waits in real time, apart from a stream under a `Hold`.

Not simulated: the contents of memory under concurrent access below the granularity of a row, the
durations of operations, and the default stream's implicit synchronisation with blocking streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from kvoffload_async.testing import _cuda_operations as operations

POISON = 0xDB
"""Byte that fills memory that is uninitialised or released."""

_HELD_S = 60.0
"""Seconds that a call waits for a `Hold` before it fails."""
_STEP_MS = 0.001
_ALIGNMENT = 256
_REFUSED = 2  # cudaErrorMemoryAllocation
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered

Bytes = npt.NDArray[np.uint8]


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

    `kvoffload_async.testing.strategies.device_schedules` is a Hypothesis strategy.

    Attributes:
        progress: When they run.
        choices: Numbers that decide which of several streams goes on, and how far; repeated.
    """

    progress: Progress = Progress.DEMANDED
    choices: Sequence[int] = (0,)


class Point(NamedTuple):
    """A position in a stream: reached when so many of its operations have run."""

    stream: SimulatedStream
    position: int

    @property
    def is_reached(self) -> bool:
        """Whether the device has run all operations before it."""
        return self.stream.done >= self.position


class _Kind(enum.Enum):
    DEVICE = enum.auto()
    PINNED = enum.auto()
    REGISTERED = enum.auto()


@dataclass(slots=True, eq=False)
class _Memory:
    """A range of memory that queued operations may use.

    Attributes:
        content: Its bytes, at least one, not owned by whoever uses the memory.
        num_bytes: Bytes asked for.
        stream: The stream that allocated it, for device memory.
        pending: Queued operations that use it.
        is_live: False when released, or no longer registered.
    """

    kind: _Kind
    content: Bytes
    num_bytes: int
    address: int
    stream: SimulatedStream | None = None
    pending: int = 0
    is_live: bool = True


@dataclass(slots=True, eq=False)
class _Operation:
    """A queued operation.

    Attributes:
        steps: The steps left.
        memories: The memory that it uses.
        after: The point that a wait for an event waits for.
        hold: The hold that must be released first.
    """

    name: str
    steps: deque[Callable[[], object]]
    memories: Sequence[_Memory] = ()
    after: Point | None = None
    hold: Hold | None = None

    @property
    def is_ready(self) -> bool:
        if self.hold is not None:
            return self.hold.is_released
        return self.after is None or self.after.is_reached


class Hold:
    """Keeps a stream from going on, as a long kernel would."""

    def __init__(self, device: SimulatedCuda) -> None:
        """Use `SimulatedCuda.hold`."""
        self._device = device
        self.is_released = False

    def release(self) -> None:
        """Let the stream go on. Thread: any."""
        with self._device.changed:
            self.is_released = True
            self._device.changed.notify_all()


class SimulatedStream:
    """A stream of a simulated device; see `DeviceStream`.

    Attributes:
        name: Its number, in order of creation; 0 is the default stream.
        launched: Number of operations launched.
        done: Number of operations that have run.
    """

    def __init__(self, device: SimulatedCuda, name: int) -> None:
        """Use `SimulatedCuda.create_stream`."""
        self.device = device
        self.name = name
        self.launched = 0
        self.done = 0
        self.queued: deque[_Operation] = deque()

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let later operations wait for the event's latest record; none if never recorded."""
        with self.device.calling("cudaStreamWaitEvent", self):
            if event.point is not None:
                self.device.enqueue(self, _Operation("wait", deque(), after=event.point))

    def synchronize(self) -> None:
        """Wait until all operations launched so far have run."""
        with self.device.calling("cudaStreamSynchronize"):
            point = Point(self, self.launched)
        self.device.wait_for(point)


class SimulatedEvent:
    """An event of a simulated device; see `StreamEvent`.

    Attributes:
        timed: Whether it has a time.
        blocking: Whether waits for it sleep.
        point: Where it was recorded last; None if never, and then the device has no event yet.
        at_ms: The device's time when it was reached.
    """

    def __init__(self, device: SimulatedCuda, *, timed: bool, blocking: bool) -> None:
        """Use `SimulatedCuda.create_event`."""
        self.device = device
        self.timed = timed
        self.blocking = blocking
        self.point: Point | None = None
        self.at_ms: float | None = None
        self._is_created = False

    def record(self, stream: SimulatedStream) -> None:
        """Move the event to the current end of a stream."""
        if not self._is_created:
            with self.device.calling("cudaEventCreate"):
                self._is_created = True
        with self.device.calling("cudaEventRecord", stream):
            operation = _Operation("record", deque([self._reach]))
            self.point = self.device.enqueue(stream, operation)

    def query(self) -> bool:
        """Return whether it was reached, or never recorded; lets the device do one more step."""
        with self.device.calling("cudaEventQuery"):
            point = self.point
        return point is None or self.device.poll(point)

    def synchronize(self) -> None:
        """Wait until it was reached; returns at once if it was never recorded."""
        if self.point is None:
            return
        with self.device.calling("cudaEventSynchronize"):
            if not self.blocking:
                self.device.counts["spinning waits"] += 1
        self.device.wait_for(self.point)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Return the milliseconds from this event to `end`; both are timed and reached."""
        with self.device.calling("cudaEventElapsedTime"):
            if not (self.timed and end.timed):
                raise CudaError("an event was created without timing")
            for event in (self, end):
                if event.point is None or not event.point.is_reached:
                    raise CudaError("an event was not recorded, or not reached yet")
            return (end.at_ms or 0.0) - (self.at_ms or 0.0)

    def _reach(self) -> None:
        self.at_ms = self.device.now_ms


@dataclass(slots=True)
class _Fault:
    """An armed error: of which call, counted from now, and whether it stays and comes late."""

    call: str | None
    left: int
    error: Exception
    is_sticky: bool
    is_performed: bool


class SimulatedCuda:
    """A device and its runtime; implements `DeviceRuntime`.

    Thread: any.

    Attributes:
        device_type: `"cpu"`, see the module.
        default_stream: The stream on which a thread launches outside of `stream(...)`.
        counts: Number of calls by name, and under `"synchronous copies"`, `"blocked launches"` and
            `"spinning waits"` of what makes a thread wait for the device.
        used_bytes: Device memory allocated and not released.
        now_ms: The device's time: a fixed time for each step.
        changed: Guards the device; notified when an operation has run.
    """

    device_type = "cpu"

    def __init__(
        self,
        schedule: Schedule | None = None,
        *,
        memory_bytes: int = 1 << 40,
        queue_length: int = 1024,
    ) -> None:
        """Create a device.

        Args:
            schedule: Order of the operations; by default only what somebody waits for.
            memory_bytes: Device memory; an allocation beyond it raises `torch.OutOfMemoryError`.
            queue_length: Operations that a stream holds before a launch blocks.
        """
        self._schedule = schedule or Schedule()
        self._choices = itertools.cycle(self._schedule.choices or (0,))
        self._memory_bytes = memory_bytes
        self._queue_length = queue_length
        self._streams: list[SimulatedStream] = []
        self.changed = threading.Condition(threading.RLock())
        self._sleepers = 0
        self._local = threading.local()
        self._owned: dict[int, _Memory] = {}
        """Device and pinned memory, by the address of its storage."""
        self._registered: dict[int, _Memory] = {}
        self._released: deque[_Memory] = deque()
        """Memory whose last tensor has died, in whatever thread."""
        self._faults: list[_Fault] = []
        self._sticky: str | None = None
        self.counts: Counter[str] = Counter()
        self.used_bytes = 0
        self.now_ms = 0.0
        self.default_stream = self._new_stream()

    # -- the runtime ----------------------------------------------------------------------------

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one device."""
        with self.calling("cudaSetDevice"):
            del device

    def create_stream(self, device: torch.device) -> SimulatedStream:
        """Return a new stream."""
        with self.calling("cudaStreamCreate"):
            del device
            return self._new_stream()

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Queue this thread's operations on the device's tensors, inside of the context."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            # A mode belongs to its thread. Once is enough: a second one would see what this one
            # runs.
            with _DeferringMode(self) if before is None else contextlib.nullcontext():
                yield
        finally:
            self._local.stream = before

    def current_stream(self, device: torch.device | None = None) -> SimulatedStream:
        """Return the stream on which this thread launches."""
        del device
        return getattr(self._local, "stream", None) or self.default_stream

    def create_event(self, *, timed: bool = False, blocking: bool = False) -> SimulatedEvent:
        """Return an event; the device creates it when it is recorded first."""
        return SimulatedEvent(self, timed=timed, blocking=blocking)

    def is_event(self, event: object) -> TypeGuard[SimulatedEvent]:
        """Return whether an object is an event of this device."""
        return isinstance(event, SimulatedEvent) and event.device is self

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Allocate device memory on the current stream; it is poisoned.

        Raises:
            OutOfMemoryError: There is not so much left.
        """
        del device
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        with self.calling("cudaMalloc"):
            return self._allocate(tensor, self.current_stream())

    def free_bytes(self, device: torch.device | None = None) -> int:
        """Return the bytes of device memory that are not allocated."""
        del device
        with self.calling("cudaMemGetInfo"):
            return self._memory_bytes - self.used_bytes

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in pinned host memory."""
        with self.changed:
            memory = self._memory_of(tensor)
        return memory is not None and memory.kind is not _Kind.DEVICE

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy; its memory is poisoned after its last copy, when released."""
        with self.calling("cudaHostAlloc"):
            pinned = self._own(_Kind.PINNED, torch.empty_like(tensor, device="meta"), None)
        with self._directly():
            return pinned.copy_(tensor)

    def cudart(self) -> SimulatedCuda:
        """Return the object with `cudaHostRegister` and `cudaHostUnregister`."""
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        """Pin host memory; return 0, or an error code."""
        try:
            with self.calling("cudaHostRegister"):
                pages = (ctypes.c_uint8 * num_bytes).from_address(address)
                content = np.frombuffer(memoryview(pages), dtype=np.uint8)
                self._registered[address] = _Memory(_Kind.REGISTERED, content, num_bytes, address)
        except RuntimeError:
            return _REFUSED
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin host memory; return 0, or an error code. Operations must not use it any more."""
        try:
            with self.calling("cudaHostUnregister"):
                memory = self._registered.pop(address, None)
                if memory is None:
                    return _NOT_REGISTERED
                memory.is_live = False
        except RuntimeError:
            return _REFUSED
        return 0

    # -- for tests ------------------------------------------------------------------------------

    def fail(
        self,
        call: str | None = None,
        at: int = 0,
        error: Exception | None = None,
        *,
        is_sticky: bool = False,
        is_performed: bool = False,
    ) -> None:
        """Inject an error into one call.

        Args:
            call: Name of the call, such as `"cudaEventRecord"`, or `"launch"` for any operation.
                None: any call.
            at: How many such calls pass before.
            error: The error; by default a `CudaError` that names the call.
            is_sticky: Whether all later calls fail too. Operations that are queued may run still.
            is_performed: Whether the call takes effect before it fails.
        """
        error = error or CudaError(f"injected into {call or 'a call'} {at}")
        with self.changed:
            self._faults.append(_Fault(call, at, error, is_sticky, is_performed))

    @property
    def has_failed(self) -> bool:
        """Whether all calls fail."""
        return self._sticky is not None

    @property
    def num_queued(self) -> int:
        """Operations that are queued, on all streams."""
        with self.changed:
            return sum(len(stream.queued) for stream in self._streams)

    def hold(self, stream: SimulatedStream | None = None) -> Hold:
        """Keep a stream, by default the current one, from going on until the hold is released."""
        hold = Hold(self)
        with self.calling("cudaLaunchKernel", stream or self.current_stream()):
            self.enqueue(stream or self.current_stream(), _Operation("hold", deque(), hold=hold))
        return hold

    def run_all(self) -> None:
        """Run what is queued, even on a device that has failed, as if it took a long time.

        Operations under a `Hold` stay queued.
        """
        with self.changed:
            self._take_released()
        while self._step(self._runnable):
            pass

    # -- calls and waits ------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, name: str, stream: SimulatedStream | None = None) -> Iterator[None]:
        """Hold the device during a call, raise injected errors, wait for room in `stream`."""
        with self.changed:
            self._take_released()
            self._raise_if_failed()
            self.counts[name] += 1
            fault = self._due(name)
            if fault is not None and not fault.is_performed:
                raise fault.error
            if stream is not None:
                self._wait_for_room(stream)
            yield
            if fault is not None:
                raise fault.error
        if stream is not None:
            self._go_on()

    def enqueue(self, stream: SimulatedStream, operation: _Operation) -> Point:
        """Queue an operation, and return the point behind it. Call inside of `calling`."""
        for memory in operation.memories:
            memory.pending += 1
        stream.queued.append(operation)
        stream.launched += 1
        if self._sleepers:
            self.changed.notify_all()
        return Point(stream, stream.launched)

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
                    self._sleep(point.stream)

    def _sleep(self, stream: SimulatedStream) -> None:
        """Wait until an operation was launched or has run, or a hold was released."""
        self._sleepers += 1
        is_late = not self.changed.wait(_HELD_S)
        self._sleepers -= 1
        if is_late:
            raise CudaError(f"nothing can run on stream {stream.name}: it is held")

    def poll(self, point: Point) -> bool:
        """Run one step towards a point; return whether it is reached."""
        if not point.is_reached:
            self._step(partial(self._needed, point))
        return point.is_reached

    def _due(self, name: str) -> _Fault | None:
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
        self._sticky = self._sticky or reason
        self.changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self._sticky is not None:
            raise CudaError(self._sticky)

    def _wait_for_room(self, stream: SimulatedStream) -> None:
        if len(stream.queued) >= self._queue_length:
            self.counts["blocked launches"] += 1
            self.wait_for(Point(stream, stream.launched - self._queue_length + 1))

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

    def _needed(self, point: Point) -> list[SimulatedStream]:
        """Return the streams that can go on, of those that must for this point to be reached."""
        if self._schedule.progress is not Progress.DEMANDED:
            return self._runnable()
        found: list[SimulatedStream] = []
        seen: set[SimulatedStream] = set()
        left = [point]
        while left:
            point = left.pop()
            stream = point.stream
            if point.is_reached or stream in seen:
                continue
            seen.add(stream)
            head = stream.queued[0]
            if head.is_ready:
                found.append(stream)
            elif head.after is not None:
                left.append(head.after)
        return found

    def _runnable(self) -> list[SimulatedStream]:
        return [stream for stream in self._streams if stream.queued and stream.queued[0].is_ready]

    def _step(self, candidates: Callable[[], list[SimulatedStream]]) -> bool:
        """Run one step of one stream; return False if none can go on."""
        with self.changed:
            streams = candidates()
            if not streams:
                return False
            stream = streams[next(self._choices) % len(streams)] if streams[1:] else streams[0]
            operation = stream.queued[0]
            self.now_ms += _STEP_MS
            if operation.steps:
                self._perform(operation, operation.steps.popleft())
            if not operation.steps:
                stream.queued.popleft()
                stream.done += 1
                self._finish(operation)
                if self._sleepers:
                    self.changed.notify_all()
            return True

    def _perform(self, operation: _Operation, step: Callable[[], object]) -> None:
        """Run a step; an error of it, or memory that is gone, is one of the device for good."""
        if any(m.kind is _Kind.REGISTERED and not m.is_live for m in operation.memories):
            step = _touch_unpinned
        try:
            with self._directly():
                step()
        except Exception as error:  # noqa: BLE001 - the device reports it with the next call
            self._fail_for_good(f"{operation.name} failed on the device: {error}")
            operation.steps.clear()

    def _finish(self, operation: _Operation) -> None:
        for memory in operation.memories:
            memory.pending -= 1
            if memory.kind is _Kind.PINNED and not memory.pending and not memory.is_live:
                memory.content[:] = POISON

    @contextlib.contextmanager
    def _directly(self) -> Iterator[None]:
        """Run this thread's operations at once."""
        before = getattr(self._local, "is_direct", False)
        self._local.is_direct = True
        try:
            yield
        finally:
            self._local.is_direct = before

    # -- memory ---------------------------------------------------------------------------------

    def _new_stream(self) -> SimulatedStream:
        stream = SimulatedStream(self, len(self._streams))
        self._streams.append(stream)
        return stream

    def _allocate(self, like: torch.Tensor, stream: SimulatedStream) -> torch.Tensor:
        if self.used_bytes + like.nbytes > self._memory_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory (simulated): {like.nbytes} bytes of {self._memory_bytes}, of "
                f"which {self.used_bytes} are in use"
            )
        self.used_bytes += like.nbytes
        tensor = self._own(_Kind.DEVICE, like, stream)
        self._poison(self._owned[tensor.untyped_storage().data_ptr()], stream)
        return tensor

    def _poison(self, memory: _Memory, stream: SimulatedStream) -> None:
        """Overwrite memory in stream order, as another user of the same memory does."""
        poison = partial(memory.content.fill, POISON)
        self.enqueue(stream, _Operation("poison", deque([poison])))

    def _own(self, kind: _Kind, like: torch.Tensor, stream: SimulatedStream | None) -> torch.Tensor:
        """Return a poisoned tensor of its own memory, whose release is noticed."""
        num_bytes = max(1, like.nbytes)
        whole = np.full(num_bytes + _ALIGNMENT, POISON, dtype=np.uint8)
        begin = -whole.ctypes.data % _ALIGNMENT
        content = whole[begin : begin + num_bytes]
        memory = _Memory(kind, content, like.nbytes, content.ctypes.data, stream)
        self._owned[memory.address] = memory
        owner = content[: like.nbytes] if like.nbytes else content
        weakref.finalize(owner, self._released.append, memory).atexit = False
        with self._directly():
            flat = torch.from_numpy(owner)
            if not like.nbytes:
                flat = flat[:0]
            return flat.view(like.dtype).as_strided(like.shape, like.stride())

    def _take_released(self) -> None:
        """Poison memory whose last tensor has died, after what its stream has been given so far."""
        while self._released:
            memory = self._released.popleft()
            memory.is_live = False
            del self._owned[memory.address]
            if memory.stream is not None:
                self.used_bytes -= memory.num_bytes
                self._poison(memory, memory.stream)
            elif not memory.pending:
                memory.content[:] = POISON

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        """Return the device's or pinned memory of a tensor; None for pageable memory."""
        memory = self._owned.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            return memory
        address = tensor.data_ptr()
        for memory in self._registered.values():
            if memory.address <= address < memory.address + len(memory.content):
                return memory
        return None

    # -- operations -----------------------------------------------------------------------------

    def dispatch(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any operation of torch
        """Queue an operation on the device's tensors; run all others."""
        if getattr(self._local, "is_direct", False):
            return function(*args, **kwargs)
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
        with self.changed:
            memories = [self._memory_of(tensor) for tensor in tensors]
        on_host = [not (memory and memory.kind is _Kind.DEVICE) for memory in memories]
        if all(on_host) or operations.is_view(function):
            return function(*args, **kwargs)
        if function is operations.TO_HOST:
            self.counts["synchronous copies"] += 1
            self.current_stream().synchronize()
            return function(*args, **kwargs)
        is_transfer = any(itertools.compress((tensor.dim() for tensor in tensors), on_host))
        if is_transfer and function is not operations.COPY:
            raise CudaError(f"{function}: a tensor is on the host, another one on the device")
        result, outputs = self._results(function, args, kwargs)
        given = [self._detached(leaf) for leaf in leaves]
        given_args, given_kwargs = tree_unflatten(given, structure)
        results = [self._detached(each) for each in outputs]
        steps = operations.steps_of(function, given_args, given_kwargs, results)
        known = [memory for memory in memories if memory is not None]
        operation = _Operation(str(function), deque(steps), known)
        stream = self.current_stream()
        with self.calling("cudaMemcpyAsync" if is_transfer else "cudaLaunchKernel", stream):
            point = self.enqueue(stream, operation)
        is_plain = all(memories) and all(tensor.is_contiguous() for tensor in tensors)
        if is_transfer and not (is_plain and operations.is_non_blocking(args, kwargs)):
            self.counts["synchronous copies"] += 1
            self.wait_for(point)
        return result

    def _results(
        self,
        function: Any,  # noqa: ANN401 - as above
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, Sequence[torch.Tensor]]:
        """Return what an operation returns, and which tensors of it are new."""
        changed = operations.changed_argument(function, args, kwargs)
        if changed is not None:
            return changed, ()
        outputs = []
        shapes, structure = tree_flatten(operations.shapes_of(function, args, kwargs))
        for shape in shapes:
            with self.calling("cudaMalloc"):
                outputs.append(self._allocate(shape, self.current_stream()))
        return tree_unflatten(outputs, structure), outputs

    def _detached(self, value: Any) -> Any:  # noqa: ANN401 - any argument
        """Return a tensor over the same memory that does not keep it; other values unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        with self.changed:
            memory = self._memory_of(value)
        if memory is None or not value.numel():
            return value.detach() if value.dim() else value.clone()
        return operations.tensor_over(memory.content, value.data_ptr() - memory.address, value)


def _touch_unpinned() -> None:
    raise CudaError("its host memory is no longer pinned")


class _DeferringMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Passes a thread's operations on tensors to the device."""

    def __init__(self, device: SimulatedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports the compiler, which takes seconds

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operation of torch
        types: Any,  # noqa: ANN401 - see TorchDispatchMode
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever it returns
        del types
        return self._device.dispatch(func, args, kwargs or {})
