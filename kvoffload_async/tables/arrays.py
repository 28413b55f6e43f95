"""Tables indexed by number, which take memory for the numbers in use, not for their capacity.

A directory may have a capacity of hundreds of millions of blocks and contain few: its tables must
open at once and grow without a pause. The garbage collector does not traverse them.

Integers are views of anonymous memory, which the kernel commits and zeroes page by page at the
first write. So growing copies nothing, and an access costs no more than in an array; memoryviews
access single items faster than numpy does. Objects cannot be left to the kernel: None is not a zero
byte, and freeing an array of objects reads all of it. They are in parts, added at the first use.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

MAX_NUMBERS: Final = 1 << 28
"""Maximum number of blocks that can be numbered; their tables would take 40 GB."""


def integers(count: int) -> memoryview:
    """Return an array of zeros, 4 bytes each."""
    return _zeros(count, "i", 4)


def long_integers(count: int) -> memoryview:
    """Return an array of zeros, 8 bytes each."""
    return _zeros(count, "q", 8)


def small_integers(count: int) -> memoryview:
    """Return an array of zeros, 1 byte each."""
    return _zeros(count, "B", 1)


def _zeros(count: int, item_format: Literal["i", "q", "B"], item_bytes: int) -> memoryview:
    size_bytes = count * item_bytes
    try:
        memory = mmap.mmap(
            -1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # private: a forked process must not share it
    except OSError as error:
        raise MemoryError(f"no address space for a table of {size_bytes} bytes") from error
    # A step that first writes to huge pages of several tables would zero megabytes.
    with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(memory)[:size_bytes].cast(item_format)


PART_BITS: Final = 12
_PART: Final = 1 << PART_BITS
PART_MASK: Final = _PART - 1


def _part() -> npt.NDArray[np.object_]:
    return np.empty(_PART, dtype=object)


class Objects:
    """Objects by number, initially None; in parts of 4,096, 8 bytes per number.

    Attributes:
        parts: The object of a number is `parts[number >> PART_BITS][number & PART_MASK]`, which
            adds the part if needed; for loops that do more than one thing with each number.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: defaultdict[int, npt.NDArray[np.object_]] = defaultdict(_part)

    def get(self, number: int) -> Any:  # noqa: ANN401 - any object
        """Return the object of a number."""
        return self.parts[number >> PART_BITS][number & PART_MASK]

    def find(self, numbers: Iterable[int]) -> list[Any]:
        """Return the objects of numbers."""
        parts = self.parts
        return [parts[number >> PART_BITS][number & PART_MASK] for number in numbers]

    def find_range(self, numbers: range) -> list[Any]:
        """Return the objects of consecutive numbers; several times faster than `find`."""
        found: list[Any] = []
        number = numbers.start
        while number < numbers.stop:
            which, start = number >> PART_BITS, number & PART_MASK
            found += self.parts[which][start : start + numbers.stop - number].tolist()
            number = (which + 1) << PART_BITS
        return found

    def update(self, numbers: Sequence[int], objects: Sequence[Any]) -> None:
        """Set the objects of numbers."""
        parts = self.parts
        for number, each in zip(numbers, objects, strict=True):
            parts[number >> PART_BITS][number & PART_MASK] = each

    def clear(self) -> None:
        """Set all objects to None."""
        self.parts.clear()
