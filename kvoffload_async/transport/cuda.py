"""Copies between device and pinned host memory, on CUDA streams.

A transfer is a few launches whatever the number of layers and blocks: the device gathers the
blocks of all page tables into a staging buffer that has the layout of the slots, one launch a
page table, and neighbouring slots are copied in one piece each; a load goes the other way. Each
piece of staging is used again only behind the event of its last use, on the same stream.

A direction's transfers run over a few pooled streams: one shared stream's queue would fill up and
block who submits (vLLM issue 29013). Each waits for the caller's compute event, loads too, or a
pending zeroing would wipe what they bring (vLLM issues 31341 and 50696), and for the transfer
before it. One thread a stream waits for its events in order, off the interpreter lock, and wakes
the loop; Python callbacks on a stream would deadlock with that lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import (
    BlockCopies,
    ComputeEvent,
    GroupCopies,
    Transfer,
    TransferOutcome,
    Transport,
    group_copies,
)
from kvoffload_async.errors import ConfigError, StateError, TransportError
from kvoffload_async.transport.layout import KVLayout, PageTable
from kvoffload_async.transport.settling import SettlingTransfer
from kvoffload_async.types import BlockIds

_STREAMS = 2
_STAGING_BYTES = 64 << 20


class CudaTransfer(SettlingTransfer):
    """A transfer on a stream, between two timed events."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.started = _new_event(timed=True)
        # Blocking: who synchronises sleeps instead of spinning, off the interpreter lock.
        self.copied = _new_event(timed=True, blocking=True)
        self.failure: Exception | None = None

    def settle(self) -> None:
        """Wait for the copies' end and publish it. Thread: the stream's completion thread."""
        error = self.failure
        if error is None:
            try:
                self.copied.synchronize()
                seconds = self.started.elapsed_time(self.copied) / 1000
            except Exception as cause:  # noqa: BLE001 - it becomes this transfer's outcome
                error = cause
        if error is None:
            self.end(TransferOutcome(self.num_bytes, seconds))
            return
        failure = TransportError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        self.end(TransferOutcome(0, error=failure))


