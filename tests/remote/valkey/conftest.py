import pytest
from servers.proxy import Proxy
from servers.valkey import ValkeyServer

pytest.importorskip("redis", reason="needs the extra valkey")


@pytest.fixture(scope="session")
def running_server(tmp_path_factory):
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(running_server):
    """A server that is empty, and has no limit of memory."""
    with running_server.client() as client:
        client.flushall()
    return running_server


@pytest.fixture
def own_server(tmp_path):
    """A server that a test may kill."""
    with ValkeyServer(tmp_path) as server:
        yield server


@pytest.fixture
def proxy(server):
    with Proxy(server.port) as proxy:
        yield proxy
