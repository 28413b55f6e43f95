"""Where the log of the package goes while a command runs: to standard error, once a line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from kvoffload_async.runtime.log_level import PACKAGE_LOGGER, level_from_environment

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show what the engine does, as it does it.")
]


class _OnConsole(logging.Handler):
    """Writes lines above a progress bar, if there is one, and never into it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 - as every handler does: logging must not end the command
            self.handleError(record)


@contextmanager
def logging_to(console: Console, *, verbose: bool) -> Iterator[None]:
    """Show warnings, or with `verbose` everything that the engine does.

    Raises:
        ConfigError: The environment names a level that there is not.
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
    logger.propagate = False  # each line once, whatever the root logger has
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagates
