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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from kvoffload_async.transport.streams import DeviceRuntime
from simulated_cuda import operations
from simulated_cuda.queues import (
    CudaError,
    Fault,
    Hold,
    Operation,
    Point,
    Progress,
    Queues,
    Schedule,
)

__all__ = [
    "POISON",
    "CudaError",
    "Hold",
    "Progress",
    "Schedule",
    "SimulatedCuda",
    "SimulatedEvent",
    "SimulatedStream",
]

POISON = 0xDB
"""Byte that fills memory that is uninitialised or released."""

_ALIGNMENT = 256
_REFUSED = 2  # cudaErrorMemoryAllocation
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered

Bytes = npt.NDArray[np.uint8]


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


class SimulatedStream:
    """A stream of a simulated device; see `DeviceStream`.

    Attributes:
        queue: Its operations.
    """

    def __init__(self, queues: Queues) -> None:
        """Use `SimulatedCuda.create_stream`."""
        self._queues = queues
        self.queue = queues.create()

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let later operations wait for the event's latest record; none if never recorded."""
        with self._queues.calling("cudaStreamWaitEvent", self.queue):
            if event.point is not None:
                self._queues.enqueue(self.queue, Operation("wait", after=event.point))

    def synchronize(self) -> None:
        """Wait until all operations launched so far have run."""
        with self._queues.calling("cudaStreamSynchronize"):
            point = Point(self.queue, self.queue.launched)
        self._queues.wait_for(point)


