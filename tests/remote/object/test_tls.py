"""An S3 server behind TLS, whose authority the client has to be told of."""

import shutil
from dataclasses import replace

import pytest
from remote.object.tiers import set_environment, tier_on
from servers import seaweedfs
from servers.proxy import Proxy
from servers.tls import Authority
from typer.testing import CliRunner

from kvoffload_async import SecondaryTierFactory
from kvoffload_async.cli.app import app
from kvoffload_async.errors import ConfigError, TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(4)]

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_proxy(server, authority):
    with Proxy(server.port, authority.context()) as proxy:
        yield proxy


def encrypted(connection):
    return replace(connection, store_options=connection.store_options | {"allow_http": False})


@pytest.fixture
def connection(server, tls_proxy, prefix):
    connection = server.connection(prefix, endpoint=f"https://127.0.0.1:{tls_proxy.port}")
    return encrypted(connection)


def test_blocks_go_through_tls_and_are_verified(connection, authority):
    with TierHarness(tier_on(replace(connection, ca_file=authority.ca_file))) as harness:
        assert harness.store(K) == {}
        assert harness.load(K) == {}
        assert all(harness.holds(key, i) for i, key in enumerate(K))


def test_a_server_of_an_authority_that_is_not_trusted_is_an_error_of_the_configuration(connection):
    with pytest.raises(ConfigError, match="certificate is not trusted") as raised:
        TierHarness(tier_on(connection))
    assert seaweedfs.SECRET_ACCESS_KEY not in str(raised.value)


def test_new_certificates_are_trusted_once_the_file_has_them(
    server, prefix, authority, tmp_path_factory, tmp_path
):
    other, ca_file = Authority(tmp_path_factory.mktemp("other")), tmp_path / "ca.pem"
    shutil.copy(authority.ca_file, ca_file)
    with (
        Proxy(server.port, authority.context()) as old,
        Proxy(server.port, other.context()) as new,
        Proxy(old.port) as front,
    ):
        connection = server.connection(prefix, endpoint=f"https://127.0.0.1:{front.port}")
        connection = replace(encrypted(connection), ca_file=str(ca_file))
        with TierHarness(tier_on(connection)) as harness:
            assert harness.store(K) == {}
            front.lead_to(new.port)
            front.set(refuses=True)
            front.set()
            assert "certificate is not trusted" in str(harness.load(K)[0])
            ca_file.unlink()
            with pytest.raises(TierUnavailableError, match=r"tls_ca_file: .* cannot be read"):
                harness.load(K)
            shutil.copy(other.ca_file, ca_file)
            assert harness.load(K) == {}
            assert all(harness.holds(key, i) for i, key in enumerate(K))


def test_the_option_of_a_configuration_leads_there(connection, authority):
    view = memoryview(bytearray(4 * 4096)).cast("B", (4, 4096))
    config = seaweedfs.tier_config(connection) | {
        "model": "org/model",
        "tls_ca_file": authority.ca_file,
    }
    tier = SecondaryTierFactory.create_secondary_tier(config, view, None)
    assert tier.shutdown(5.0).is_clean


def test_the_command_trusts_what_the_environment_says(connection, authority, monkeypatch):
    with TierHarness(tier_on(replace(connection, ca_file=authority.ca_file))) as harness:
        assert harness.store(K) == {}
    set_environment(monkeypatch, connection)
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca_file)
    done = CliRunner().invoke(app, ["store", "verify", connection.url, "--json"])
    assert done.exit_code == 0, done.output
    assert '"verified": 4' in done.stdout
