"""Chooses the implementation of block I/O: native if usable, unless the environment forbids it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from kvoffload_async.abc.tier import TierEnvironment
from kvoffload_async.block_io import build
from kvoffload_async.block_io.contract import BlockDigests, BlockIo, FileCalls, Seals
from kvoffload_async.block_io.hashes import addresses, cipher_addresses, openssl_version
from kvoffload_async.block_io.python_io import PythonBlockIo
from kvoffload_async.errors import ConfigError, naming_shortage, shortage_remedy, text_of
from kvoffload_async.system_calls import REMEDY, RefusedCallError

if TYPE_CHECKING:
    from kvoffload_async.block_io.native_copies import NativeCopies
    from kvoffload_async.block_io.native_io import NativeBlockIo

logger = logging.getLogger(__name__)

VARIABLE: Final = "KVOFFLOAD_NATIVE"

_REMEDY: Final = (
    "install a C compiler and Python's development files, and reinstall kvoffload-async"
)

_FAST_OPENSSL: Final = (3, 1)
"""The first OpenSSL that encrypts as fast as the one in the package `cryptography`."""

_LARGE_BYTES: Final = 256 << 10
"""Bytes of a block from which that outweighs what native code saves; tuned by measurement."""

_OBSTACLES: Final = (AttributeError, ImportError, MemoryError, OSError, RuntimeError)


class Implementation(NamedTuple):
    """The implementation of block I/O in use.

    Attributes:
        name: "native" or "python".
        why: Why the native one is not used, with remedy; empty if it is.
    """

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


def implementation() -> Implementation:
    """Return the implementation of block I/O selected by the current environment.

    Raises:
        ConfigError: The native one is required but unavailable, or the variable is invalid.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in {"", "0", "require"}:
        raise ConfigError(f"{VARIABLE}: {wanted!r} is not valid; it must be 0, require or empty")
    if wanted == "0":
        return Implementation("python", f"{VARIABLE}=0")
    try:
        why = _obstacle()
    except _OBSTACLES as error:
        why = f"its check needs more resources ({text_of(error)}); {shortage_remedy(error)}"
    if why and wanted == "require":
        raise ConfigError(f"{VARIABLE}: the native module is required, but {why}")
    return Implementation("python", why) if why else Implementation("native")


def create_block_io(
    env: TierEnvironment,
    calls: FileCalls,
    digests: BlockDigests,
    *,
    slot_bytes: int,
    threads: int,
    piece_bytes: int,
    is_direct: bool = False,
    is_system: bool = True,
) -> BlockIo:
    """Create a tier's block I/O on the loop that awaits it.

    Args:
        env: The tier's environment; its buffer is held until the `BlockIo` is closed.
        calls: System calls, used by Python threads.
        digests: Computes checksums. With an integrity key, Python threads copy the blocks.
        slot_bytes: Distance between rows in a file.
        threads: Number of threads that copy bytes.
        piece_bytes: Approximate bytes that one Python thread copies at a time.
        is_direct: Whether files bypass the page cache; then Python threads copy misaligned rows.
        is_system: Whether `calls` are the system's own, which native threads call directly.

    Raises:
        ConfigError: See `implementation`.

    Thread: loop. A loop that cannot watch descriptors, such as a virtual one, uses Python threads.
    """
    chosen = _chosen_here()
    others = PythonBlockIo(
        env.io, calls, env.kv_view, digests, slot_bytes, threads=threads, piece_bytes=piece_bytes
    )
    seals = None if digests.cipher is None else digests.cipher.seals
    is_refused = is_direct and not others.is_aligned
    if chosen.name == "python" or is_refused or not _can_make(digests, seals, env):
        return others
    others.release()
    calls_or_system = None if is_system else calls
    return _native_io(env, calls_or_system, digests.prefix, seals, slot_bytes, threads=threads)


def create_file_io(
    env: TierEnvironment,
    calls: FileCalls,
    digests: BlockDigests,
    seals: Seals | None = None,
    *,
    threads: int,
    is_system: bool = True,
) -> NativeBlockIo | None:
    """Create native I/O for whole files; None if native code is not used.

    Arguments and errors are those of `create_block_io`. With `seals`, blocks are encrypted, and the
    attribute of a file has its seal.
    """
    chosen = _chosen_here()
    if chosen.name == "python" or not _can_make(digests, seals, env):
        return None
    row_bytes = env.kv_view.nbytes // len(env.kv_view)
    calls_or_system = None if is_system else calls
    return _native_io(env, calls_or_system, digests.prefix, seals, row_bytes, threads=threads)


