"""Stores of the fs tier."""

import pytest
from command_line import command
from fs.maintenance.stores import Store

__all__ = ["bounded", "command", "store"]


@pytest.fixture
def store(command):
    return Store(command)


@pytest.fixture
def bounded(command):
    """One with a capacity that it never reaches, and so with a shared count."""
    return Store(command, "capacity_bytes=64MiB")
