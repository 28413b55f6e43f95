"""Compiles the native module: `python kvoffload_async/block_io/build.py [FILE]`, default in target.

Also used by the package's build (hatch_build.py), so it imports only the standard library.
`KVOFFLOAD_NATIVE=0` skips the module, `=require` makes a failure an error; `CC` names the compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FILE_NAME: Final = "_native.abi3.so"
"""File name of the native module."""

WHEEL_TAG: Final = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

WARNINGS: Final = (
    *("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes"),
    *("-Wpointer-arith", "-Wvla", "-Wformat=2", "-Wundef"),
)
FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-pthread", *WARNINGS)

_LIMITED_API: Final = "-DPy_LIMITED_API=0x030B0000"
_NATIVE: Final = "KVOFFLOAD_NATIVE"
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 300


class UnavailableError(Exception):
    """The native module cannot be built here; the message names reason and remedy."""


def sources() -> list[Path]:
    """Return the C source files of the native module."""
    return sorted((Path(__file__).parent / "native").glob("*.c"))


def source_digest() -> str:
    """Return a digest of the C sources and headers; the built module has it in `SOURCES`."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "native").glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compiler() -> list[str]:
    """Return the command of the C compiler.

    Raises:
        UnavailableError: There is no compiler.
    """
    if named := os.environ.get("CC"):
        try:
            return shlex.split(named)
        except ValueError as error:
            raise UnavailableError(f"CC={named!r}: {error}") from None
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise UnavailableError("there is no C compiler; install gcc or clang, or set CC")


def build(target: Path, flags: Sequence[str] = ("-O2", "-s")) -> None:
    """Compile the native module into a file.

    Raises:
        UnavailableError: It cannot be built, or compilation fails.
    """
    if sys.platform != "linux" or platform.python_implementation() != "CPython":
        raise UnavailableError("it is for CPython on Linux")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise UnavailableError("free-threaded Python has no stable ABI; use the standard build")
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise UnavailableError(
            f"there is no Python.h in {include}; install Python's development files (python3-dev)"
        )
    part = target.with_name(f"{target.name}.{os.getpid()}")  # mappings of the old file stay valid
    command = [*compiler(), *FLAGS, *flags, _LIMITED_API, f"-I{include}"]
    command += [f'-DSOURCES="{source_digest()}"']
    command += ["-fPIC", "-shared", "-fvisibility=hidden", *map(str, sources()), "-o", str(part)]
    try:
        done = subprocess.run(  # noqa: S603 - the compiler is chosen by the user
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise UnavailableError(f"{shlex.join(command)} failed:\n{done.stderr or done.stdout}")
        part.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{shlex.join(command)} did not run: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def build_if_wanted(target: Path) -> bool:
    """Compile the native module if the environment permits; on failure, print why.

    Raises:
        UnavailableError: The module is required and cannot be built.
    """
    wanted = os.environ.get(_NATIVE, "")
    if wanted not in {"", "0", "require"}:
        raise UnavailableError(f"{_NATIVE}={wanted!r}: give 0, require, or nothing")
    if wanted == "0":
        return False
    try:
        build(target)
    except UnavailableError as error:
        if wanted == "require":
            raise
        sys.stderr.write(f"kvoffload: the native module was not built: {error}\n")
        return False
    return True


if __name__ == "__main__":
    target = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name(FILE_NAME)
    if build_if_wanted(target):
        sys.stdout.write(f"{target}\n")
