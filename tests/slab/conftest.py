import pytest
from slab.shelves import Shelves


@pytest.fixture
def shelves(tmp_path) -> Shelves:
    return Shelves(tmp_path / "root")
