"""The laboratory's command is what these tests run: `kvoffload bench` with more options."""

import gc
import json
from pathlib import Path

import pytest
from bench.witnesses import SMALL, WITNESSES
from command_line import Command, faulty_tiers, importable
from laboratory.app import app

__all__ = ["faulty_tiers", "importable"]


@pytest.fixture(autouse=True)
def _small_heap() -> None:
    """A bench collects garbage between its turns, and unfreezes in the end what was frozen."""
    gc.freeze()


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path, app)


@pytest.fixture
def witnesses(importable) -> str:
    """The name of the module with the tiers above."""
    return importable("witnesses", WITNESSES)


@pytest.fixture
def bench(command):
    """Run the command; return its figures."""

    def run(*arguments: object, exit_code: int = 0) -> dict:
        result = command.run(*("bench", "--block-bytes", "4KiB", *SMALL, *arguments), "--json", "-")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder
