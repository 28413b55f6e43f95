import pytest
from slab.stores import SlabStore


@pytest.fixture
def slab_store(tmp_path) -> SlabStore:
    return SlabStore(tmp_path / "root")
