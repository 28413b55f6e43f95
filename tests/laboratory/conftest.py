"""The laboratory's command is what these tests run."""

import gc
from pathlib import Path

import pytest
from command_line import Command

from laboratory.app import app


@pytest.fixture(autouse=True)
def _small_heap() -> None:
    """A bench collects garbage between its turns, and unfreezes in the end what was frozen."""
    gc.freeze()


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path, app)
