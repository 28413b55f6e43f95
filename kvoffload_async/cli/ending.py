"""How a command ends. Exit status: 0 fine, 1 a check failed, 2 bad input, 130 interrupted.

Ctrl-C is a request to stop, so that it never lands in the middle of an engine's call.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

import typer
from typer.core import TyperGroup

from kvoffload_async.errors import ConfigError, InputError, OffloadError


class Interrupt:
    """While entered, the first SIGINT only sets `is_requested`; a second one is a real one.

    Where SIGINT is ignored, as a shell has it for what a script runs in its background, it stays
    ignored.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # others may not
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, _signal_number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        signal.signal(signal.SIGINT, self._previous)


EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130


def complain(what: object) -> None:
    """Write one line to standard error, whatever characters it has."""
    line = " ".join(str(what).split()).encode(errors="backslashreplace").decode()
    # What a server or a file's name says must not reach the terminal as a command to it.
    line = "".join(c if c.isprintable() else "\ufffd" for c in line)
    typer.echo(f"kvoffload: error: {line}", err=True)


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Turn what can be expected to go wrong into one line and an exit status."""
    try:
        yield
    except (InputError, ConfigError) as error:
        complain(error)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    except (OffloadError, TimeoutError) as error:
        complain(error)
        raise typer.Exit(EXIT_FAILED) from error


class OneLineGroup(TyperGroup):
    """Commands whose usage errors are one line, as every other error."""

    def main(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401 - the base's signature
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except Exception as error:
            # By its shape: which package the class comes from depends on typer's version.
            format_message = getattr(error, "format_message", None)
            if format_message is None:
                raise
            message = format_message()
            if message.startswith("Usage:"):  # no command was given: this is the help
                typer.echo(message, err=True)
            else:
                complain(message)
            status = EXIT_BAD_INPUT
        sys.exit(status or 0)
