import pytest
from block_io.worlds import IMPLEMENTATIONS, is_built
from command_line import command

__all__ = ["command", "implementation"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    if request.param == "native" and not is_built():
        pytest.skip("the native module is not built")
    return request.param


@pytest.fixture
def engine():
    """A native engine on its own."""
    from native_engine import opened_engine

    with opened_engine() as engine:
        yield engine


@pytest.fixture
def block(engine, tmp_path):
    """Rows in memory, and files for them."""
    from native_engine import BLOCKS, ROW_BYTES, Block

    block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, 1024)
    yield block
    block.close()
