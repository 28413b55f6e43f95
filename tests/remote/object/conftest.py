import itertools

import pytest
from servers.proxy import Proxy
from servers.seaweedfs import SeaweedServer

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with SeaweedServer(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def prefix():
    """A prefix of the test's own."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def proxy(server):
    with Proxy(server.port) as proxy:
        yield proxy
