"""How a command ends. Exit status: 0 success, 1 a check failed, 2 bad input, 130 interrupted.

A signal only requests a stop, so it never interrupts a call of the engine, and temporary
directories are removed. After SIGTERM and SIGHUP, the status is 128 plus the signal's number.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

import typer
from typer.core import TyperGroup

from kvoffload_async.errors import ConfigError, InputError, OffloadError, text_of

EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Context manager: the first SIGINT, SIGTERM or SIGHUP sets `is_requested`.

    A second signal of the same kind has the effect that it had before. Signals that are ignored, as
    SIGINT for background jobs of a shell script and SIGHUP after nohup, stay ignored.

    Attributes:
        is_requested: Whether a signal has arrived.
        status: The exit status that the first signal calls for.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.status = EXIT_INTERRUPTED
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # required by `signal`
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.is_requested:
            self.is_requested, self.status = True, 128 + number
        signal.signal(number, self._previous[number])


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
    except MemoryError as error:
        complain(f"not enough memory ({text_of(error)}); give smaller numbers")
        raise typer.Exit(EXIT_BAD_INPUT) from error


_OUTPUT_ERRORS: Final = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE})


def _output_failed(error: OSError) -> bool:
    """Report that standard output could not be written; return False for another error.

    A reader that has closed its pipe, such as `head`, has what it wanted: nothing is printed.
    """
    if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
        return False
    # What is still buffered would fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        complain(f"standard output cannot be written: {error.strerror}; free space, or redirect it")
    return True


class OneLineGroup(TyperGroup):
    """A command group that prints usage errors as one line, like every other error."""

    def main(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401 - the base's signature
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except typer.Abort:  # by Ctrl-C before the command handles signals, or a second one
            status = EXIT_INTERRUPTED
        except Exception as error:
            if isinstance(error, OSError) and _output_failed(error):
                sys.exit(EXIT_BAD_INPUT)
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
