"""The contract of a device transport: moving blocks between device memory and primary slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
        device: The device blocks, group after group; see `GPULoadStoreSpec`.
        host: The slots, one a chunk, group after group.
    """

    direction: Direction
    device: GPULoadStoreSpec
    host: CPULoadStoreSpec


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """The part of a transfer that concerns one KV-cache group.

    Attributes:
        blocks: Device blocks, int32 `[n]`.
        slots: The slot of each device block, int32 `[n]`.
        places: The place of each device block within its chunk, int32 `[n]`.
    """

    blocks: BlockIds
    slots: BlockIds
    places: BlockIds


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How a transfer ended.

    Attributes:
        num_bytes: Bytes of the transfer.
        seconds: Duration of the copies on the device, where known.
        error: Why it failed, or None.
    """

    num_bytes: int
    seconds: float | None = None
    error: Exception | None = None


class Transfer(ABC):
    """One submitted transfer."""

    @abstractmethod
    async def outcome(self) -> TransferOutcome:
        """Await the end; a cancelled wait does not end the copies. Thread: loop.

        No byte may move any more when it returns or raises: whatever is not a `TransferOutcome`
        counts as the end of a transfer that has failed.
        """

    @abstractmethod
    def synchronize(self, timeout_s: float) -> bool:
        """Wait until no byte moves any more; False if `timeout_s` was not enough. Thread: any."""


class Transport(ABC):
    """Copies blocks on streams of its own.

    Guaranteed by the caller: slots and device blocks of a transfer stay as they are until it has
    ended.

    The implementation is responsible for: ordering each transfer after the compute event that
    comes with it and, within a direction, after the transfer before it; a number of launches that
    does not grow with layers times blocks where the device can; a failure that is an outcome,
    never an exception out of another transfer; holding the slots' pages (`hold_pages`) until the
    last copy has ended and nothing is pinned.

    Thread: the worker's, for all but `Transfer.outcome`.
    """

    @abstractmethod
    def record_compute(self) -> ComputeEvent:
        """Return the present end of the caller's compute stream."""

    @abstractmethod
    def submit(self, copies: BlockCopies, after: ComputeEvent) -> Transfer:
        """Queue a transfer behind `after`. Never waits."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Let both directions end; False if one did not, and then host memory must stay mapped."""


def group_copies(copies: BlockCopies, blocks_per_chunk: int) -> Sequence[GroupCopies]:
    """Return, group by group, which device block goes with which slot and place.

    A group's first device block may lie inside a chunk, at `block_indices[g] % blocks_per_chunk`;
    its last chunk may be cut short.

    Raises:
        ValueError: The numbers of device blocks and slots do not go together.
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