@dataclass(slots=True)
class _Lane:
    """One pooled stream, its staging buffer and the thread that waits for its events."""

    stream: torch.cuda.Stream
    staging: torch.Tensor
    transfers: queue.SimpleQueue[CudaTransfer | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None


class CudaTransport(Transport):
    """Copies on CUDA streams of its own; the primary's memory is registered (pinned) in place."""

    def __init__(
        self,
        layout: KVLayout,
        kv_view: memoryview,
        *,
        cell_offset_bytes: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        """Pin the primary's memory, make the streams and start their threads.

        Args:
            layout: The device's tensors.
            kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8.
            cell_offset_bytes: Where this worker's cell begins in a slot.
            device: The tensors' device.

        Raises:
            ConfigError: There is no CUDA device, or the memory cannot be pinned.
            StateError: A slot is too small for a chunk.
        """
        if not torch.cuda.is_available():
            raise ConfigError("device: there is no CUDA device here; use the host transport")
        rows = np.asarray(kv_view)
        if cell_offset_bytes + layout.chunk_bytes > rows.shape[1]:
            raise StateError(
                f"a slot of {rows.shape[1]} bytes does not hold a chunk of {layout.chunk_bytes} "
                f"bytes at offset {cell_offset_bytes}"
            )
        self._layout = layout
        self._device = torch.device(device) if device is not None else _device_of(layout)
        self._host = torch.from_numpy(rows)
        self._cell_offset_bytes = cell_offset_bytes
        self._pin()
        slots = max(1, _STAGING_BYTES // max(1, layout.chunk_bytes))
        self._lanes = {
            direction: [self._create_lane(direction, index, slots) for index in range(_STREAMS)]
            for direction in (Direction.LOAD, Direction.STORE)
        }
        self._turn = {Direction.LOAD: 0, Direction.STORE: 0}
        self._last: dict[Direction, CudaTransfer | None] = {
            Direction.LOAD: None,
            Direction.STORE: None,
        }
        self._closed = False

    def record_compute(self) -> ComputeEvent:
        event = _new_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def submit(self, copies: BlockCopies, after: ComputeEvent) -> Transfer:
        if not isinstance(after, torch.cuda.Event):
            raise StateError("the compute event is of another transport")
        direction = copies.direction
        parts = group_copies(copies, self._layout.blocks_per_chunk)
        transfer = CudaTransfer(self._num_bytes(parts))
        lanes = self._lanes[direction]
        lane = lanes[self._turn[direction] % len(lanes)]
        self._turn[direction] += 1
        previous, self._last[direction] = self._last[direction], transfer
        if self._closed:
            transfer.end(TransferOutcome(0, error=TransportError("the transport is closed")))
            return transfer
        try:
            with torch.cuda.stream(lane.stream):
                lane.stream.wait_event(after)
                if previous is not None and previous.failure is None:
                    lane.stream.wait_event(previous.copied)
                transfer.started.record(lane.stream)
                for index, part in enumerate(parts):
                    self._launch(direction, lane, self._layout.groups[index], part)
                transfer.copied.record(lane.stream)
        except Exception as error:  # noqa: BLE001 - it becomes this transfer's outcome
            transfer.failure = error
        lane.transfers.put(transfer)
        return transfer

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        lanes = [lane for group in self._lanes.values() for lane in group]
        for lane in lanes:
            lane.transfers.put(None)
        for lane in lanes:
            if lane.thread is not None:
                lane.thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(lane.thread is not None and lane.thread.is_alive() for lane in lanes):
            return False
        self._unpin()
        return True

    # -- inside ---------------------------------------------------------------------------------

    def _create_lane(self, direction: Direction, index: int, slots: int) -> _Lane:
        shape = (slots, self._layout.chunk_bytes)
        lane = _Lane(
            torch.cuda.Stream(self._device),  # type: ignore[no-untyped-call]  # untyped in torch
            torch.empty(shape, dtype=torch.uint8, device=self._device),
        )
        lane.thread = threading.Thread(
            target=_settle_all,
            args=(lane.transfers,),
            name=f"kvoffload-cuda-{direction.name.lower()}-{index}",
            daemon=True,
        )
        lane.thread.start()
        return lane

    def _launch(
        self, direction: Direction, lane: _Lane, tables: Sequence[PageTable], part: GroupCopies
    ) -> None:
        """Queue one group's copies, a staging buffer full at a time."""
        if not len(part.blocks):
            return
        whole = len(part.blocks) % self._layout.blocks_per_chunk == 0 and not part.places[0]
        chunk_of, slots = _chunks(part)
        used = sum(table.page_bytes for table in tables) * self._layout.blocks_per_chunk
        for begin in range(0, len(slots), lane.staging.shape[0]):
            piece = slots[begin : begin + lane.staging.shape[0]]
            mine = (chunk_of >= begin) & (chunk_of < begin + len(piece))
            staging = lane.staging[: len(piece), :used]
            if direction is Direction.LOAD or not whole:
                # A chunk that is stored in part keeps the rest of its slot's bytes.
                self._copy_rows(staging, piece, to_host=False)
            rows = self._to_device(chunk_of[mine] - begin)
            places = self._to_device(part.places[mine])
            blocks = self._to_device(part.blocks[mine])
            for table in tables:
                cells = _cells(staging, table, self._layout.blocks_per_chunk)
                if direction is Direction.STORE:
                    cells[rows, places] = table.pages.index_select(0, blocks)
                else:
                    table.pages.index_copy_(0, blocks, cells[rows, places])
            if direction is Direction.STORE:
                self._copy_rows(staging, piece, to_host=True)

    def _copy_rows(self, staging: torch.Tensor, slots: BlockIds, *, to_host: bool) -> None:
        """Copy between staging rows and slots, each run of neighbouring slots in one call."""
        begin, end = self._cell_offset_bytes, self._cell_offset_bytes + staging.shape[1]
        # A copy is asynchronous only between contiguous memories: no run may skip padding.
        joined = staging.is_contiguous() and end - begin == self._host.shape[1]
        for row, slot, count in _runs(slots) if joined else _single(slots):
            device_rows = staging[row : row + count]
            host_rows = self._host[slot : slot + count, begin:end]
            if to_host:
                host_rows.copy_(device_rows, non_blocking=True)
            else:
                device_rows.copy_(host_rows, non_blocking=True)

    def _to_device(self, values: BlockIds) -> torch.Tensor:
        # Pinned, or the copy would wait for the stream.
        pinned = torch.from_numpy(values.astype(np.int64)).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _num_bytes(self, parts: Sequence[GroupCopies]) -> int:
        return sum(
            len(part.blocks) * sum(table.page_bytes for table in group)
            for part, group in zip(parts, self._layout.groups, strict=True)
        )

    def _pin(self) -> None:
        code = int(_cudart().cudaHostRegister(self._host.data_ptr(), self._host.nbytes, 0))
        if code:
            raise ConfigError(
                f"cpu_bytes_to_use: {self._host.nbytes} bytes cannot be pinned (CUDA error "
                f"{code}); use less, or raise the limit of locked memory"
            )

    def _unpin(self) -> None:
        _cudart().cudaHostUnregister(self._host.data_ptr())


def _new_event(*, timed: bool = False, blocking: bool = False) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(  # type: ignore[no-untyped-call]  # untyped in torch
        enable_timing=timed, blocking=blocking
    )
    return event


def _cudart() -> Any:  # noqa: ANN401 - torch does not type its binding of the CUDA runtime
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch


def _settle_all(transfers: queue.SimpleQueue[CudaTransfer | None]) -> None:
    while (transfer := transfers.get()) is not None:
        transfer.settle()


def _device_of(layout: KVLayout) -> torch.device:
    for group in layout.groups:
        for table in group:
            return table.pages.device
    raise ConfigError("kv_caches: no tensor is registered")


def _cells(staging: torch.Tensor, table: PageTable, blocks_per_chunk: int) -> torch.Tensor:
    """Return a table's part of staging: uint8 `[rows, blocks_per_chunk, page_bytes]`, a view."""
    return staging.as_strided(
        (staging.shape[0], blocks_per_chunk, table.page_bytes),
        (staging.stride(0), table.page_bytes, 1),
        staging.storage_offset() + table.offset_bytes,
    )


def _chunks(part: GroupCopies) -> tuple[BlockIds, BlockIds]:
    """Return, for each device block, which of the part's slots is its, and those slots in order."""
    new = np.ones(len(part.slots), dtype=bool)
    new[1:] = part.slots[1:] != part.slots[:-1]
    return (np.cumsum(new, dtype=np.int32) - 1).astype(np.int32), part.slots[new]


def _runs(slots: BlockIds) -> Iterator[tuple[int, int, int]]:
    """Yield (row, slot, count) for each run of neighbouring, increasing slots."""
    begin = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield begin, int(slots[begin]), end - begin
            begin = end


def _single(slots: BlockIds) -> Iterator[tuple[int, int, int]]:
    """Yield (row, slot, 1) for each slot."""
    for row, slot in enumerate(slots.tolist()):
        yield row, slot, 1