def _can_make(digests: BlockDigests, seals: Seals | None, env: TierEnvironment) -> bool:
    """Return whether native code should compute the checksums or, if there are seals, encrypt."""
    if seals is None:
        return not digests.is_keyed
    if not seals.secrets:
        return False
    try:
        why = _cipher_obstacle()
    except _OBSTACLES as error:
        why = f"its check needs more resources ({text_of(error)}); {shortage_remedy(error)}"
    _log_python_encryption(why)
    row_bytes = env.kv_view.nbytes // len(env.kv_view)
    return not why and (row_bytes < _LARGE_BYTES or openssl_version() >= _FAST_OPENSSL)


def _chosen_here() -> Implementation:
    """Return the implementation for the running event loop; the native one needs `add_reader`."""
    chosen = implementation()
    _log_choice(chosen)
    loop = asyncio.get_running_loop()
    if type(loop).add_reader is asyncio.AbstractEventLoop.add_reader:
        return Implementation("python", "the event loop cannot watch descriptors")  # a virtual one
    return chosen


def create_copies() -> NativeCopies | None:
    """Create native threads for memory-to-memory copies; None if native code is not used.

    Raises:
        ConfigError: See `implementation`.
        OSError: Threads cannot be started.
    """
    chosen = implementation()
    _log_choice(chosen)
    if chosen.name == "python":
        return None
    from kvoffload_async.block_io.native_copies import NativeCopies  # noqa: PLC0415 - as below

    return NativeCopies()


def _native_io(
    env: TierEnvironment,
    calls: FileCalls | None,
    prefix: bytes,
    seals: Seals | None,
    slot_bytes: int,
    *,
    threads: int,
) -> NativeBlockIo:
    # Imported here because the native module may be missing.
    from kvoffload_async.block_io.native_io import NativeBlockIo  # noqa: PLC0415

    with naming_shortage(f"block I/O: {threads} native threads cannot be started"):
        return NativeBlockIo(
            env.io, calls, env.kv_view, prefix, slot_bytes, threads=threads, seals=seals
        )


@cache
def _obstacle() -> str:
    """Return why native code cannot be used, with remedy; empty if it can.

    Raises:
        OSError, MemoryError, ImportError: The process lacks descriptors, memory or threads. This is
            not cached: the next call checks again.
    """
    try:
        module = importlib.import_module("kvoffload_async.block_io._native")
        if build.sources() and getattr(module, "SOURCES", "") != build.source_digest():
            return f"it was built from other sources; run {sys.executable} {build.__file__}"
        importlib.import_module("kvoffload_async.block_io.engine").check_hashes(addresses())
    except _OBSTACLES as error:
        if shortage_remedy(error):
            raise
        if isinstance(error, RefusedCallError):
            return f"it needs a system call that is refused here ({error}); {REMEDY}"
        if isinstance(error, ImportError):
            return f"it was not built ({error}); {_REMEDY}"
        return f"it does not work with the xxhash package here ({error}); install another xxhash"
    return ""


@cache
def _cipher_obstacle() -> str:
    """Return why native code cannot encrypt, although it can be used; empty if it can.

    Raises:
        OSError, MemoryError: The process lacks descriptors, memory or threads. This is not cached.
    """
    engine = importlib.import_module("kvoffload_async.block_io.engine")
    try:
        engine.check_ciphers(addresses(), cipher_addresses())
    except _OBSTACLES as error:
        if shortage_remedy(error):
            raise
        return f"native code finds no OpenSSL ({text_of(error)}); use a Python with a shared one"
    return ""


@cache
def _log_python_encryption(why: str) -> None:
    """Log once if Python threads encrypt where native threads could copy."""
    if why:
        logger.warning(
            "encryption_key_file: Python threads encrypt, which is slower: %s",
            why,
        )


@cache
def _log_choice(chosen: Implementation) -> None:
    """Log the chosen implementation once."""
    is_left_out = chosen.why and not chosen.why.startswith(VARIABLE)
    logger.log(logging.WARNING if is_left_out else logging.INFO, "block I/O is %s", chosen)
