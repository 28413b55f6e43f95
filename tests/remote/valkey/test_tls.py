"""Valkey behind TLS: the server is verified, and so is the client where it is asked to."""

import pytest
from remote.valkey.tiers import tier_at
from servers.proxy import Proxy
from servers.tls import Authority

from kvoffload_async import SecondaryTierFactory
from kvoffload_async.errors import ConfigError, TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(8)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


def tls_url(proxy):
    return f"valkeys://127.0.0.1:{proxy.port}/0"


def test_blocks_go_through_tls_and_are_verified(server, authority):
    with Proxy(server.port, authority.context()) as proxy:
        tier = tier_at(tls_url(proxy), ca_file=authority.ca_file)
        with TierHarness(tier) as harness:
            assert harness.store(K) == {}
            assert harness.load(K) == {}
            assert all(harness.holds(key, i) for i, key in enumerate(K))
    with server.client() as client:
        assert client.dbsize() == len(K) + 1  # and the label


def test_a_server_of_an_authority_that_is_not_trusted_is_an_error_of_the_configuration(
    server, authority
):
    with (
        Proxy(server.port, authority.context()) as proxy,
        pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        TierHarness(tier_at(tls_url(proxy)))


def test_a_name_that_is_not_in_the_certificate_is_an_error_of_the_configuration(server, authority):
    with Proxy(server.port, authority.context()) as proxy:
        url = tls_url(proxy).replace("127.0.0.1", "localhost")
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            TierHarness(tier_at(url, ca_file=authority.ca_file))


def test_a_server_that_asks_for_a_certificate_gets_the_clients(server, authority):
    certificate, key = authority.client
    files = {"ca_file": authority.ca_file}
    with Proxy(server.port, authority.context(asks_clients=True)) as proxy:
        with pytest.raises(TierUnavailableError):
            TierHarness(tier_at(tls_url(proxy), **files))
        files |= {"cert_file": certificate, "key_file": key}
        with TierHarness(tier_at(tls_url(proxy), **files)) as harness:
            assert harness.store(K) == {}
            assert harness.contains(K) == set(K)


def test_a_server_without_tls_is_unavailable(server, authority):
    url = server.url().replace("valkey://", "valkeys://")
    with pytest.raises(TierUnavailableError):
        TierHarness(tier_at(url, ca_file=authority.ca_file, call_timeout_s=0.2, max_retries=0))


def test_the_options_of_a_configuration_lead_there(server, authority):
    view = memoryview(bytearray(4 * 4096)).cast("B", (4, 4096))
    with Proxy(server.port, authority.context()) as proxy:
        config = {
            "type": "valkey",
            "url": tls_url(proxy),
            "tls_ca_file": authority.ca_file,
            "model": "org/model",
        }
        tier = SecondaryTierFactory.create_secondary_tier(config, view, None)
        assert tier.shutdown(5.0).is_clean
