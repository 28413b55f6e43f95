import pytest
from block_io.places import IMPLEMENTATIONS, is_built
from command_line import command

__all__ = ["command", "implementation"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    if request.param == "native" and not is_built():
        pytest.skip("the native module is not built")
    return request.param
