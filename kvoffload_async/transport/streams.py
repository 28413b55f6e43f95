"""The calls of a device's runtime that `CudaTransport` makes: streams, events and memory.

`DeviceRuntime` makes them with `torch.cuda`; a subclass serves another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeGuard

import torch


class StreamEvent(Protocol):
    """A point in a stream. The device creates it at its first record, which may therefore fail."""

    def record(self, stream: Any) -> None:  # noqa: ANN401 - a stream of the same runtime
        """Move the event to the current end of a stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the event; true if it was never recorded."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the event; returns at once if never recorded."""
        ...

    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401 - an event of the same runtime
        """Return the milliseconds from this event to `end`; both are timed and reached."""
        ...


class DeviceStream(Protocol):
    """A queue of operations that the device runs in order."""

    def wait_event(self, event: Any) -> None:  # noqa: ANN401 - an event of the same runtime
        """Let later operations wait for the event's latest record, if there is a record."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has run all operations launched so far."""
        ...


class DeviceRuntime:
    """Streams, events and memory of CUDA devices; a subclass serves another kind of device.

    A call raises RuntimeError if the device refuses it, also because of an earlier operation.
    Thread: any, for all calls.

    Attributes:
        device_type: The `torch.device.type` of the tensors that the runtime serves.
    """

    device_type = "cuda"

    def is_available(self) -> bool:
        """Return whether there is a device."""
        return torch.cuda.is_available()

    def set_device(self, device: torch.device) -> None:
        """Make this thread use the device."""
        torch.cuda.set_device(device)

    def create_stream(self, device: torch.device) -> DeviceStream:
        """Return a stream that runs concurrently with the default stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def stream(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401 - of this runtime
        """Launch this thread's operations on a stream, inside of the context."""
        return torch.cuda.stream(stream)

    def current_stream(self, device: torch.device) -> DeviceStream:
        """Return the stream on which this thread launches."""
        return torch.cuda.current_stream(device)

    def create_event(self, *, timed: bool = False, blocking: bool = False) -> StreamEvent:
        """Return an event; a thread that waits for a blocking event sleeps instead of spinning."""
        return torch.cuda.Event(  # type: ignore[no-untyped-call]  # untyped in torch
            enable_timing=timed, blocking=blocking
        )

    def is_event(self, event: object) -> TypeGuard[StreamEvent]:
        """Return whether an object is an event of this runtime."""
        return isinstance(event, torch.cuda.Event)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate device memory on the current stream, not initialised.

        Memory that was released there may be reused at once: its last use is ordered before.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def free_bytes(self, device: torch.device | None = None) -> int:
        """Return the free memory of a device in bytes; by default, of the thread's device."""
        return torch.cuda.mem_get_info(device)[0]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor's memory is pinned; copies are then asynchronous."""
        return tensor.is_pinned()

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy of a host tensor, kept until copies launched from it have ended."""
        return tensor.pin_memory()

    def cudart(self) -> Any:  # noqa: ANN401 - torch does not type its binding of the CUDA runtime
        """Return `cudaHostRegister` and `cudaHostUnregister`, which return an error code."""
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch
