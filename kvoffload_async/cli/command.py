"""Commands whose options are the fields of a dataclass, and the log of a running command."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Parameter
from typing import Annotated, Any, Final, TypeVar, cast, get_type_hints

import typer
from rich.console import Console

from kvoffload_async.cli.ending import EXIT_INTERRUPTED, Interrupt, errors_as_one_line
from kvoffload_async.runtime.log_level import PACKAGE_LOGGER, level_from_environment

_MOST: Final = 1_000_000_000
"""Largest number that an option takes, unless it declares another."""


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
    """Add a function to an application's commands; it is called with the options given.

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
    """Yield the console for progress and log, and whether Ctrl-C has asked the command to stop.

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
