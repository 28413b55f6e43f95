"""Log level of the package, set by the environment."""

from __future__ import annotations

import logging
import os
from typing import Final

from kvoffload_async.config import nearest, shown
from kvoffload_async.errors import ConfigError

PACKAGE_LOGGER: Final = "kvoffload_async"
LEVEL_VARIABLE: Final = "KVOFFLOAD_LOG_LEVEL"
LEVELS: Final[dict[str, int]] = {
    name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")
}


def level_from_environment() -> int | None:
    """Return the log level named by the environment, or None.

    Raises:
        ConfigError: The name is unknown.
    """
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
    """Enable the package's log at the level named by the environment, if any.

    For servers that configure only their own loggers, such as vLLM: without a handler, log lines
    are written to standard error.

    Raises:
        ConfigError: The level is unknown.
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
