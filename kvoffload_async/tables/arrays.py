"""Arrays as long as a capacity, which the collector does not look into.

Views of numpy's memory, where single items are read and written faster than through numpy. The
memory of a few million items is touched at once: a step that is the first to write to a page of two
megabytes, and that in several arrays, waits for milliseconds. Beyond, memory is taken where it is
written to: a directory with a capacity of hundreds of millions of blocks need not have so many.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

MAX_NUMBERS: Final = 1 << 28
"""More blocks than this are not to be numbered: what is known of them would take 40 GB."""

_TOUCHED_AT_ONCE: Final = 1 << 22


def integers(count: int) -> memoryview:
    """Return zeros, 4 bytes each."""
    zeros = np.zeros(count, dtype=np.intc)
    zeros[:_TOUCHED_AT_ONCE] = 0
    return zeros.data


def long_integers(count: int) -> memoryview:
    """Return zeros, 8 bytes each."""
    zeros = np.zeros(count, dtype=np.int64)
    zeros[:_TOUCHED_AT_ONCE] = 0
    return zeros.data


def small_integers(count: int) -> memoryview:
    """Return zeros, 1 byte each."""
    zeros = np.zeros(count, dtype=np.uint8)
    zeros[:_TOUCHED_AT_ONCE] = 0
    return zeros.data


def objects(count: int) -> npt.NDArray[np.object_]:
    """Return so many times None, 8 bytes each."""
    nones = np.empty(count, dtype=object)
    nones[:_TOUCHED_AT_ONCE] = None
    return nones
