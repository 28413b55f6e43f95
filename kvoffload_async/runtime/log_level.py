"""How much of the package's log is shown, where the environment says so."""

from __future__ import annotations

import logging
import os
from typing import Final

from kvoffload_async.config import nearest, shown
from kvoffload_async.errors import ConfigError

PACKAGE_LOGGER: Final = "kvoffload_async"
LEVEL_VARIABLE: Final = "KVOFFLOAD_LOG_LEVEL"
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def level_from_environment() -> int | None:
    """Return the level that the environment names, if it does; raises ConfigError."""
    name = os.environ.get(LEVEL_VARIABLE)
    if not name:
        return None
    if name.lower() not in LEVELS:
        hint = nearest(name.lower(), LEVELS)
        raise ConfigError(
            f"{LEVEL_VARIABLE}: {shown(name)} is unknown{hint}; allowed: {', '.join(LEVELS)}"
        )
    return LEVELS[name.lower()]


def show_log() -> None:
    """Show the package's log from the level on that the environment names, if it does.

    For servers that configure the logs of their own packages alone, as vLLM does: where nobody
    takes the lines, they go to standard error.

    Raises:
        ConfigError: There is no such level.
    """
    level = level_from_environment()
    if level is None:
        return
    logger = logging.getLogger(PACKAGE_LOGGER)
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
