"""Commands whose options are the fields of a dataclass: options, logging and exit status.

Exit status: 0 success, 1 a check failed, 2 bad input, 130 interrupted.

A signal only requests a stop, so it never interrupts a call of the engine, and temporary
directories are removed. After SIGTERM and SIGHUP, the status is 128 plus the signal's number.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Parameter
from types import FrameType
from typing import Annotated, Any, Final, Self, TypeVar, cast, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvoffload_async.errors import ConfigError, InputError, OffloadError, text_of
from kvoffload_async.runtime.log_level import PACKAGE_LOGGER, level_from_environment

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
    """Print the complaints, and exit with status `EXIT_INTERRUPTED` or `EXIT_FAILED` if needed."""
    for complaint in complaints:
        complain(complaint)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if complaints:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Context manager: turns expected errors into one line on standard error and an exit status."""
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


_MOST: Final = 1_000_000_000
"""Default maximum of options that take a number."""


def flag(default: Any, text: str, *names: str, **settings: Any) -> Any:  # noqa: ANN401 - any type
    """Declare a field of a command's options as an option.

    Args:
        default: The default.
        text: The help.
        *names: Spellings, if not the field's name.
        **settings: Further arguments of `typer.Option`. An option with a `min` has a `max`, too.
    """
    if "min" in settings:
        settings = {"max": _MOST, **settings}
    return field(
        default=default, metadata={"declared": typer.Option(*names, help=text, **settings)}
    )


def argument(text: str, default: Any = MISSING, **settings: Any) -> Any:  # noqa: ANN401 - any type
    """Declare a field as an argument, like `flag`; by default it is required."""
    return field(default=default, metadata={"declared": typer.Argument(help=text, **settings)})


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of every long command."""

    verbose: bool = flag(False, "Print the log at level DEBUG.", "--verbose", "-v")


C = TypeVar("C")


def command(
    app: typer.Typer, options: type[C]
) -> Callable[[Callable[[C], None]], Callable[[C], None]]:
    """Decorator: add a function to an application's commands; it gets the parsed options.

    The options that every command has come last.
    """
    hints = get_type_hints(options)
    parameters = [
        Parameter(
            one.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if one.default is MISSING else one.default,
            annotation=Annotated[hints[one.name], one.metadata["declared"]],
        )
        for one in sorted(fields(cast("Any", options)), key=_is_common)
    ]

    def add(run: Callable[[C], None]) -> Callable[[C], None]:
        def start(**given: object) -> None:
            run(options(**given))

        vars(start)["__signature__"] = inspect.Signature(parameters)
        start.__annotations__ = {each.name: each.annotation for each in parameters}
        start.__name__, start.__doc__ = run.__name__, run.__doc__
        app.command()(start)
        return run

    return add


class _OnConsole(logging.Handler):
    """Writes log lines above the progress bar, if one is shown."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 - logging must not end the command, as in every handler
            self.handleError(record)


@contextmanager
def logging_to(console: Console, *, verbose: bool) -> Iterator[None]:
    """Print the package's log: warnings by default, everything with `verbose`.

    Raises:
        ConfigError: `KVOFFLOAD_LOG_LEVEL` names an unknown level.
    """
    level = level_from_environment() or logging.WARNING
    if verbose:
        level = logging.DEBUG
    logger = logging.getLogger(PACKAGE_LOGGER)
    handler = _OnConsole(console)
    form = (
        "%(asctime)s.%(msecs)03d %(levelname)s %(message)s"
        if level < logging.WARNING
        else "%(message)s"
    )
    handler.setFormatter(logging.Formatter(f"kvoffload: {form}", "%H:%M:%S"))
    before, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # each line once, whichever handlers the root logger has
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagates


def _is_common(one: Field[Any]) -> bool:
    return one.name in CommandOptions.__annotations__


@contextmanager
def running(options: CommandOptions) -> Iterator[tuple[Console, Interrupt]]:
    """Run a command: yield its console for progress and log, and its `Interrupt`.

    Expected errors end the command with one line and an exit status, and so do SIGTERM and SIGHUP,
    after what the command does on Ctrl-C.
    """
    console = Console(stderr=True)
    with (
        errors_as_one_line(),
        logging_to(console, verbose=options.verbose),
        Interrupt() as interrupt,
    ):
        yield console, interrupt
    if interrupt.status != EXIT_INTERRUPTED:
        raise typer.Exit(interrupt.status)
