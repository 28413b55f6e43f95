"""Which implementation is used: the native one where it works, unless the environment says no."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from kvoffload_async.abc.tier import TierEnvironment
from kvoffload_async.block_io.contract import BlockDigests, BlockIo, FileCalls, FileIo
from kvoffload_async.block_io.hashes import addresses
from kvoffload_async.block_io.python_io import PythonBlockIo
from kvoffload_async.errors import ConfigError

if TYPE_CHECKING:
    from kvoffload_async.block_io.native_copies import NativeCopies
    from kvoffload_async.block_io.native_io import NativeBlockIo

logger = logging.getLogger(__name__)

VARIABLE: Final = "KVOFFLOAD_NATIVE"

_REMEDY: Final = (
    "install a C compiler and Python's development files, and then kvoffload-async once more"
)


class Implementation(NamedTuple):
    """What moves bytes here.

    Attributes:
        name: "native" or "python".
        why: Why it is not the native one, and what helps; empty if it is.
    """

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


def implementation() -> Implementation:
    """Return which implementation is used, as the environment is now.

    Raises:
        ConfigError: The native one is required and cannot be used, or the environment is unclear.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in {"", "0", "require"}:
        raise ConfigError(f"{VARIABLE}: {wanted!r} is not known; give 0, require, or nothing")
    if wanted == "0":
        return Implementation("python", f"{VARIABLE}=0")
    why = _obstacle()
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
    """Return what moves a tier's blocks, on the loop that awaits it.

    Args:
        env: Of the tier; its buffer is held until the `BlockIo` is closed.
        calls: The system calls; those of Python threads are made through it.
        digests: Computes checksums. With an integrity key it is Python that moves the blocks.
        slot_bytes: From one row to the next in a file.
        threads: How many move bytes.
        piece_bytes: About what one Python thread moves at a time.
        is_direct: Whether files bypass the page cache; rows that are not aligned for that are
            moved by Python, too.
        is_system: Whether `calls` are the system's own, which native threads make themselves.

    Raises:
        ConfigError: As `implementation` does.

    Thread: loop. One that cannot watch a descriptor, as a test's virtual one, has Python's threads.
    """
    chosen = _chosen_here()
    others = PythonBlockIo(
        env.io, calls, env.kv_view, digests, slot_bytes, threads=threads, piece_bytes=piece_bytes
    )
    if chosen.name == "python" or digests.is_keyed or (is_direct and not others.is_aligned):
        return others
    others.release()
    return _native_io(env, None if is_system else calls, digests, slot_bytes, threads)


def create_file_io(
    env: TierEnvironment,
    calls: FileCalls,
    digests: BlockDigests,
    *,
    threads: int,
    is_system: bool = True,
) -> FileIo | None:
    """Return what moves whole files by native code; None where that is not used.

    The arguments, and what is raised, are those of `create_block_io`.
    """
    chosen = _chosen_here()
    if chosen.name == "python" or digests.is_keyed:
        return None
    row_bytes = env.kv_view.nbytes // len(env.kv_view)
    return _native_io(env, None if is_system else calls, digests, row_bytes, threads)


def _chosen_here() -> Implementation:
    """Return what is used on the running loop, which must be able to wait for a descriptor."""
    chosen = implementation()
    _tell(chosen)
    loop = asyncio.get_running_loop()
    if type(loop).add_reader is asyncio.AbstractEventLoop.add_reader:
        return Implementation("python", "the event loop watches no descriptors")  # a virtual one
    return chosen


def create_copies() -> NativeCopies | None:
    """Return what copies from memory to memory by native code; None where that is not used.

    Raises:
        ConfigError: As `implementation` does.
        OSError: There are no more threads.
    """
    chosen = implementation()
    _tell(chosen)
    if chosen.name == "python":
        return None
    from kvoffload_async.block_io.native_copies import NativeCopies  # noqa: PLC0415 - as below

    return NativeCopies()


def _native_io(
    env: TierEnvironment,
    calls: FileCalls | None,
    digests: BlockDigests,
    slot_bytes: int,
    threads: int,
) -> NativeBlockIo:
    # Not before it is known that the module it needs is there.
    from kvoffload_async.block_io.native_io import NativeBlockIo  # noqa: PLC0415

    return NativeBlockIo(env.io, calls, env.kv_view, digests, slot_bytes, threads=threads)


@cache
def _obstacle() -> str:
    """Return why the native implementation cannot be used, and what helps; empty if it can."""
    try:
        importlib.import_module("kvoffload_async.block_io._native")
    except ImportError as error:
        return f"it was not built ({error}); {_REMEDY}"
    try:
        importlib.import_module("kvoffload_async.block_io.engine").check_hashes(addresses())
    except (AttributeError, OSError, RuntimeError) as error:
        return f"it does not work with the xxhash package here ({error}); install another xxhash"
    return ""


@cache
def _tell(chosen: Implementation) -> None:
    """Say it once."""
    is_left_out = chosen.why and not chosen.why.startswith(VARIABLE)
    logger.log(logging.WARNING if is_left_out else logging.INFO, "blocks are moved by: %s", chosen)
