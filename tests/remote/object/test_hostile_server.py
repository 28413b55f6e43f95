"""A server that redirects, repeats the request, or never ends its answer."""

import html
import logging
from urllib.parse import quote

import obstore
import pytest
from remote.object.tiers import BLOCK_BYTES, QUICK, K, set_environment, tier_on
from servers.scripted_http import ScriptedServer
from servers.seaweedfs import tier_config
from typer.testing import CliRunner

from kvoffload_async import SecondaryTierFactory
from kvoffload_async.cli.app import app
from kvoffload_async.errors import ConfigError, CorruptBlockError, TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.tiers.object.client import ObjectClient, text_of
from kvoffload_async.tiers.object.endpoints import permitted_hosts
from kvoffload_async.tiers.object.tier import ObjectOptions
from kvoffload_async.tiers.remote.client import RefusedError

ACCESS_KEY = "s3cret/key+of=tests"
SESSION_TOKEN = "t0ken/of+the=session"  # noqa: S105 - made up
SIGNATURE = "s1gnature/with+signs="
OFFERED_BYTES = 256 << 20
MOST_SENT_BYTES = 32 << 20
"""What a socket takes that nobody reads is less."""
EMPTY_AZURE_LIST = b"<EnumerationResults><Blobs></Blobs><NextMarker/></EnumerationResults>"
EMPTY_LIST = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"


def s3_at(server, **options):
    given = {
        "endpoint": f"http://127.0.0.1:{server.port}",
        "region": "us-east-1",
        "access_key_id": "AKIDEXAMPLE",
        "secret_access_key": ACCESS_KEY,
    }
    given |= options | {"allow_http": True}
    return ObjectOptions(url="s3://bucket/fleet", store_options=given)


def azure_at(server):
    sas = f"sv=2022-11-02&sp=rwdl&sig={quote(SIGNATURE, safe='')}"
    given = {
        "endpoint": f"http://127.0.0.1:{server.port}",
        "account_name": "account",
        "sas_key": sas,
        "allow_http": True,
    }
    return ObjectOptions(url="az://account/blocks", store_options=given)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("all_proxy", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION_TOKEN)


# -- redirects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("connection_to", [s3_at, azure_at])
@pytest.mark.parametrize("call", [obstore.head, obstore.get])
def test_a_redirect_to_another_host_is_refused_and_that_host_hears_nothing(connection_to, call):
    with ScriptedServer(lambda request: request.reply(200, b"!")) as other:
        location = f"http://localhost:{other.port}/"
        with ScriptedServer(lambda request: request.reply(302, Location=location)) as server:
            store = connection_to(server).open()
            with pytest.raises(obstore.exceptions.BaseError) as raised:
                call(store, "name")
            assert len(server.requests) == 1
        assert other.requests == []
    error = ObjectClient(store, "0" * 32, {}).mapped(raised.value)
    assert isinstance(error, RefusedError)
    assert "redirected to another host" in str(error)
    check(str(error))


def test_a_redirect_within_the_host_is_followed():
    def answer(request):
        if request.path.endswith("/new"):
            request.reply(200, b"!")
        else:
            request.reply(307, Location=f"{request.path}/new")

    with ScriptedServer(answer) as server:
        assert bytes(obstore.get(s3_at(server).open(), "name").bytes()) == b"!"


@pytest.mark.parametrize(
    ("url", "options", "variables", "hosts"),
    [
        ("s3://b", {"endpoint": "https://s3.host:9000"}, {}, {"s3.host", "169.254.0.0/16"}),
        ("s3://b", {"endpoint": "http://[::1]:9000"}, {}, {"::1"}),
        (
            "s3://b",
            {"region": "eu-x"},
            {"AWS_ENDPOINT": "http://h"},
            {"h", "sts.eu-x.amazonaws.com"},
        ),
        (
            "s3://b",
            {"endpoint": "http://h"},
            {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://issuer:1/a", "AZURE_X": "http://other"},
            {"h", "issuer"},
        ),
        (
            "az://a/c",
            {"azure_storage_endpoint": "http://h"},
            {},
            {"h", "login.microsoftonline.com"},
        ),
        ("gs://b", {"base_url": "http://h"}, {}, {"h", "oauth2.googleapis.com"}),
    ],
)
def test_the_endpoint_and_those_who_issue_credentials_are_reached(
    monkeypatch, url, options, variables, hosts
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    permitted = set(permitted_hosts(url, options))
    assert hosts <= permitted
    assert "other" not in permitted


@pytest.mark.parametrize("endpoint", [None, "", "host:9000", "http://[", "ftp://host"])
def test_without_an_endpoint_that_has_a_host_nothing_is_forbidden(endpoint):
    options = {} if endpoint is None else {"endpoint": endpoint}
    assert permitted_hosts("s3://b", {"region": "x"} | options) == []


@pytest.mark.parametrize("is_bypassed", [False, True])
def test_a_proxy_of_the_environment_is_used_unless_the_environment_excludes_the_endpoint(
    monkeypatch, is_bypassed
):
    with (
        ScriptedServer(lambda request: request.reply(200, b"direct")) as server,
        ScriptedServer(lambda request: request.reply(200, b"proxied")) as proxy,
    ):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1" if is_bypassed else "")
        found = bytes(obstore.get(s3_at(server).open(), "name").bytes())
        assert found == (b"direct" if is_bypassed else b"proxied")


# -- secrets ------------------------------------------------------------------------------------


def echo(request):
    """Repeat the request, in every form in which servers do."""
    text = f"{request.requestline} {dict(request.headers)} {ACCESS_KEY} {SESSION_TOKEN} {SIGNATURE}"
    forms = [text, html.escape(text), quote(text), quote(text).lower(), quote(quote(text))]
    body = f"<Error><Code>EchoedRequest</Code><Message>{' '.join(forms)}</Message></Error>"
    request.reply(500, body.encode())


def check(said):
    """No part of a secret is in a text; signs are what forms differ in."""
    assert len(said) > 20
    for secret in ("s3cret", "of=tests", "t0ken", "the=session", "s1gnature", "signs"):
        assert secret not in said.lower()


@pytest.mark.parametrize("connection_to", [s3_at, azure_at])
def test_a_server_that_repeats_the_request_has_no_secret_said(connection_to, caplog):
    caplog.set_level(logging.DEBUG)
    with ScriptedServer(echo) as server:
        config = {"type": "object", "model": "org/model", "max_retries": 0}
        config |= tier_config(connection_to(server))
        view = memoryview(bytearray(4 * 4096)).cast("B", (4, 4096))
        with pytest.raises(Exception, match="500 Internal Server Error: EchoedRequest") as raised:
            SecondaryTierFactory.create_secondary_tier(config, view, None)
    check(f"{raised.value!r} {raised.value} {raised.value.__cause__!r} {caplog.text}")


@pytest.mark.parametrize("connection_to", [s3_at, azure_at])
def test_jobs_on_such_a_server_have_no_secret_in_their_errors(connection_to, caplog):
    caplog.set_level(logging.DEBUG)

    def answer(request):
        if "list" in request.path:
            request.reply(200, EMPTY_LIST if connection_to is s3_at else EMPTY_AZURE_LIST)
        elif ".json" in request.path:
            request.reply(200)
        else:
            echo(request)

    with (
        ScriptedServer(answer) as server,
        # This tier knows no secrets that it could hide.
        TierHarness(tier_on(connection_to(server), max_retries=0, **QUICK)) as harness,
    ):
        failures = [*harness.store(K[:2]).values(), *harness.load(K[:2]).values()]
        with pytest.raises(TierUnavailableError) as raised:
            harness.contains(K[:2])
        figures = harness.tier.gauges()
    assert len(failures) == 4
    assert all("500 Internal Server Error" in str(error) for error in failures)
    check(f"{failures!r} {raised.value!r} {figures} {caplog.text}")


def test_the_command_on_such_a_server_says_no_secret(monkeypatch):
    with ScriptedServer(echo) as server:
        set_environment(monkeypatch, s3_at(server))
        done = CliRunner().invoke(app, ["store", "verify", "s3://bucket/fleet"])
    assert done.exit_code != 0
    assert "EchoedRequest" in done.output + done.stderr
    check(done.output + done.stderr)


def test_secrets_of_the_environment_are_hidden_in_what_the_library_says(monkeypatch, caplog):
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", f"sv=1&sig={quote(SIGNATURE, safe='')}")

    def answer(request):
        request.reply(200, EMPTY_LIST, **{"Last-Modified": SESSION_TOKEN, "ETag": SESSION_TOKEN})

    with ScriptedServer(answer) as server:
        config = {"type": "object", "model": "m", "max_retries": 0} | tier_config(s3_at(server))
        view = memoryview(bytearray(4 * 4096)).cast("B", (4, 4096))
        tier = SecondaryTierFactory.create_secondary_tier(config, view, None)
        inner = tier.link.actor._tier
        tier.shutdown(5.0)
    said = inner._settings.redact(f"a long text with {SESSION_TOKEN} and {SIGNATURE}")
    check(said + caplog.text + repr(inner) + repr(inner.gauges()))


# -- bodies -------------------------------------------------------------------------------------


def longer_than_announced(request):
    """Send endlessly where an object of a few bytes was announced."""
    if request.command != "GET":
        request.reply(200)
    elif "list-type" in request.path:
        request.reply(200, EMPTY_LIST)
    else:
        request.begin(200, Content_Length=BLOCK_BYTES, Transfer_Encoding="chunked")
        request.pour(OFFERED_BYTES, is_chunked=True)


def test_an_object_is_read_no_further_than_it_may_be_long():
    with ScriptedServer(longer_than_announced) as server:
        with TierHarness(tier_on(s3_at(server), **QUICK), 64, BLOCK_BYTES) as harness:
            failures = harness.load(K[:1])
        assert isinstance(failures[0], CorruptBlockError)
    assert 0 < server.poured_bytes < MOST_SENT_BYTES


def test_the_command_reads_no_object_further_than_it_was_listed(monkeypatch):
    namespace = "0" * 32
    name = f"fleet/{namespace}/0d0/0d0d_g0"
    meta = f"<Key>{name}</Key><Size>4224</Size><LastModified>2026-11-23T14:53:16Z</LastModified>"
    listed = f"<Contents>{meta}<ETag>1</ETag></Contents>"
    prefixes = f"<CommonPrefixes><Prefix>fleet/{namespace}/</Prefix></CommonPrefixes>"

    def answer(request):
        if "list-type" not in request.path:
            longer_than_announced(request)
        else:
            content = prefixes if "delimiter" in request.path else listed
            request.reply(200, f"<ListBucketResult>{content}</ListBucketResult>".encode())

    with ScriptedServer(answer) as server:
        set_environment(monkeypatch, s3_at(server))
        done = CliRunner().invoke(app, ["store", "verify", "s3://bucket/fleet"])
    assert "longer than listed" in done.output + done.stderr
    assert 0 < server.poured_bytes < MOST_SENT_BYTES


def test_an_error_however_long_is_a_line():
    error = obstore.exceptions.GenericError(
        f"Generic S3 error: Error performing GET http://host/{'x' * 500} in 1ms - Server returned "
        f"non-2xx status code: 503 Service Unavailable: <Code>SlowDown</Code>{'x' * (8 << 20)}"
    )
    assert text_of(error).endswith("status code: 503 Service Unavailable: SlowDown")
    assert len(text_of(error)) < 600


def test_a_server_that_redirects_is_an_error_of_the_configuration():
    with (
        ScriptedServer(
            lambda request: request.reply(302, Location="http://localhost:9/")
        ) as server,
        pytest.raises(ConfigError, match="redirected to another host"),
    ):
        TierHarness(tier_on(s3_at(server)))
