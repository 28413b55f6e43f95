"""The addresses of the functions that the native engine hashes with, from the package xxhash."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import xxhash

_NAMES = (
    ("XXH3_64bits_dispatch", "XXH3_64bits"),
    ("XXH3_128bits_withSeed_dispatch", "XXH3_128bits_withSeed"),
    ("XXH3_createState",),
    ("XXH3_128bits_reset_withSeed",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
    ("XXH3_freeState",),
)


@functools.cache
def addresses() -> tuple[int, ...]:
    """Return them in the engine's order."""
    (path,) = Path(xxhash.__file__).parent.glob("_xxhash*.so")
    library = ctypes.CDLL(str(path))
    return tuple(_address(library, names) for names in _NAMES)


def _address(library: ctypes.CDLL, names: tuple[str, ...]) -> int:
    """Return that of the first function there is."""
    function = next(getattr(library, name) for name in names if hasattr(library, name))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
