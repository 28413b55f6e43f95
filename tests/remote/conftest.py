import pytest
from servers.seaweedfs import SeaweedServer


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """One for all, as it takes seconds until it is there."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
