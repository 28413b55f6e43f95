"""How a command ends. Exit status: 0 success, 1 a check failed, 2 bad input, 130 interrupted.

Ctrl-C only requests a stop, so it never interrupts a call of the engine.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

import typer
from typer.core import TyperGroup

from kvoffload_async.errors import ConfigError, InputError, OffloadError


class Interrupt:
    """Context manager: the first SIGINT sets `is_requested`, a second one interrupts.

    If SIGINT is ignored, as for background jobs of a shell script, it stays ignored.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # required by `signal`
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


def complain(message: object) -> None:
    """Print an error as one line to standard error, with unprintable characters escaped."""
    line = " ".join(str(message).split()).encode(errors="backslashreplace").decode()
    # Texts of servers and names of files must not reach the terminal as escape sequences.
    line = "".join(c if c.isprintable() else "\ufffd" for c in line)
    typer.echo(f"kvoffload: error: {line}", err=True)


def finish(complaints: Sequence[object], *, interrupted: bool) -> None:
    """Print the complaints, and exit with the status that they or an interruption call for."""
    for complaint in complaints:
        complain(complaint)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if complaints:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Turn expected errors into one line on standard error and an exit status."""
    try:
        yield
    except (InputError, ConfigError) as error:
        complain(error)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    except (OffloadError, TimeoutError) as error:
        complain(error)
        raise typer.Exit(EXIT_FAILED) from error


class OneLineGroup(TyperGroup):
    """A command group that prints usage errors as one line, like every other error."""

    def main(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401 - the base's signature
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except Exception as error:
            # Recognised by its method: the error's package depends on typer's version.
            format_message = getattr(error, "format_message", None)
            if format_message is None:
                raise
            message = format_message()
            if message.startswith("Usage:"):  # no command was given: the message is the help
                typer.echo(message, err=True)
            else:
                complain(message)
            status = EXIT_BAD_INPUT
        sys.exit(status or 0)
