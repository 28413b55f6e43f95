"""Each connection is made with what is so now: credentials, certificates and addresses."""

import asyncio
import shutil
import socket
import threading
from contextlib import ExitStack

import pytest
from remote.valkey.tiers import QUICK, tier_at
from servers.proxy import Proxy
from servers.tls import Authority
from servers.valkey import ValkeyPair, ValkeyServer

from kvoffload_async import SecondaryTierFactory
from kvoffload_async.errors import ConfigError, TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import DEADLINE_S, key_of
from kvoffload_async.tiers.remote.lookups import Lookups
from kvoffload_async.tiers.remote.settings import SecretFile
from kvoffload_async.tiers.valkey.address import Route

K = [key_of(number) for number in range(16)]
OLD, NEW = "0ld-s3cret", "n3w-s3cret"
NAME = "cache.test"


def open_at(url, **options):
    return TierHarness(tier_at(url, **QUICK | options), timeout_s=20.0)


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text(OLD + "\n")
    return path


@pytest.fixture
def guarded(tmp_path):
    with ValkeyServer(tmp_path, password=OLD) as server:
        yield server


def change_password(server):
    """Change it, and end the connections that were made with the old one."""
    with server.client() as client:
        client.config_set("requirepass", NEW)
        client.client_kill_filter(_type="normal", skipme=True)
    server.password = NEW


def open_with(server, path):
    file = SecretFile.parse(str(path), "password_file")
    return open_at(f"valkey://127.0.0.1:{server.port}/0", password_file=file)


def test_a_new_password_is_used_once_the_file_has_it(guarded, password_file):
    with open_with(guarded, password_file) as harness:
        assert harness.store(K[:4]) == {}
        change_password(guarded)
        password_file.write_text(NEW)
        assert harness.load(K[:4]) == {}
        assert harness.store(K[4:8]) == {}


def test_a_file_that_lags_behind_costs_what_fails_until_then_and_shows_no_secret(
    guarded, password_file, caplog
):
    caplog.set_level("DEBUG")
    with open_with(guarded, password_file) as harness:
        assert harness.store(K[:4]) == {}
        change_password(guarded)
        failures = harness.load(K[:4])
        with pytest.raises(TierUnavailableError) as raised:
            harness.load(K[:4])
        password_file.write_text(NEW)
        assert harness.load(K[:4]) == {}
        said = caplog.text + repr(failures) + str(raised.value) + repr(harness.tier._settings)
        assert "WRONGPASS" in said
        assert OLD not in said
        assert NEW not in said
        assert harness.tier._settings.redact(f"{OLD} {NEW}") == "*** ***"


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named_and_read_again(guarded, password_file, content):
    with open_with(guarded, password_file) as harness:
        assert harness.store(K[:4]) == {}
        change_password(guarded)
        password_file.unlink()
        if content is not None:
            password_file.write_bytes(content)
        assert f"password_file: '{password_file}'" in str(harness.load(K[:4])[0])
        password_file.write_text(NEW)
        assert harness.load(K[:4]) == {}


def test_the_file_is_used_instead_of_the_urls_password(guarded, password_file):
    view = memoryview(bytearray(4 * 4096)).cast("B", (4, 4096))
    url = f"valkey://:wr0ng@127.0.0.1:{guarded.port}/0"
    config = {"type": "valkey", "url": url, "model": "org/model"}
    with pytest.raises(ConfigError, match="credentials"):
        SecondaryTierFactory.create_secondary_tier(config, view, None)
    config["password_file"] = str(password_file)
    tier = SecondaryTierFactory.create_secondary_tier(config, view, None)
    assert tier.shutdown(5.0).is_clean


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    return [Authority(tmp_path_factory.mktemp(name)) for name in ("old", "new")]


class Rotating:
    """A server behind TLS whose certificate is another authority's from some moment on."""

    def __init__(self, server, authorities, **options):
        self._stack = ExitStack()
        self._proxies = [
            self._stack.enter_context(Proxy(server.port, one.context(**options)))
            for one in authorities
        ]
        self.front = self._stack.enter_context(Proxy(self._proxies[0].port))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    @property
    def url(self):
        return f"valkeys://127.0.0.1:{self.front.port}/0"

    def rotate(self):
        self.front.lead_to(self._proxies[1].port)
        self.front.set(refuses=True)
        self.front.set()


def test_new_certificates_are_used_once_the_files_have_them(server, authorities, tmp_path):
    old, new = authorities
    files = {name: str(tmp_path / name) for name in ("ca_file", "cert_file", "key_file")}

    def install(authority):
        shutil.copy(authority.ca_file, files["ca_file"])
        for name, path in zip(("cert_file", "key_file"), authority.client, strict=True):
            shutil.copy(path, files[name])

    install(old)
    with (
        Rotating(server, authorities, asks_clients=True) as rotating,
        open_at(rotating.url, **files) as harness,
    ):
        assert harness.store(K[:4]) == {}
        rotating.rotate()
        assert "CERTIFICATE_VERIFY_FAILED" in str(harness.load(K[:4])[0])
        install(new)
        assert harness.load(K[:4]) == {}


