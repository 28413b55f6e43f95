"""A slab store with blocks in it."""

import pytest
from cli.store.slab.slabs import Slab


@pytest.fixture
def slab(command):
    made = Slab(command)
    made.store_blocks()
    yield made
    made.close()
