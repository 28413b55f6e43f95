"""Addresses: the segment and slot of a block, packed into one integer; and runs of addresses.

Slots of one segment are consecutive integers; the last slot of a segment and the first of the next
are not, so that a run of addresses never spans two files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from operator import sub
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

SlotAddress = int
"""Segment in the upper bits, slot in the lower 32."""

SlotAddressOrArray = TypeVar("SlotAddressOrArray", SlotAddress, npt.NDArray[np.int64])

_SLOT_BITS: Final = 32
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1

MAX_SLOTS: Final = _SLOT_MASK
"""Maximum number of slots of a segment; one less than the bits allow, to separate segments."""


def address_of(segment: int, slot: int) -> SlotAddress:
    """Return the address of a segment's slot."""
    return segment << _SLOT_BITS | slot


def segment_of(address: SlotAddressOrArray) -> SlotAddressOrArray:
    """Return the segment of an address, or of each address in an array."""
    return address >> _SLOT_BITS


def slot_of(address: SlotAddressOrArray) -> SlotAddressOrArray:
    """Return the slot of an address, or of each address in an array."""
    return address & _SLOT_MASK


def swapped(address: int) -> int:
    """Swap the bits of segment and slot in an address, or swap them back."""
    return (address & _SLOT_MASK) << _SLOT_BITS | address >> _SLOT_BITS


class SlotNumbers:
    """Numbers the slots of all segments without gaps, to index arrays by slot.

    Attributes:
        total: Number of slots.
    """

    def __init__(self, segments: Mapping[int, int]) -> None:
        """Number the slots; `segments` maps segment to number of slots."""
        self._segments = np.array(sorted(segments), dtype=np.int64)
        self._sizes = np.array([segments[n] for n in sorted(segments)], dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.total = int(self._sizes.sum())

    def of(
        self, addresses: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return each address's number, valid only if the address exists, and whether it exists."""
        if not len(self._segments):
            return np.zeros(len(addresses), dtype=np.int64), np.zeros(
                len(addresses), dtype=np.bool_
            )
        of, slots = segment_of(addresses), slot_of(addresses)
        which = np.minimum(np.searchsorted(self._segments, of), len(self._segments) - 1)
        exists = (self._segments[which] == of) & (slots < self._sizes[which])
        return self._starts[which] + slots, exists

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield each segment, ascending, with its first slot number and the end of its numbers."""
        stops = self._starts + self._sizes
        yield from zip(self._segments.tolist(), self._starts.tolist(), stops.tolist(), strict=True)


class Run(NamedTuple):
    """Blocks at consecutive addresses.

    Attributes:
        address: Address of the first block.
        start: Index of the first block in the input.
        length: Number of blocks.
    """

    address: SlotAddress
    start: int
    length: int


def joined(addresses: Sequence[SlotAddress], start: int, stop: int) -> Sequence[Run]:
    """Return the maximal runs of adjacent addresses in `addresses[start:stop]`, which ascend."""
    if start < stop and addresses[stop - 1] - addresses[start] == stop - 1 - start:
        return [
            Run(addresses[start], start, stop - start)
        ]  # ascending and distinct: all neighbours
    runs: list[Run] = []
    # Constant within a run, and higher in later runs.
    surplus = list(map(sub, addresses[start:stop], range(stop - start)))
    at, end = 0, len(surplus)
    while at < end:
        behind = bisect_right(surplus, surplus[at], at)
        runs.append(Run(addresses[start + at], start + at, behind - at))
        at = behind
    return runs
