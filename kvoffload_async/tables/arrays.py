"""Preallocated arrays that the garbage collector does not traverse.

Views of numpy's memory, because single items are accessed faster than through numpy. The first few
million items are initialised at once: a step that first writes to 2 MiB pages of several arrays
would take milliseconds. The rest is allocated on first write, because a directory with a capacity
of hundreds of millions of blocks may contain far fewer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

MAX_NUMBERS: Final = 1 << 28
"""Maximum number of blocks that can be numbered; their tables would take 40 GB."""

_TOUCHED_AT_ONCE: Final = 1 << 22


def integers(count: int) -> memoryview:
    """Return an array of zeros, 4 bytes each."""
    zeros = np.zeros(count, dtype=np.intc)
    zeros[:_TOUCHED_AT_ONCE] = 0
    return zeros.data


def long_integers(count: int) -> memoryview:
    """Return an array of zeros, 8 bytes each."""
    zeros = np.zeros(count, dtype=np.int64)
    zeros[:_TOUCHED_AT_ONCE] = 0
    return zeros.data


def small_integers(count: int) -> memoryview:
    """Return an array of zeros, 1 byte each."""
    zeros = np.zeros(count, dtype=np.uint8)
    zeros[:_TOUCHED_AT_ONCE] = 0
    return zeros.data


def objects(count: int) -> npt.NDArray[np.object_]:
    """Return an array of None, 8 bytes each."""
    nones = np.empty(count, dtype=object)
    nones[:_TOUCHED_AT_ONCE] = None
    return nones