class SimulatedEvent:
    """An event of a simulated device; see `StreamEvent`.

    Attributes:
        queues: The device's queues.
        timed: Whether it has a time.
        blocking: Whether waits for it sleep.
        point: Where it was recorded last; None if never, and then the device has no event yet.
        at_ms: The device's time when it was reached.
    """

    def __init__(self, queues: Queues, *, timed: bool, blocking: bool) -> None:
        """Use `SimulatedCuda.create_event`."""
        self.queues = queues
        self.timed = timed
        self.blocking = blocking
        self.point: Point | None = None
        self.at_ms: float | None = None
        self._is_created = False

    def record(self, stream: SimulatedStream) -> None:
        """Move the event to the current end of a stream."""
        if not self._is_created:
            with self.queues.calling("cudaEventCreate"):
                self._is_created = True
        with self.queues.calling("cudaEventRecord", stream.queue):
            operation = Operation("record", deque([self._reach]))
            self.point = self.queues.enqueue(stream.queue, operation)

    def query(self) -> bool:
        """Return whether it was reached, or never recorded; lets the device do one more step."""
        with self.queues.calling("cudaEventQuery"):
            point = self.point
        return point is None or self.queues.poll(point)

    def synchronize(self) -> None:
        """Wait until it was reached; returns at once if it was never recorded."""
        if self.point is None:
            return
        with self.queues.calling("cudaEventSynchronize"):
            if not self.blocking:
                self.queues.counts["spinning waits"] += 1
        self.queues.wait_for(self.point)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Return the milliseconds from this event to `end`; both are timed and reached."""
        with self.queues.calling("cudaEventElapsedTime"):
            if not (self.timed and end.timed):
                raise CudaError("an event was created without timing")
            for event in (self, end):
                if event.point is None or not event.point.is_reached:
                    raise CudaError("an event was not recorded, or not reached yet")
            return (end.at_ms or 0.0) - (self.at_ms or 0.0)

    def _reach(self) -> None:
        self.at_ms = self.queues.now_ms


class SimulatedCuda(DeviceRuntime):
    """A device and its runtime.

    Thread: any.

    Attributes:
        device_type: `"cpu"`, see the module.
        default_stream: The stream on which a thread launches outside of `stream(...)`.
        counts: Number of calls by name, and under `"synchronous copies"`, `"blocked launches"` and
            `"spinning waits"` of what makes a thread wait for the device.
        used_bytes: Device memory allocated and not released.
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
        self._queues = Queues(
            schedule or Schedule(), queue_length, self._take_released, self._run_directly
        )
        self._memory_bytes = memory_bytes
        self._local = threading.local()
        self._owned: dict[int, _Memory] = {}
        """Device and pinned memory, by the address of its storage."""
        self._registered: dict[int, _Memory] = {}
        self._released: deque[_Memory] = deque()
        """Memory whose last tensor has died, in whatever thread."""
        self.counts = self._queues.counts
        self.used_bytes = 0
        self.default_stream = SimulatedStream(self._queues)

    # -- the runtime ----------------------------------------------------------------------------

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one device."""
        with self._queues.calling("cudaSetDevice"):
            del device

    def create_stream(self, device: torch.device) -> SimulatedStream:
        """Return a new stream."""
        with self._queues.calling("cudaStreamCreate"):
            del device
            return SimulatedStream(self._queues)

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Queue this thread's operations on the device's tensors, inside of the context."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            # A mode belongs to its thread. Once is enough: a second one would see what this one
            # runs.
            with _DeferringMode(self._dispatch) if before is None else contextlib.nullcontext():
                yield
        finally:
            self._local.stream = before

    def current_stream(self, device: torch.device | None = None) -> SimulatedStream:
        """Return the stream on which this thread launches."""
        del device
        return getattr(self._local, "stream", None) or self.default_stream

    def create_event(self, *, timed: bool = False, blocking: bool = False) -> SimulatedEvent:
        """Return an event; the device creates it when it is recorded first."""
        return SimulatedEvent(self._queues, timed=timed, blocking=blocking)

    def is_event(self, event: object) -> TypeGuard[SimulatedEvent]:
        """Return whether an object is an event of this device."""
        return isinstance(event, SimulatedEvent) and event.queues is self._queues

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
        with self._queues.calling("cudaMalloc"):
            return self._allocate(tensor, self.current_stream())

    def free_bytes(self, device: torch.device | None = None) -> int:
        """Return the bytes of device memory that are not allocated."""
        del device
        with self._queues.calling("cudaMemGetInfo"):
            return self._memory_bytes - self.used_bytes

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in pinned host memory."""
        with self._queues.changed:
            memory = self._memory_of(tensor)
        return memory is not None and memory.kind is not _Kind.DEVICE

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy; its memory is poisoned after its last copy, when released."""
        with self._queues.calling("cudaHostAlloc"):
            pinned = self._own(_Kind.PINNED, torch.empty_like(tensor, device="meta"), None)
        with self._directly():
            return pinned.copy_(tensor)

    def cudart(self) -> SimulatedCuda:
        """Return the object with `cudaHostRegister` and `cudaHostUnregister`."""
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        """Pin host memory; return 0, or an error code."""
        try:
            with self._queues.calling("cudaHostRegister"):
                pages = (ctypes.c_uint8 * num_bytes).from_address(address)
                content = np.frombuffer(memoryview(pages), dtype=np.uint8)
                self._registered[address] = _Memory(_Kind.REGISTERED, content, num_bytes, address)
        except RuntimeError:
            return _REFUSED
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin host memory; return 0, or an error code. Operations must not use it any more."""
        try:
            with self._queues.calling("cudaHostUnregister"):
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
        self._queues.arm(Fault(call, at, error, is_sticky, is_performed))

    @property
    def has_failed(self) -> bool:
        """Whether all calls fail."""
        return self._queues.failure is not None

    @property
    def now_ms(self) -> float:
        """The device's time: each step of an operation takes a microsecond."""
        return self._queues.now_ms

    @property
    def num_queued(self) -> int:
        """Operations that are queued, on all streams."""
        return self._queues.num_queued

    def hold(self, stream: SimulatedStream | None = None) -> Hold:
        """Keep a stream, by default the current one, from going on until the hold is released."""
        queue = (stream or self.current_stream()).queue
        hold = Hold(self._queues.changed)
        with self._queues.calling("cudaLaunchKernel", queue):
            self._queues.enqueue(queue, Operation("hold", hold=hold))
        return hold

    def run_all(self) -> None:
        """Run what is queued, even on a device that has failed, as if it took a long time.

        Operations under a `Hold` stay queued.
        """
        self._queues.run_all()

    # -- memory ---------------------------------------------------------------------------------

    def _release(self, memories: Sequence[_Memory]) -> None:
        """Note that an operation on memory has ended."""
        for memory in memories:
            memory.pending -= 1
            if memory.kind is _Kind.PINNED and not memory.pending and not memory.is_live:
                memory.content[:] = POISON

    def _run_directly(self, step: Callable[[], object]) -> None:
        with self._directly():
            step()

    @contextlib.contextmanager
    def _directly(self) -> Iterator[None]:
        """Run this thread's operations at once."""
        before = getattr(self._local, "is_direct", False)
        self._local.is_direct = True
        try:
            yield
        finally:
            self._local.is_direct = before

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
        self._queues.enqueue(stream.queue, Operation("poison", deque([poison])))

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
        """Poison freed memory, in its stream's order."""
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

    def _dispatch(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue an operation on the device's tensors; run all others."""
        if getattr(self._local, "is_direct", False):
            return function(*args, **kwargs)
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
        with self._queues.changed:
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
        steps = [partial(_run_step, step, known) for step in steps]
        operation = Operation(str(function), deque(steps), on_end=partial(self._release, known))
        queue = self.current_stream().queue
        with self._queues.calling("cudaMemcpyAsync" if is_transfer else "cudaLaunchKernel", queue):
            for memory in known:
                memory.pending += 1
            point = self._queues.enqueue(queue, operation)
        is_plain = all(memories) and all(tensor.is_contiguous() for tensor in tensors)
        if is_transfer and not (is_plain and operations.is_non_blocking(args, kwargs)):
            self.counts["synchronous copies"] += 1
            self._queues.wait_for(point)
        return result

    def _results(
        self,
        function: Any,
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
            with self._queues.calling("cudaMalloc"):
                outputs.append(self._allocate(shape, self.current_stream()))
        return tree_unflatten(outputs, structure), outputs

    def _detached(self, value: Any) -> Any:
        """Return a tensor over the same memory that does not keep it; other values unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        with self._queues.changed:
            memory = self._memory_of(value)
        if memory is None or not value.numel():
            return value.detach() if value.dim() else value.clone()
        return operations.tensor_over(memory.content, value.data_ptr() - memory.address, value)


def _run_step(step: Callable[[], object], memories: Sequence[_Memory]) -> None:
    if any(memory.kind is _Kind.REGISTERED and not memory.is_live for memory in memories):
        raise CudaError("its host memory is no longer pinned")
    step()


class _DeferringMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Passes a thread's operations on tensors to the device."""

    def __init__(self, dispatch: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._dispatch = dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports the compiler, which takes seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        return self._dispatch(func, args, kwargs or {})
