import os
from contextlib import closing

import pytest
from remote.mooncake.fakes import FakeStore
from servers.mooncake import MooncakeMaster


@pytest.fixture(scope="session")
def running_master(tmp_path_factory):
    os.environ.setdefault("MC_FORCE_TCP", "1")  # read by the library
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture
def master(running_master):
    """A master whose store is empty."""
    running_master.host.store.remove_all(True)
    return running_master


@pytest.fixture
def own_master(tmp_path):
    """A master that a test may kill."""
    with MooncakeMaster(tmp_path) as master:
        yield master


@pytest.fixture
def fake(tmp_path):
    """A store that needs no library and no master."""
    with closing(FakeStore(tmp_path)) as store:
        yield store
