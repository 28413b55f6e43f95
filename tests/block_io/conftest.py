import pytest
from block_io.places import IMPLEMENTATIONS, is_built


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    if request.param == "native" and not is_built():
        pytest.skip("the native module is not built")
    return request.param
