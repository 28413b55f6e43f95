"""Counts the bytes of tables of integers, which tracemalloc does not see: they are mapped."""

import mmap
import weakref
from contextlib import contextmanager
from unittest.mock import patch

from kvoffload_async.tables import arrays


@contextmanager
def counted_tables():
    """Yield a function that returns the bytes of the tables made within and still referenced."""
    maps = weakref.WeakSet()

    class Counted(mmap.mmap):
        def __new__(cls, *args, **kwargs):
            made = super().__new__(cls, *args, **kwargs)
            maps.add(made)
            return made

        __hash__ = object.__hash__

    with patch.object(arrays.mmap, "mmap", Counted):
        yield lambda: sum(map(len, maps))
