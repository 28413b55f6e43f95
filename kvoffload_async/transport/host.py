"""A transport on host tensors that simulates an accelerator.

Copies with native threads, or with numpy if they are disabled.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

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
from kvoffload_async.block_io.choice import create_copies
from kvoffload_async.errors import StateError, TransportError
from kvoffload_async.transport.completion import CompletableTransfer
from kvoffload_async.transport.layout import CopyRun, KVLayout, PageTable

if TYPE_CHECKING:
    import torch

    from kvoffload_async.block_io.native_copies import Copies, Memory


Bytes = npt.NDArray[np.uint8]

_START_FAILED_S = 5.0

LEAST_BYTES = 256 << 10
"""Minimum bytes copied by native threads; for less, waking a thread takes longer than copying."""


class _Table(NamedTuple):
    """The layout of one tensor's pages, for native copies.

    Attributes:
        device: Its bytes, including gaps between pages.
        stride_bytes: Distance between pages.
        slot_page_bytes: Distance between pages in a slot.
        cell_bytes: Offset of its first page in a slot.
        runs: Its `CopyRun`s, int64 `[num_runs, 6]`.
    """

    device: Memory
    stride_bytes: int
    slot_page_bytes: int
    cell_bytes: int
    runs: npt.NDArray[np.int64]


class Copier:
    """Copies between a layout's tensors and slots, with native threads or numpy.

    Native threads copy all tensors of a group at once. Numpy copies small parts, and all parts
    without native code; it holds the GIL. Not thread-safe.
    """

    def __init__(self, layout: KVLayout, rows: Bytes, cell_offset_bytes: int) -> None:
        """Map the memory and start the threads.

        Args:
            layout: The tensors.
            rows: The slots, `[num_slots, slot_bytes]`.
            cell_offset_bytes: Offset of this worker's cell in a slot.

        Raises:
            ConfigError: Native code is required but unavailable.
            OSError: Threads cannot be started.
        """
        self._slot_bytes = rows.shape[1]
        self._block_bytes = layout.block_bytes
        per_chunk = layout.blocks_per_chunk
        self._groups = [
            [
                (
                    _fragments(table.pages.numpy(), run),
                    _cells(rows, cell_offset_bytes, table, run, per_chunk),
                )
                for table in group
                for run in table.runs
            ]
            for group in layout.groups
        ]
        self._copies = copies = create_copies()
        if copies is None:
            return
        self._host = copies.map(rows)
        self._tables = [
            [
                _Table(
                    copies.map(_flat(table.pages)),
                    table.pages.stride(0),
                    table.slot_page_bytes,
                    cell_offset_bytes + table.offset_bytes,
                    np.array(table.runs, dtype=np.int64),
                )
                for table in group
            ]
            for group in layout.groups
        ]

    def copy(self, direction: Direction, group: int, part: GroupCopies) -> None:
        """Copy one group's part of a transfer; blocks until done."""
        is_small = len(part.blocks) * self._block_bytes[group] < LEAST_BYTES
        if self._copies is not None and not is_small:
            self._copies.copy(self._batches(direction, self._tables[group], part))
            return
        for device, host in self._groups[group]:
            if direction is Direction.STORE:
                host[part.slots, part.positions] = device[part.blocks]
            else:
                device[part.blocks] = host[part.slots, part.positions]

    def close(self) -> None:
        """End the threads, and release the memory."""
        self._groups.clear()
        if self._copies is not None:
            self._copies.close()
            for memory in (self._host, *(t.device for group in self._tables for t in group)):
                memory.release()

    def _batches(
        self, direction: Direction, tables: Sequence[_Table], part: GroupCopies
    ) -> Iterator[Copies]:
        # Imported here, because the native module may be missing.
        from kvoffload_async.block_io.native_copies import Copies  # noqa: PLC0415

        is_store = direction is Direction.STORE
        blocks, positions = part.blocks.astype(np.int64), part.positions.astype(np.int64)
        slots = part.slots.astype(np.int64) * self._slot_bytes
        # A run has the page's numbers first, and a copy those of the target.
        columns = [1, 0, 2, 3, 5, 4] if is_store else [0, 1, 2, 3, 4, 5]
        on_device, on_host = (1, 0) if is_store else (0, 1)
        for table in tables:
            parts = np.empty((len(blocks), len(table.runs), 6), dtype=np.int64)
            parts[:] = table.runs[:, columns]
            parts[..., on_device] += (blocks * table.stride_bytes)[:, None]
            cells = slots + positions * table.slot_page_bytes + table.cell_bytes
            parts[..., on_host] += cells[:, None]
            memories = (self._host, table.device) if is_store else (table.device, self._host)
            yield Copies(*memories, parts.reshape(-1, 6))


def _flat(pages: torch.Tensor) -> Bytes:
    """Return a tensor's bytes from the first page to the last, including gaps."""
    size = (pages.shape[0] - 1) * pages.stride(0) + pages.shape[1]
    flat: Bytes = pages.as_strided((size,), (1,)).numpy()
    return flat