def test_a_file_of_certificates_that_is_not_usable_names_the_option(server, authorities, tmp_path):
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text("no certificate")
    with (
        Rotating(server, authorities) as rotating,
        pytest.raises(TierUnavailableError, match="tls_ca_file"),
    ):
        open_at(rotating.url, ca_file=str(ca_file), max_retries=0)


def test_the_given_certificates_stand_in_place_of_the_systems(server, authorities, monkeypatch):
    old, new = authorities
    monkeypatch.setenv("SSL_CERT_FILE", old.ca_file)
    with Rotating(server, authorities) as rotating:
        open_at(rotating.url).close()
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            open_at(rotating.url, ca_file=new.ca_file)


class NameServer:
    """Answers for one name, or does not; everything else is resolved as usual."""

    def __init__(self, monkeypatch):
        self.addresses = []
        self.answers = threading.Event()
        self.answers.set()
        self.calls = 0
        real = socket.getaddrinfo

        def getaddrinfo(host, port, *rest, **options):
            if host != NAME or options.get("flags"):
                return real(host, port, *rest, **options)
            self.calls += 1
            assert self.answers.wait(DEADLINE_S)
            if not self.addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [found for one in self.addresses for found in real(one, port, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def names(monkeypatch):
    names = NameServer(monkeypatch)
    yield names
    names.answers.set()


def test_a_name_leads_to_the_server_that_it_names_now(server, names):
    with Proxy(server.port) as proxy:
        names.addresses = ["127.0.0.1"]
        with open_at(f"valkey://{NAME}:{proxy.port}/0") as harness:
            assert harness.store(K[:4]) == {}
            calls = names.calls
            assert harness.load(K[:4]) == {}
            assert names.calls == calls  # a connection that is there needs no address
            proxy.set(refuses=True)
            assert harness.load(K[:4]) != {}
            assert names.calls > calls
            names.addresses = []
            proxy.set()
            with pytest.raises(TierUnavailableError, match=f"address of {NAME}: .*not known"):
                harness.load(K[:4])
            names.addresses = ["127.0.0.1"]
            assert harness.load(K[:4]) == {}


@pytest.mark.parametrize("dead", ["127.0.0.9", "::1"])
def test_an_address_that_does_not_answer_is_passed_over(server, names, dead):
    names.addresses = [dead, "127.0.0.1"]
    with open_at(f"valkey://{NAME}:{server.port}/0", max_retries=0) as harness:
        assert harness.store(K[:4]) == {}
        assert harness.load(K[:4]) == {}


def test_a_read_only_server_is_left_for_another_address_of_its_name(names, tmp_path):
    names.addresses = ["127.0.0.2", "127.0.0.3"]
    with (
        ValkeyPair(tmp_path) as pair,
        Proxy(pair.primary.port, host="127.0.0.2") as one,
        Proxy(pair.replica.port, host="127.0.0.3", port=one.port) as other,
        open_at(f"valkey://{NAME}:{one.port}/0") as harness,
    ):
        for first, entrance in enumerate((one, other, one)):
            before = entrance.connections
            new = [key_of(number) for number in range(4 * first, 4 * first + 4)]
            assert harness.store(new) == {}
            assert harness.load(new) == {}
            assert entrance.connections > before or first == 0
            pair.wait_for_replica()
            pair.fail_over()


def test_a_route_is_left_once_however_many_calls_are_refused():
    route = Route("127.0.0.1", 1, Lookups(1.0), 1.0)
    for _ in range(8):
        route.leave(0)
    assert route.generation == 1


def test_a_name_server_that_hangs_costs_a_deadline_and_is_named(server, names):
    names.addresses = ["127.0.0.1"]
    with Proxy(server.port) as proxy:
        url = f"valkey://{NAME}:{proxy.port}/0"
        with open_at(url, call_timeout_s=1.0, max_retries=0) as harness:
            harness.store(K[:4])
            names.answers.clear()
            calls = names.calls
            proxy.set(refuses=True)
            proxy.set()
            for _ in range(5):
                with pytest.raises(TierUnavailableError, match=f"address of {NAME}: no answer"):
                    raise next(iter(harness.load(K[:4]).values()))
            assert names.calls == calls + 1
            assert harness.run(asyncio.to_thread(lambda: "mine")) == "mine"
            names.answers.set()


def test_the_name_is_compared_with_the_certificate_whatever_its_address(server, names, authorities):
    names.addresses = ["127.0.0.1"]  # for which the certificate is
    old, _ = authorities
    with (
        Proxy(server.port, old.context()) as proxy,
        pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        open_at(f"valkeys://{NAME}:{proxy.port}/0", ca_file=old.ca_file)
