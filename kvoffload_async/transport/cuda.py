"""Copies between device and pinned host memory, on CUDA streams.

One thread per direction launches submitted transfers in order: a stream with a full queue blocks
that thread instead of the submitter (vLLM issue 29013), and a few pooled streams with a few
transfers each keep the queues short. Each transfer waits on its stream for the caller's compute
event, also before loads, because a pending zeroing would overwrite the loaded data (vLLM issues
31341 and 50696). Transfers on different streams do not wait for each other. One thread per stream
waits for the ends in order, with the GIL released, and wakes the loop; Python callbacks on a stream
could deadlock with the GIL.

Copies go by way of staging memory, in few operations. A store gathers blocks into staging memory
with the layout of the slots, one operation per page table, and copies each run of adjacent slots at
once; loads use the reverse order.

Unless a layout is contiguous (`KVLayout.is_contiguous`), the slots of these copies are rows of
pinned memory, one for each device block, and host threads copy between those and the primary's
slots. The launching thread waits for its stream before they do.

Device memory allocated here is allocated, used and freed on the stream that uses it; the page
tables belong to the caller, and are referenced until the last copy has ended.

If neither an event nor the stream says that the copies of a transfer have ended, the device is
lost: the transfer keeps its slots, all others fail, and `close` returns False.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import (
    BlockCopies,
    ComputeEvent,
    GroupCopies,
    Transfer,
    TransferOutcome,
    Transport,
    hold_pages,
)
from kvoffload_async.errors import (
    ConfigError,
    StateError,
    TransportError,
    drop_tracebacks,
    text_of,
)
from kvoffload_async.transport.completion import CompletableTransfer
from kvoffload_async.transport.host import Copier
from kvoffload_async.transport.layout import KVLayout, PageTable
from kvoffload_async.transport.streams import DeviceRuntime, DeviceStream, StreamEvent
from kvoffload_async.types import BlockIds

# One thread moves an element of a gather: bytes would take eight times as long as words.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class _Words:
    """A page table viewed as the widest possible words: `[num_blocks, page_words]`."""

    pages: torch.Tensor
    offset_words: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a transfer, within one group, that fits into staging memory.

    Attributes:
        group: Index of the group.
        slots: The slots, one per row of staging memory.
        begin: Start of its rows, positions and blocks in the plan's index, `count` each.
        count: Number of device blocks.
        is_whole: Whether they fill all rows, in order.
    """

    group: int
    slots: BlockIds
    begin: int
    count: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One transfer, divided into extents.

    Attributes:
        extents: The extents, in order of copying.
        index: All indices of the extents, int64, in one array to be copied to the device at once.
    """

    extents: Sequence[Extent]
    index: npt.NDArray[np.int64]


class StagedCopies:
    """Copies between a layout's page tables and a worker's cells in the slots.

    Thread: any, one at a time for each staging buffer.
    """

    def __init__(self, layout: KVLayout, host: torch.Tensor, cell_offset_bytes: int) -> None:
        """Use the layout's tables, and `host`: the slots, uint8 `[num_slots, slot_bytes]`."""
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._host = host
        self._cell_offset_bytes = cell_offset_bytes
        self._word_bytes, self._dtype = _widest_words(layout)
        self._row_bytes = -(-layout.chunk_bytes // self._word_bytes) * self._word_bytes
        # Includes gaps between a group's tables, but no bytes of other workers.
        self._group_bytes = [
            max(
                (t.offset_bytes + t.page_bytes * layout.blocks_per_chunk for t in group),
                default=0,
            )
            for group in layout.groups
        ]
        self._groups = [
            [
                _Words(table.pages.view(self._dtype), table.offset_bytes // self._word_bytes)
                for table in group
            ]
            for group in layout.groups
        ]

    def staging_shape(self, size_bytes: int) -> tuple[int, int]:
        """Return the shape of staging memory of about this size: rows and bytes, uint8."""
        return max(1, size_bytes // self._row_bytes), self._row_bytes

    def plan(self, parts: Sequence[GroupCopies], staging_rows: int) -> Plan:
        """Divide a transfer into extents of at most `staging_rows` slots."""
        extents: list[Extent] = []
        index: list[npt.NDArray[np.integer[Any]]] = []
        begin = 0
        for group, part in enumerate(parts):
            rows, slots = _rows_of(part)
            for first in range(0, len(slots), staging_rows):
                mine = slots[first : first + staging_rows]
                chosen = (rows >= first) & (rows < first + len(mine))
                count = int(chosen.sum())
                is_whole = count == len(mine) * self._blocks_per_chunk
                extents.append(Extent(group, mine, begin, count, is_whole))
                index += [(rows - first)[chosen], part.positions[chosen], part.blocks[chosen]]
                begin += 3 * count
        joined = np.concatenate(index) if index else np.empty(0)
        return Plan(extents, joined.astype(np.int64))

    def perform(
        self, direction: Direction, plan: Plan, index: torch.Tensor, staging: torch.Tensor
    ) -> None:
        """Queue a transfer's copies; `index` is the plan's index on the device."""
        for extent in plan.extents:
            where = index[extent.begin : extent.begin + 3 * extent.count].view(3, extent.count)
            used = staging[: len(extent.slots), : self._group_bytes[extent.group]]
            if direction is Direction.LOAD or not extent.is_whole:
                # A partially stored chunk keeps the other bytes of its slot.
                self._copy_rows(used, extent.slots, to_host=False)
            for table in self._groups[extent.group]:
                cells = self._cells_of(staging, table, len(extent.slots))
                if direction is Direction.STORE:
                    _gather(table.pages, cells, where, is_whole=extent.is_whole)
                else:
                    _scatter(table.pages, cells, where, is_whole=extent.is_whole)
            if direction is Direction.STORE:
                self._copy_rows(used, extent.slots, to_host=True)

    def release(self) -> None:
        """Release the reference to the slots' memory; its owner may unmap it now."""
        self._host = torch.empty((0, 0), dtype=torch.uint8)

    def _cells_of(self, staging: torch.Tensor, table: _Words, rows: int) -> torch.Tensor:
        """Return a table's part of staging memory: words `[rows, blocks_per_chunk, page_words]`."""
        words = staging.view(self._dtype)
        page_words = table.pages.shape[1]
        return words.as_strided(
            (rows, self._blocks_per_chunk, page_words),
            (words.stride(0), page_words, 1),
            words.storage_offset() + table.offset_words,
        )

    def _copy_rows(self, staging: torch.Tensor, slots: BlockIds, *, to_host: bool) -> None:
        """Copy between staging rows and slots, each run of adjacent slots in one call."""
        begin, end = self._cell_offset_bytes, self._cell_offset_bytes + staging.shape[1]
        # Copies are asynchronous only between contiguous memories: a run must not skip padding.
        is_joined = staging.is_contiguous() and staging.shape[1] == self._host.shape[1]
        for row, slot, count in _runs(slots, len(slots) if is_joined else 1):
            device_rows = staging[row : row + count]
            host_rows = self._host[slot : slot + count, begin:end]
            if to_host:
                host_rows.copy_(device_rows, non_blocking=True)
            else:
                device_rows.copy_(host_rows, non_blocking=True)


def _gather(
    pages: torch.Tensor, cells: torch.Tensor, where: torch.Tensor, *, is_whole: bool
) -> None:
    rows, positions, blocks = where
    if is_whole and cells.shape[1] == 1:
        torch.index_select(pages, 0, blocks, out=cells[:, 0])
    elif is_whole:
        cells.copy_(pages.index_select(0, blocks).view(cells.shape))
    else:
        cells[rows, positions] = pages.index_select(0, blocks)


def _scatter(
    pages: torch.Tensor, cells: torch.Tensor, where: torch.Tensor, *, is_whole: bool
) -> None:
    rows, positions, blocks = where
    source = cells.reshape(-1, cells.shape[2]) if is_whole else cells[rows, positions]
    pages.index_copy_(0, blocks, source)


def _rows_of(part: GroupCopies) -> tuple[npt.NDArray[np.int64], BlockIds]:
    """Return each device block's index among the part's slots, and those slots in order."""
    is_new = np.ones(len(part.slots), dtype=bool)
    is_new[1:] = part.slots[1:] != part.slots[:-1]
    return np.cumsum(is_new, dtype=np.int64) - 1, part.slots[is_new]


def _runs(slots: BlockIds, longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row, slot, count) for each run of consecutive, increasing slots."""
    begin = 0
    for end in range(1, len(slots) + 1):
        is_cut = end == len(slots) or end - begin == longest or slots[end] != slots[end - 1] + 1
        if is_cut:
            yield begin, int(slots[begin]), end - begin
            begin = end


def _widest_words(layout: KVLayout) -> tuple[int, torch.dtype]:
    """Return the size and type of the widest words that fit all page tables."""
    tables = [table for group in layout.groups for table in group]
    return next(word for word in _WORDS if all(_is_aligned(table, word[0]) for table in tables))


def _is_aligned(table: PageTable, word_bytes: int) -> bool:
    pages = table.pages
    numbers = (
        table.page_bytes,
        table.offset_bytes,
        pages.stride(0),
        pages.storage_offset(),
        pages.data_ptr(),
    )
    return not any(number % word_bytes for number in numbers)


logger = logging.getLogger(__name__)

_STREAMS = 2
_TRANSFERS_PER_STREAM = 4
_START_FAILED_S = 5.0
"""Seconds that started threads have to end if another thread cannot be started."""


class CudaTransfer(CompletableTransfer):
    """A transfer on a stream, between two timed events.

    Attributes:
        failure: The error of its launch, after which some of its operations may still run.
    """

    def __init__(self, copies: BlockCopies, after: StreamEvent, runtime: DeviceRuntime) -> None:
        super().__init__()
        self.copies = copies
        self.after = after
        self.parts: Sequence[GroupCopies] = ()
        self.num_bytes = 0
        self.started = runtime.create_event(timed=True)
        # Blocking: waiters sleep with the GIL released, instead of spinning.
        self.copied = runtime.create_event(timed=True, blocking=True)
        self.failure: Exception | None = None

    def complete(self, stream: DeviceStream) -> None:
        """Wait until no operation of the transfer runs, and publish its outcome.

        Raises:
            RuntimeError: Neither the event nor the stream could be waited for: operations may still
                run, and nothing is published.
        """
        seconds = None
        if self.failure is None:
            try:
                self.copied.synchronize()
                seconds = self.started.elapsed_time(self.copied) / 1000
            except Exception as error:  # noqa: BLE001 - published as this transfer's outcome
                self.failure = error
        if self.failure is None:
            self.end(TransferOutcome(self.num_bytes, seconds))
        else:
            stream.synchronize()  # the event need not be behind the last operation
            self.fail(self.failure)


class _Scattering:
    """Copies between rows of pinned memory, one for each device block, and slots.

    Attributes:
        rows: The pinned memory, uint8 `[num_rows, block_bytes]`.
        copier: Copies between device blocks in these rows and the slots.
    """

    def __init__(
        self,
        layout: KVLayout,
        packed: KVLayout,
        rows: torch.Tensor,
        slots: npt.NDArray[np.uint8],
        cell_offset_bytes: int,
    ) -> None:
        self.rows = rows
        groups = [
            [
                replace(table, pages=rows[:, place.offset_bytes :][:, : place.page_bytes])
                for table, place in zip(*both, strict=True)
            ]
            for both in zip(layout.groups, packed.groups, strict=True)
        ]
        in_rows = KVLayout(groups, layout.blocks_per_chunk, layout.chunk_bytes)
        self.copier = Copier(in_rows, slots, cell_offset_bytes)

    def batches(
        self, parts: Sequence[GroupCopies]
    ) -> Iterator[tuple[int, GroupCopies, Sequence[GroupCopies]]]:
        """Divide a transfer into batches that fit into the rows.

        Yields:
            (group, copies between rows and slots, copies of all groups between device and rows)
        """
        for group, part in enumerate(parts):
            for first in range(0, len(part.blocks), len(self.rows)):
                mine = slice(first, first + len(self.rows))
                rows = np.arange(len(part.blocks[mine]), dtype=np.int32)
                none = GroupCopies(rows[:0], rows[:0], rows[:0])
                to_rows = [none] * len(parts)
                to_rows[group] = GroupCopies(part.blocks[mine], rows, np.zeros_like(rows))
                yield group, GroupCopies(rows, part.slots[mine], part.positions[mine]), to_rows


@dataclass(slots=True)
class _StagedStream:
    """One pooled stream and its staging memory.

    Attributes:
        copies: Copies by way of the staging memory.
        scattering: Its pinned memory; None if the copies are to the slots.
        launched: Transfers to wait for.
        room: Number of further transfers that may be launched.
    """

    stream: DeviceStream
    staging: torch.Tensor
    copies: StagedCopies
    scattering: _Scattering | None = None
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
        num_streams: int = _STREAMS,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        """Pin the primary's memory, create the streams and start their threads.

        Args:
            layout: The device's tensors.
            kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8.
            cell_offset_bytes: Offset of this worker's cell in a slot.
            staging_bytes: Device memory for staging, on each stream.
            num_streams: Streams of each direction.
            runtime: The device's runtime; by default CUDA's.

        Raises:
            ConfigError: The tensors are not on the runtime's device, a slot is too small for a
                chunk, or the memory cannot be allocated or pinned.
            RuntimeError: A thread cannot be started.
        """
        self._runtime = runtime or DeviceRuntime()
        if layout.device.type != self._runtime.device_type:
            raise ConfigError(
                f"kv_caches: the tensors are on {layout.device}; use the host transport"
            )
        rows = np.asarray(kv_view)
        layout.require_room(rows.shape[1], cell_offset_bytes)
        self._layout = layout
        self._device = layout.device
        self._host = torch.from_numpy(rows)
        self._num_slots = rows.shape[0]
        self._cell_offset_bytes = cell_offset_bytes
        self._streams: dict[Direction, list[_StagedStream]] = {
            direction: [] for direction in (Direction.LOAD, Direction.STORE)
        }
        try:
            for streams in self._streams.values():
                for _ in range(num_streams if layout.is_contiguous else 1):
                    streams.append(self._create_stream(staging_bytes))
            self._has_pinned = self._pin()
        except BaseException as error:
            self._release_streams()
            if not isinstance(error, RuntimeError):
                raise
            raise ConfigError(
                f"device: cannot create streams with staging memory on {self._device}, or pin the "
                f"slots: {error}"
            ) from error
        self._release_pages = hold_pages(kv_view, f"a transport of {self._device}")
        self._submitted: dict[Direction, queue.SimpleQueue[CudaTransfer | None]] = {
            direction: queue.SimpleQueue() for direction in self._streams
        }
        self._closed = False
        self._lost: str | None = None
        """The error after which it is unknown whether copies still run; None without an error."""
        self._incomplete: list[CudaTransfer] = []
        """Transfers whose copies may run for ever; `close` publishes their outcomes."""
        self._threads: list[threading.Thread] = []
        try:
            for direction, streams in self._streams.items():
                name = f"kvoffload-cuda-{direction.name.lower()}"
                self._start(name, self._launch_all, direction)
                for index, staged in enumerate(streams):
                    self._start(f"{name}-{index}", self._complete_all, staged)
        except BaseException:
            self.close(_START_FAILED_S)
            raise

    def record_compute(self) -> ComputeEvent:
        event = self._runtime.create_event()
        event.record(self._runtime.current_stream(self._device))
        return event

    def submit(self, copies: BlockCopies, after: ComputeEvent) -> Transfer:
        if not self._runtime.is_event(after):
            raise StateError("the compute event belongs to another transport")
        transfer = CudaTransfer(copies, after, self._runtime)
        if self._closed:
            transfer.fail(TransportError("the transport is closed"))
            return transfer
        if self._lost is not None:
            transfer.fail(self._lost_error())
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
        while self._incomplete:
            self._incomplete.pop().fail(self._lost_error())
        if self._lost is not None or not self._unpin():
            return False
        self._host = torch.empty(0)
        self._release_streams()
        self._release_pages()
        return True

    # -- internal -------------------------------------------------------------------------------

    def _create_stream(self, staging_bytes: int) -> _StagedStream:
        stream = self._runtime.create_stream(self._device)
        # Allocate on this stream; otherwise earlier users of the memory might still be running.
        layout, slots, offset = self._layout, self._host, self._cell_offset_bytes
        if not layout.is_contiguous:
            layout, offset = layout.packed(), 0
            num_rows = max(1, staging_bytes // layout.chunk_bytes)
            slots = torch.empty((num_rows, layout.chunk_bytes), dtype=torch.uint8)
            slots = self._runtime.pin_memory(slots)
        copies = StagedCopies(layout, slots, offset)
        with self._runtime.stream(stream):
            shape = copies.staging_shape(staging_bytes)
            staging = self._runtime.empty(shape, torch.uint8, self._device)
        scattering = None
        if layout is not self._layout:  # last, because it has threads
            offset = self._cell_offset_bytes
            scattering = _Scattering(self._layout, layout, slots, self._host.numpy(), offset)
        return _StagedStream(stream, staging, copies, scattering)

    def _release_streams(self) -> None:
        for staged in itertools.chain(*self._streams.values()):
            staged.copies.release()
            if staged.scattering is not None:
                staged.scattering.copier.close()
        self._streams.clear()

    def _launch_all(self, direction: Direction) -> None:
        """Launch submitted transfers on the streams in turn. Thread: the direction's."""
        self._use_device()
        streams = self._streams[direction]
        turns = itertools.cycle(streams)
        while (transfer := self._submitted[direction].get()) is not None:
            if self._lost is not None:
                transfer.fail(self._lost_error())
                continue
            staged = next(turns)
            staged.room.acquire()
            try:
                self._launch(transfer, staged)
            except Exception as error:  # noqa: BLE001 - published as this transfer's outcome
                transfer.failure = error
            staged.launched.put(transfer)
        for staged in streams:
            staged.launched.put(None)

    def _launch(self, transfer: CudaTransfer, staged: _StagedStream) -> None:
        with self._runtime.stream(staged.stream):
            # The first record creates an event, which a device short of memory refuses: so before
            # the first copy.
            transfer.copied.record(staged.stream)
            staged.stream.wait_event(transfer.after)
            transfer.started.record(staged.stream)
            direction = transfer.copies.direction
            if staged.scattering is None:
                self._perform(direction, transfer.parts, staged)
            else:
                self._perform_scattered(direction, transfer.parts, staged, staged.scattering)
            transfer.copied.record(staged.stream)

    def _perform(
        self, direction: Direction, parts: Sequence[GroupCopies], staged: _StagedStream
    ) -> None:
        """Queue copies on the thread's current stream."""
        plan = staged.copies.plan(parts, staged.staging.shape[0])
        if plan.extents:
            # From pinned memory, so that the copy does not synchronize the stream.
            pinned = self._runtime.pin_memory(torch.from_numpy(plan.index))
            index = self._runtime.empty(pinned.shape, pinned.dtype, self._device)
            index.copy_(pinned, non_blocking=True)
            staged.copies.perform(direction, plan, index, staged.staging)

    def _perform_scattered(
        self,
        direction: Direction,
        parts: Sequence[GroupCopies],
        staged: _StagedStream,
        scattering: _Scattering,
    ) -> None:
        """Copy batch by batch; the last one of a load is only queued."""
        for group, batch, to_rows in scattering.batches(parts):
            if direction is Direction.LOAD:
                # The rows are free when the copies of the batch before have ended.
                staged.stream.synchronize()
                scattering.copier.copy(direction, group, batch)
                self._perform(direction, to_rows, staged)
            else:
                self._perform(direction, to_rows, staged)
                staged.stream.synchronize()
                scattering.copier.copy(direction, group, batch)

    def _complete_all(self, staged: _StagedStream) -> None:
        """Publish the outcomes of a stream's transfers, in order. Thread: the stream's."""
        self._use_device()
        while (transfer := staged.launched.get()) is not None:
            try:
                transfer.complete(staged.stream)
            except Exception as error:  # noqa: BLE001 - the outcome follows when closing
                self._incomplete.append(transfer)
                self._lose(error)
            staged.room.release()

    def _use_device(self) -> None:
        try:
            self._runtime.set_device(self._device)
        except Exception as error:  # noqa: BLE001 - fails all transfers, at once
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        drop_tracebacks(error)
        if self._lost is None:
            self._lost = text_of(error)
            logger.error(
                "%s is lost, and slots of its copies stay in use; restart this process: %s",
                self._device,
                self._lost,
            )

    def _lost_error(self) -> TransportError:
        return TransportError(f"{self._device} is lost: {self._lost}")

    def _pin(self) -> bool:
        """Pin the slots; return False if another worker of this process has pinned them."""
        if self._runtime.is_pinned(self._host):
            return False
        host = self._host
        code = int(self._runtime.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if code:
            raise ConfigError(
                f"cpu_bytes_to_use: {host.nbytes} bytes cannot be pinned (CUDA error "
                f"{code}); use less, or raise the limit of locked memory"
            )
        return True

    def _unpin(self) -> bool:
        """Unpin the slots if this transport has pinned them; return False if that fails."""
        if self._has_pinned:
            code = int(self._runtime.cudart().cudaHostUnregister(self._host.data_ptr()))
            if code:
                logger.error("the slots stay pinned: they cannot be unpinned (CUDA error %d)", code)
                return False
            self._has_pinned = False
        return True

    def _start(self, name: str, target: Callable[..., None], subject: object) -> None:
        thread = threading.Thread(target=target, args=(subject,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