def _fragments(pages: Bytes, run: CopyRun) -> Bytes:
    """Return a run's part of every page: `[num_blocks, num_fragments, fragment_bytes]`, a view."""
    return np.lib.stride_tricks.as_strided(
        pages[:, run.page_offset :],
        (len(pages), run.num_fragments, run.fragment_bytes),
        (pages.strides[0], run.page_stride, 1),
    )


def _cells(
    rows: Bytes, offset_bytes: int, table: PageTable, run: CopyRun, blocks_per_chunk: int
) -> Bytes:
    """Return a run's part of every slot, a view.

    Shape: `[num_slots, blocks_per_chunk, num_fragments, fragment_bytes]`.
    """
    return np.lib.stride_tricks.as_strided(
        rows[:, offset_bytes + table.offset_bytes + run.slot_offset :],
        (len(rows), blocks_per_chunk, run.num_fragments, run.fragment_bytes),
        (rows.strides[0], table.slot_page_bytes, run.slot_stride, 1),
    )


class HostEvent(threading.Event):
    """An event in the simulated compute stream; `set` triggers it."""

    def __init__(self, *, reached: bool = True) -> None:
        super().__init__()
        if reached:
            self.set()


class HostTransfer(CompletableTransfer):
    """A transfer of the host transport."""

    def __init__(self, copies: BlockCopies, after: HostEvent) -> None:
        super().__init__()
        self.copies = copies
        self.after = after
        self.parts: Sequence[GroupCopies] = ()


class HostTransport(Transport):
    """Copies between host tensors that simulate a device and the primary's slots.

    Attributes:
        before_copy: Direction -> called with each transfer before it copies; may block or raise.
            For tests, which may change it at any time.
    """

    is_on_host = True

    def __init__(
        self,
        layout: KVLayout,
        kv_view: memoryview,
        *,
        cell_offset_bytes: int = 0,
        compute_timeout_s: float = 30.0,
    ) -> None:
        """Start one thread per direction.

        Args:
            layout: The device's tensors.
            kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8.
            cell_offset_bytes: Offset of this worker's cell in a slot.
            compute_timeout_s: Seconds to wait for a compute event before the transfer fails.

        Raises:
            ConfigError: A slot is too small for a chunk, or native code is required but
                unavailable.
            OSError, RuntimeError: Threads cannot be started; none is left running.
        """
        rows = np.asarray(kv_view)
        layout.require_room(rows.shape[1], cell_offset_bytes)
        self._release_pages = hold_pages(kv_view, "a host transport")
        self._num_slots = rows.shape[0]
        self.before_copy: dict[Direction, Callable[[BlockCopies], None] | None] = {}
        self._layout = layout
        self._compute_timeout_s = compute_timeout_s
        self._closed = False
        self._copiers: dict[Direction, Copier] = {}
        self._submitted: dict[Direction, queue.SimpleQueue[HostTransfer | None]] = {
            direction: queue.SimpleQueue() for direction in (Direction.LOAD, Direction.STORE)
        }
        self._threads: list[threading.Thread] = []
        try:
            for direction in self._submitted:
                copier = self._copiers[direction] = Copier(layout, rows, cell_offset_bytes)
                try:
                    self._start(direction)
                except BaseException:
                    copier.close()
                    raise
        except BaseException:
            self.close(_START_FAILED_S)
            raise

    def record_compute(self) -> HostEvent:
        """Return a triggered event: computing on the host is synchronous."""
        return HostEvent()

    def submit(self, copies: BlockCopies, after: ComputeEvent) -> Transfer:
        if not isinstance(after, HostEvent):
            raise StateError("the compute event belongs to another transport")
        transfer = HostTransfer(copies, after)
        if self._closed:
            transfer.fail(TransportError("the transport is closed"))
            return transfer
        try:
            transfer.parts = self._layout.resolve(copies, self._num_slots)
        except TransportError as error:
            transfer.fail(error)
            return transfer
        self._submitted[copies.direction].put(transfer)
        return transfer

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        for submitted in self._submitted.values():
            submitted.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._release_pages()
        return True

    # -- internal -------------------------------------------------------------------------------

    def _start(self, direction: Direction) -> None:
        name = f"kvoffload-copy-{direction.name.lower()}"
        thread = threading.Thread(target=self._serve, args=(direction,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self, direction: Direction) -> None:
        """Perform the transfers of a direction in order, then close its copier."""
        while (transfer := self._submitted[direction].get()) is not None:
            started_s = time.monotonic()
            try:
                self._perform(direction, transfer)
            except Exception as error:  # noqa: BLE001 - published as this transfer's outcome
                transfer.fail(error)
            else:
                seconds = time.monotonic() - started_s
                num_bytes = self._layout.num_bytes(transfer.parts)
                transfer.end(TransferOutcome(num_bytes, seconds))
        self._copiers[direction].close()

    def _perform(self, direction: Direction, transfer: HostTransfer) -> None:
        if not transfer.after.wait(self._compute_timeout_s):
            raise TransportError("the compute event timed out")
        if (hook := self.before_copy.get(direction)) is not None:
            hook(transfer.copies)
        for index, part in enumerate(transfer.parts):
            self._copiers[direction].copy(direction, index, part)
