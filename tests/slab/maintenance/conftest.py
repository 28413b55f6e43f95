"""A slab store with blocks in it."""

import pytest
from command_line import command
from slab.maintenance.slabs import Slab

__all__ = ["command", "slab"]


@pytest.fixture
def slab(command):
    made = Slab(command)
    made.store_blocks()
    yield made
    made.close()
