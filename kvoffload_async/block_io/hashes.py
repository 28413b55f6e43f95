"""Addresses of the C functions of the `xxhash` package and of OpenSSL, for native code.

The package's shared object exports the C library, including streaming functions, so that neither
the algorithm nor a private structure has to be duplicated. OpenSSL is the one that the interpreter
has loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Final

_NAMES: Final = (
    "XXH3_64bits",
    "XXH3_createState",
    "XXH3_128bits_reset_withSeed",
    "XXH3_128bits_update",
    "XXH3_128bits_digest",
    "XXH3_freeState",
)
"""Names of the C functions, in the order of the native engine's parameters."""

_CIPHER_NAMES: Final = (
    "EVP_CIPHER_CTX_new",
    "EVP_CIPHER_CTX_free",
    "EVP_CipherInit_ex",
    "EVP_CipherUpdate",
    "EVP_CipherFinal_ex",
    "EVP_CIPHER_CTX_ctrl",
    "EVP_aes_256_gcm",
    "EVP_sha256",
    "HMAC",
)
"""Names of OpenSSL's functions, in the order of `struct ciphers` in block_io.h."""


def addresses() -> tuple[int, ...]:
    """Return the addresses of the C functions; prefers variants that dispatch by processor.

    Raises:
        OSError: The shared object is missing, or cannot be opened.
        AttributeError: A function is not exported.
    """
    found = importlib.util.find_spec("xxhash._xxhash")
    if found is None or found.origin is None:
        raise OSError("the xxhash package has no shared object")
    library = ctypes.CDLL(found.origin)
    return tuple(_address(library, name) for name in _NAMES)


def cipher_addresses() -> tuple[int, ...]:
    """Return the addresses of OpenSSL's functions.

    Raises:
        OSError: The interpreter has no OpenSSL, or one that is linked statically.
        AttributeError: A function is not exported.
    """
    library = _openssl()
    return tuple(_address(library, name) for name in _CIPHER_NAMES)


def openssl_version() -> tuple[int, int]:
    """Return the major and the minor version of OpenSSL; see `cipher_addresses`."""
    number: int = _openssl().OpenSSL_version_num()
    return number >> 28, number >> 20 & 0xFF


def _openssl() -> ctypes.CDLL:
    found = importlib.util.find_spec("_hashlib")
    if found is None or not found.has_location:
        raise OSError("the interpreter loads no OpenSSL as a shared library")
    return ctypes.CDLL(found.origin)


def _address(library: ctypes.CDLL, name: str) -> int:
    function = getattr(library, f"{name}_dispatch", None) or getattr(library, name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0
