"""Copies between device and pinned host memory, on CUDA streams.

One thread per direction launches submitted transfers in order: a stream with a full queue blocks
that thread instead of the submitter (vLLM issue 29013), and a few pooled streams with a few
transfers each keep the queues short. Each transfer waits on its stream for the caller's compute
event, also before loads, because a pending zeroing would overwrite the loaded data (vLLM issues
31341 and 50696), and for the previous transfer. One thread per stream waits for the ends in order,
with the GIL released, and wakes the loop; Python callbacks on a stream could deadlock with the GIL.

Device memory allocated here is allocated, used and freed on the stream that uses it; the page
tables belong to the caller, and are referenced until the last copy has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvoffload_async.abc.pages import hold_pages
from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import (
    BlockCopies,
    ComputeEvent,
    GroupCopies,
    Transfer,
    TransferOutcome,
    Transport,
)
from kvoffload_async.errors import ConfigError, StateError, TransportError
from kvoffload_async.transport.layout import KVLayout
from kvoffload_async.transport.settling import SettlingTransfer
from kvoffload_async.transport.staging import StagedCopies

_STREAMS = 2
_TRANSFERS_PER_STREAM = 4


class CudaTransfer(SettlingTransfer):
    """A transfer on a stream, between two timed events."""

    def __init__(self, direction: Direction, after: torch.cuda.Event) -> None:
        super().__init__()
        self.direction = direction
        self.after = after
        self.parts: Sequence[GroupCopies] = ()
        self.num_bytes = 0
        self.started = _new_event(timed=True)
        # Blocking: waiters sleep with the GIL released, instead of spinning.
        self.copied = _new_event(timed=True, blocking=True)
        self.failure: Exception | None = None

    def settle(self) -> None:
        """Wait until no operation of the transfer runs, and publish its outcome."""
        seconds = None
        try:
            self.copied.synchronize()
            if self.failure is None:
                seconds = self.started.elapsed_time(self.copied) / 1000
        except Exception as error:  # noqa: BLE001 - published as this transfer's outcome
            self.failure = self.failure or error
        if self.failure is None:
            self.end(TransferOutcome(self.num_bytes, seconds))
        else:
            self.fail(self.failure)


@dataclass(slots=True)
class _StagedStream:
    """One pooled stream and its staging memory.

    Attributes:
        launched: Transfers to wait for.
        room: Number of further transfers that may be launched.
    """

    stream: torch.cuda.Stream
    staging: torch.Tensor
    launched: queue.SimpleQueue[CudaTransfer | None] = field(default_factory=queue.SimpleQueue)
    room: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(_TRANSFERS_PER_STREAM)
    )


class CudaTransport(Transport):
    """Copies on its own CUDA streams; registers (pins) the primary's memory in place."""

    def __init__(
        self,
        layout: KVLayout,
        kv_view: memoryview,
        *,
        cell_offset_bytes: int = 0,
        staging_bytes: int = 64 << 20,
    ) -> None:
        """Pin the primary's memory, create the streams and start their threads.

        Args:
            layout: The device's tensors.
            kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8.
            cell_offset_bytes: Offset of this worker's cell in a slot.
            staging_bytes: Device memory for staging, on each of four streams.

        Raises:
            ConfigError: The tensors are not on a CUDA device, a slot is too small for a chunk, or
                the memory cannot be allocated or pinned.
        """
        if layout.device.type != "cuda":
            raise ConfigError(
                f"kv_caches: the tensors are on {layout.device}; use the host transport"
            )
        rows = np.asarray(kv_view)
        layout.require_room(rows.shape[1], cell_offset_bytes)
        self._layout = layout
        self._device = layout.device
        self._host = torch.from_numpy(rows)
        self._num_slots = rows.shape[0]
        self._copies = StagedCopies(layout, self._host, cell_offset_bytes)
        try:
            self._streams = {
                direction: [self._create_stream(staging_bytes) for _ in range(_STREAMS)]
                for direction in (Direction.LOAD, Direction.STORE)
            }
        except RuntimeError as error:
            raise ConfigError(
                f"device: cannot allocate staging memory on {self._device}: {error}"
            ) from error
        self._has_pinned = _pin(self._host)
        self._release_pages = hold_pages(kv_view, f"a transport of {self._device}")
        self._submitted: dict[Direction, queue.SimpleQueue[CudaTransfer | None]] = {
            direction: queue.SimpleQueue() for direction in self._streams
        }
        self._threads: list[threading.Thread] = []
        for direction, streams in self._streams.items():
            name = f"kvoffload-cuda-{direction.name.lower()}"
            self._start(name, self._launch_all, direction)
            for index, staged in enumerate(streams):
                self._start(f"{name}-{index}", self._settle_all, staged)
        self._closed = False

    def record_compute(self) -> ComputeEvent:
        event = _new_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def submit(self, copies: BlockCopies, after: ComputeEvent) -> Transfer:
        if not isinstance(after, torch.cuda.Event):
            raise StateError("the compute event belongs to another transport")
        transfer = CudaTransfer(copies.direction, after)
        if self._closed:
            transfer.fail(TransportError("the transport is closed"))
            return transfer
        try:
            transfer.parts = self._layout.resolve(copies, self._num_slots)
        except TransportError as error:
            transfer.fail(error)
            return transfer
        transfer.num_bytes = self._layout.num_bytes(transfer.parts)
        self._submitted[copies.direction].put(transfer)
        return transfer

    def close(self, timeout_s: float) -> bool:
        if not self._closed:
            self._closed = True
            for submitted in self._submitted.values():
                submitted.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._has_pinned:
            self._has_pinned = False
            _cudart().cudaHostUnregister(self._host.data_ptr())
        self._host = torch.empty(0)
        self._copies.release()
        self._streams.clear()
        self._release_pages()
        return True

    # -- inside ---------------------------------------------------------------------------------

    def _create_stream(self, staging_bytes: int) -> _StagedStream:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # untyped in torch
        # Allocate on this stream; otherwise earlier users of the memory might still be running.
        with torch.cuda.stream(stream):
            return _StagedStream(stream, self._copies.create_staging(staging_bytes, self._device))

    def _launch_all(self, direction: Direction) -> None:
        """Launch submitted transfers on the streams in turn. Thread: the direction's."""
        torch.cuda.set_device(self._device)
        streams = self._streams[direction]
        previous: CudaTransfer | None = None
        turn = 0
        while (transfer := self._submitted[direction].get()) is not None:
            staged = streams[turn % len(streams)]
            turn += 1
            staged.room.acquire()
            try:
                self._launch(transfer, staged, previous)
            except Exception as error:  # noqa: BLE001 - published as this transfer's outcome
                transfer.failure = error
            previous = transfer
            staged.launched.put(transfer)
        for staged in streams:
            staged.launched.put(None)

    def _launch(
        self, transfer: CudaTransfer, staged: _StagedStream, previous: CudaTransfer | None
    ) -> None:
        with torch.cuda.stream(staged.stream):
            try:
                staged.stream.wait_event(transfer.after)
                if previous is not None:
                    staged.stream.wait_event(previous.copied)
                transfer.started.record(staged.stream)
                plan = self._copies.plan(transfer.parts, staged.staging.shape[0])
                if plan.extents:
                    # From pinned memory, so that the copy does not synchronize the stream.
                    pinned = torch.from_numpy(plan.index).pin_memory()
                    index = pinned.to(self._device, non_blocking=True)
                    self._copies.perform(transfer.direction, plan, index, staged.staging)
            finally:
                # Also after a failure: operations launched before it still move bytes.
                transfer.copied.record(staged.stream)

    def _settle_all(self, staged: _StagedStream) -> None:
        """Publish the outcomes of a stream's transfers, in order. Thread: the stream's."""
        torch.cuda.set_device(self._device)
        while (transfer := staged.launched.get()) is not None:
            transfer.settle()
            staged.room.release()

    def _start(self, name: str, target: Callable[..., None], subject: object) -> None:
        thread = threading.Thread(target=target, args=(subject,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


def _pin(host: torch.Tensor) -> bool:
    """Pin the memory; return False if another worker of this process has pinned it."""
    if host.is_pinned():
        return False
    code = int(_cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if code:
        raise ConfigError(
            f"cpu_bytes_to_use: {host.nbytes} bytes cannot be pinned (CUDA error {code}); use "
            "less, or raise the limit of locked memory"
        )
    return True


def _new_event(*, timed: bool = False, blocking: bool = False) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(  # type: ignore[no-untyped-call]  # untyped in torch
        enable_timing=timed, blocking=blocking
    )
    return event


def _cudart() -> Any:  # noqa: ANN401 - torch does not type its binding of the CUDA runtime
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch
