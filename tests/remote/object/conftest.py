import itertools

import pytest
from remote.object.tiers import BLOCK_BYTES, tier_on
from servers.proxy import Proxy

from kvoffload_async.testing import TierHarness
from kvoffload_async.tiers.object.tier import ObjectOptions

_numbers = itertools.count()


@pytest.fixture
def server(s3_server):
    return s3_server


@pytest.fixture
def prefix():
    """A prefix of the test's own."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def proxy(server):
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def connection(tmp_path):
    return ObjectOptions(url=f"file://{tmp_path}/blocks")


@pytest.fixture
def host(connection):
    """Makes hosts on a directory."""
    made = []

    def make(slot_bytes=BLOCK_BYTES, **options):
        made.append(TierHarness(tier_on(connection, **options), 64, slot_bytes))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()
