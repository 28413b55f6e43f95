"""Where a command's figures go besides the terminal: a file, or standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvoffload_async.errors import InputError

STDOUT: Final = "-"


def check_writable(option: str, name: str | None) -> None:
    """Find out before a long run, not after it.

    Raises:
        InputError: It is a directory, or its directory does not exist.
    """
    if name is not None and name != STDOUT:
        with as_unwritable(option, name):
            path = Path(name)
            if path.is_dir():
                raise InputError(f"{option} {name}: cannot be written: it is a directory")
            if not path.parent.is_dir():
                raise InputError(
                    f"{option} {name}: cannot be written: the directory does not exist"
                )


def write_figures(option: str, name: str, text: str) -> None:
    """Write to standard output or a file; raises InputError where that is not possible."""
    if name == STDOUT:
        sys.stdout.write(text + "\n")
        return
    with as_unwritable(option, name):
        Path(name).write_text(text + "\n", encoding="utf-8")


@contextmanager
def as_unwritable(option: str, name: str) -> Iterator[None]:
    """Turn the system's refusal into one that names the option."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{option} {name}: cannot be written: {error.strerror}") from error
