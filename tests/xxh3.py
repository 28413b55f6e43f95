"""The addresses of the functions that the native engine hashes with, from the package xxhash."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import xxhash

_NAMES = (
    ("XXH3_64bits_dispatch", "XXH3_64bits"),
    ("XXH3_createState",),
    ("XXH3_128bits_reset_withSeed",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
    ("XXH3_freeState",),
)


@functools.cache
def _library() -> ctypes.CDLL:
    (path,) = Path(xxhash.__file__).parent.glob("_xxhash*.so")
    return ctypes.CDLL(str(path))


def address_of(*names: str) -> int:
    """Return the address of the first of these functions that there is."""
    function = next(getattr(_library(), name) for name in names if hasattr(_library(), name))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def addresses() -> tuple[int, ...]:
    """Return all of them, in the engine's order."""
    return tuple(address_of(*names) for names in _NAMES)
