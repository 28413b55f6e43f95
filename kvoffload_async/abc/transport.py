"""The contract of a device transport: copying blocks between device memory and primary slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvoffload_async.abc.tier import Direction
from kvoffload_async.types import BlockIds, CPULoadStoreSpec, GPULoadStoreSpec


class ComputeEvent(Protocol):
    """A point in the caller's compute stream; opaque outside of its transport."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """One transfer: device blocks on one side, primary slots on the other.

    Attributes:
        direction: STORE for device to host, LOAD for host to device.
        device: The device blocks, ordered by group; see `GPULoadStoreSpec`.
        host: The slots, one per chunk, ordered by group.
    """

    direction: Direction
    device: GPULoadStoreSpec
    host: CPULoadStoreSpec


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """The part of a transfer in one KV-cache group.

    Attributes:
        blocks: Device blocks, int32 `[n]`.
        slots: The slot of each device block, int32 `[n]`.
        positions: Index of each device block within its chunk, int32 `[n]`.
    """

    blocks: BlockIds
    slots: BlockIds
    positions: BlockIds


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The result of a transfer.

    Attributes:
        num_bytes: Bytes of the transfer.
        seconds: Duration of the copies on the device, if known.
        error: The failure, or None.
    """

    num_bytes: int
    seconds: float | None = None
    error: Exception | None = None


class Transfer(ABC):
    """One submitted transfer."""

    @abstractmethod
    async def outcome(self) -> TransferOutcome:
        """Await the outcome; cancelling the wait does not cancel the copies. Thread: loop.

        No byte may move any more when this returns or raises: an exception counts as a failed
        transfer that has ended. The exception is a transfer that failed as `Transport.close`
        returned False.
        """

    @abstractmethod
    def synchronize(self, timeout_s: float) -> bool:
        """Wait until no byte moves any more; return False on timeout. Thread: any."""


class Transport(ABC):
    """Copies blocks between device and host on streams of its own.

    Guaranteed by the caller: slots and device blocks of a transfer stay unchanged until it has
    ended.

    The implementation is responsible for: ordering each transfer after its compute event; a number
    of launches independent of layers times blocks, if the device supports it; reporting a failure
    only as the outcome of its own transfer, after its last copy; holding the slots' pages
    (`hold_pages`) until the last copy has ended and nothing is pinned. Transfers need not wait for
    each other.

    If a device no longer says whether the copies of a transfer run, the transfer has no outcome,
    later ones fail at once, and `close` fails the transfer and returns False.

    Thread: the worker's, except for `Transfer.outcome`.

    Attributes:
        is_on_host: Whether the device blocks are in host memory, so that the caller's CPUs copy.
    """

    is_on_host = False

    @abstractmethod
    def record_compute(self) -> ComputeEvent:
        """Return an event for the current end of the caller's compute stream."""

    @abstractmethod
    def submit(self, copies: BlockCopies, after: ComputeEvent) -> Transfer:
        """Queue a transfer behind `after`. Never blocks."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Wait for transfers of both directions; all have an outcome if this returns in time.

        Returns:
            False on timeout, or if copies may still run: host and device memory must stay mapped.
        """


def group_copies(copies: BlockCopies, blocks_per_chunk: int) -> Sequence[GroupCopies]:
    """Return, for each group, the slot and the position of each device block.

    A group's first device block may lie inside a chunk, at `block_indices[g] % blocks_per_chunk`;
    its last chunk may be partial.

    Raises:
        ValueError: The numbers of device blocks and slots do not match.
    """
    device, slots = copies.device, copies.host.block_ids
    sizes = device.group_sizes or (len(device.block_ids),)
    firsts = device.block_indices or (0,) * len(sizes)
    if sum(sizes) != len(device.block_ids) or len(firsts) != len(sizes):
        raise ValueError("group_sizes or block_indices do not describe block_ids")
    parts = []
    block_at = slot_at = 0
    for size, first in zip(sizes, firsts, strict=True):
        skip = first % blocks_per_chunk
        positions = np.arange(skip, skip + size, dtype=np.int32)
        chunks = -(-(skip + size) // blocks_per_chunk) if size else 0
        mine = slots[slot_at : slot_at + chunks]
        if len(mine) != chunks:
            raise ValueError(f"{chunks} slots are needed for a group, {len(mine)} are given")
        parts.append(
            GroupCopies(
                device.block_ids[block_at : block_at + size],
                mine[positions // blocks_per_chunk],
                positions % blocks_per_chunk,
            )
        )
        block_at += size
        slot_at += chunks
    if slot_at != len(slots):
        raise ValueError(f"{len(slots)} slots are given, {slot_at} are needed")
    return parts


@runtime_checkable
class HoldablePages(Protocol):
    """Memory that is returned to the system only after every hold on it has been released."""

    def hold(self, who: str) -> Callable[[], None]:
        """Keep the memory's pages mapped; see `hold_pages`."""
        ...


def hold_pages(view: memoryview, who: str) -> Callable[[], None]:
    """Keep the pages under a view mapped until the returned function is called.

    For transports and other background copies: a view reserves the address range, but does not keep
    its pages. Has no effect on memory that is not `HoldablePages`, such as an external mapping.

    Args:
        view: The primary's buffer, or a part of it.
        who: Name of the holder, for messages.

    Returns:
        The release function; call it when no byte moves any more and nothing is pinned. Idempotent
        and thread-safe.
    """
    if isinstance(view.obj, HoldablePages):
        return view.obj.hold(who)
    return _nothing


def _nothing() -> None:
    """Release nothing: the memory was not held."""
