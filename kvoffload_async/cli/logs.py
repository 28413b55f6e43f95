"""Writes the package's log to standard error while a command runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from kvoffload_async.runtime.log_level import PACKAGE_LOGGER, level_from_environment

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the log at level DEBUG.")]


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
