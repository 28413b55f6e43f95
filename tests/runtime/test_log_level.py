"""The package's log in servers that configure only their own."""

import logging
from contextlib import contextmanager

import pytest

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.log_level import LEVEL_VARIABLE, PACKAGE_LOGGER, show_log


@contextmanager
def alone():
    """The package's logger without pytest's handlers; as it was afterwards."""
    logger = logging.getLogger(PACKAGE_LOGGER)
    level, handlers, propagates = logger.level, list(logger.handlers), logger.propagate
    logger.handlers[:], logger.propagate = [], False
    try:
        yield logger
    finally:
        logger.handlers[:], logger.propagate = handlers, propagates
        logger.setLevel(level)


def test_without_the_variable_nothing_is_changed(monkeypatch):
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    with alone() as logger:
        before = logger.level
        show_log()
        assert (logger.level, logger.handlers) == (before, [])


def test_where_nobody_takes_the_lines_they_go_to_standard_error_once(monkeypatch, capsys):
    monkeypatch.setenv(LEVEL_VARIABLE, "info")
    with alone():
        show_log()
        show_log()
        logging.getLogger(f"{PACKAGE_LOGGER}.tiers").info("a store is open")
        logging.getLogger(f"{PACKAGE_LOGGER}.tiers").debug("a job ended")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("INFO kvoffload_async.tiers: a store is open")


def test_where_somebody_does_only_the_level_is_set(monkeypatch):
    own = logging.NullHandler()
    monkeypatch.setenv(LEVEL_VARIABLE, "debug")
    with alone() as logger:
        logger.addHandler(own)
        show_log()
        assert (logger.level, logger.handlers) == (logging.DEBUG, [own])


def test_a_level_that_there_is_not_is_named(monkeypatch):
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="KVOFFLOAD_LOG_LEVEL: 'loud' is unknown; allowed: debug"):
        show_log()
