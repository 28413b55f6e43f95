"""What the tests of the engine stand on."""

import pytest
from async_engine.worlds import register


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    """Make the scripted tier one that a configuration can name."""
    register(monkeypatch)
