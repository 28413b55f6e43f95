import pytest
from fs.places import Place


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path / "root")
