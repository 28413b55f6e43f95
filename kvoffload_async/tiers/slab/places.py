"""A place: the slot of a segment where a block lies, as one integer.

Slots of one segment are neighbours as integers; the last of a segment and the first of the next
never are, so that a run of places is always within one file.
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

Place = int
"""Segment in the upper bits, slot in the lower 32."""

PlaceOrPlaces = TypeVar("PlaceOrPlaces", Place, npt.NDArray[np.int64])

_SLOT_BITS: Final = 32
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1

MAX_SLOTS: Final = _SLOT_MASK
"""Slots that a segment may have; one less than fit, for the gap between segments."""


def place_of(segment: int, slot: int) -> Place:
    """Return the place of a slot."""
    return segment << _SLOT_BITS | slot


def segment_of(place: PlaceOrPlaces) -> PlaceOrPlaces:
    """Return the segment of a place, or of each of an array of them."""
    return place >> _SLOT_BITS


def slot_of(place: PlaceOrPlaces) -> PlaceOrPlaces:
    """Return the slot of a place, or of each of an array of them."""
    return place & _SLOT_MASK
