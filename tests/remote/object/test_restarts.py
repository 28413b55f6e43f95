"""A real S3 server that is killed and comes back: empty, full, or with other secrets."""

import logging

import pytest
from remote.object.test_faults import K, kinds, open_on, recovers
from servers.process import at_length
from servers.seaweedfs import SECRET_ACCESS_KEY, SeaweedServer

from kvoffload_async.errors import BlockMissingError, TierUnavailableError
from kvoffload_async.tiers.remote.client import RefusedError

pytestmark = [pytest.mark.servers, at_length]


@pytest.fixture
def own_server(tmp_path):
    """A server that a test may kill."""
    with SeaweedServer(tmp_path) as server:
        yield server


def outcome(call, keys):
    """Return the kinds of error; that of the whole job where it failed as a whole."""
    try:
        return kinds(call(keys))
    except TierUnavailableError as error:
        return {type(error)}


def test_one_that_comes_back_empty_misses_and_takes_blocks_again(own_server):
    with open_on(own_server.connection("empty")) as harness:
        assert harness.store(K[:4]) == {}
        own_server.kill()
        assert outcome(harness.load, K[:4]) == {TierUnavailableError}
        own_server.empty()
        own_server.start()
        assert kinds(harness.load(K[:4])) == {BlockMissingError}
        assert harness.contains(K[:4]) == frozenset()
        assert harness.store(K[:4]) == {}
        assert recovers(harness, K[:4])


def test_one_whose_disk_is_full_serves_what_it_has(own_server):
    with open_on(own_server.connection("full")) as harness:
        assert harness.store(K[:4]) == {}
        own_server.kill()
        own_server.arguments = ("-volume.minFreeSpace=100",)
        own_server.start(can_write=False)
        # It does not say what is wrong, so that stores look like faults; loads go on.
        failures = harness.store(K[8:12])
        assert kinds(failures) == {TierUnavailableError}
        assert all(
            "500 Internal Server Error: InternalError" in str(error) for error in failures.values()
        )
        assert recovers(harness, K[:4])
        assert harness.contains(K[:12]) == set(K[:4])
        assert harness.tier.gauges()["bytes_in_flight"] == 0


def test_credentials_that_expire_fail_jobs_alone_and_no_secret_is_said(own_server, caplog):
    caplog.set_level(logging.DEBUG)
    with open_on(own_server.connection("expired")) as harness:
        assert harness.store(K[:4]) == {}
        own_server.kill()
        own_server.secret = "an0ther/secret"  # noqa: S105 - made up
        own_server.start()
        failures = harness.load(K[:4])
        assert kinds(failures) == {RefusedError}
        assert harness.tier.gauges()["corrupt"] == 0
        said = caplog.text + repr(failures) + repr(harness.tier.gauges())
        assert SECRET_ACCESS_KEY not in said
