"""A real S3 server behind a network that breaks, and one that refuses."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import obstore
import pytest
from remote.object.tiers import QUICK, names_in, tier_on
from remote.values import read, value_of
from servers.process import at_length
from servers.seaweedfs import SeaweedServer

from kvoffload_async.errors import (
    CallTimeoutError,
    ConfigError,
    CorruptBlockError,
    SlowDownError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object import client as client_module
from kvoffload_async.tiers.object.client import ObjectClient
from kvoffload_async.tiers.object.tier import ObjectOptions
from kvoffload_async.tiers.remote.client import RefusedError, ValueExistsError

K = [key_of(number) for number in range(64)]
BLOCK_BYTES = 65536

pytestmark = pytest.mark.servers


def open_on(connection, **options):
    return TierHarness(tier_on(connection, **QUICK | options), 64, BLOCK_BYTES, timeout_s=20.0)


@pytest.fixture
def harness(server, proxy, prefix):
    with open_on(server.connection(prefix, port=proxy.port)) as harness:
        yield harness


def kinds(failures):
    return {type(error) for error in failures.values()}


def recovers(harness, keys):
    """Whether everything loads, once the connections that were broken are gone."""
    return harness.load(keys) == {} and all(harness.holds(k, i) for i, k in enumerate(keys))


_NO_ANSWER = {CallTimeoutError, TierTimeoutError, TierUnavailableError}


@pytest.mark.parametrize("in_body", [False, True])
def test_a_timeout_of_the_librarys_own_is_counted_and_leaves_a_doubt(
    server, proxy, prefix, in_body, monkeypatch
):
    connection = server.connection(prefix, port=proxy.port)
    monkeypatch.setattr(client_module, "timedelta", lambda seconds: timedelta(seconds=0.4))
    options = {"call_timeout_s": 30.0, "job_timeout_s": 30.0, "max_retries": 0}
    with open_on(connection, **options) as harness:
        harness.store(K[:1])
        proxy.set(**({"stalls_at": 4_000} if in_body else {"stalls": True}))
        assert kinds(harness.load(K[:1])) == {CallTimeoutError}
        assert harness.tier.gauges()["timeouts"] == 1
        proxy.set()
        assert recovers(harness, K[:1])
        assert harness.tier.gauges()["health_checks"] == 1


def test_latency_costs_time_alone(harness, proxy):
    harness.store(K[:4])
    proxy.set(latency_s=0.02)
    assert recovers(harness, K[:4])


@pytest.mark.parametrize("at", [3, 40_000])
@pytest.mark.parametrize("how", ["reset_at", "close_at"])
def test_a_connection_that_ends_in_a_reply_is_tried_again(harness, proxy, at, how):
    harness.store(K[:4])
    proxy.set(**{how: at})
    assert recovers(harness, K[:4])


def test_a_bit_that_flips_on_the_way_is_seen_and_the_block_is_read_again(harness, proxy):
    harness.store(K[:1])
    proxy.set(flip_at=40_000)
    assert recovers(harness, K[:1])
    assert harness.tier.gauges()["read_again"] == 1
    assert harness.tier.gauges()["corrupt"] == 0


def test_bits_that_flip_in_the_protocol_do_no_harm(harness, proxy):
    harness.store(K[:4])
    for at in (0, 9, 20, 100):
        proxy.set(flip_at=at)
        failures = harness.load(K[:4])
        assert all(harness.holds(K[i], i) for i in range(4) if i not in failures)
    proxy.set()
    harness.store(K[:4])
    assert recovers(harness, K[:4])


def test_a_stalled_server_costs_a_deadline_and_hits_come_back(server, proxy, prefix):
    connection = server.connection(prefix, port=proxy.port, timeout_s=0.4)
    with open_on(connection, call_timeout_s=0.4, job_timeout_s=1.0) as harness:
        harness.store(K[:4])
        proxy.set(stalls=True)
        assert kinds(harness.load(K[:4])) <= _NO_ANSWER
        with pytest.raises(TierUnavailableError):
            harness.contains(K[:4])
        proxy.set()
        assert recovers(harness, K[:4])
        assert harness.tier.gauges()["bytes_in_flight"] == 0


def test_a_server_that_refuses_connections_is_unavailable_and_then_there_again(harness, proxy):
    harness.store(K[:4])
    proxy.set(refuses=True)
    assert kinds(harness.load(K[:4])) == {TierUnavailableError}
    proxy.set()
    assert recovers(harness, K[:4])


@at_length
def test_a_server_that_was_killed_serves_again_once_it_is_back(tmp_path):
    with SeaweedServer(tmp_path) as server, open_on(server.connection("a")) as harness:
        harness.store(K[:4])
        server.kill()
        assert kinds(harness.load(K[:4])) == {TierUnavailableError}
        server.start()
        for _ in range(50):  # the server may have lost blocks, and finds the others in time
            try:
                failures = harness.load(K[:4])
                harness.store(K[:4])
            except TierUnavailableError:
                continue
            assert all(harness.holds(K[i], i) for i in range(4) if i not in failures)
            if not failures:
                break
        assert not failures


@pytest.mark.parametrize(
    "options",
    [{"secret_access_key": "wr0ng/secret"}, {"access_key_id": "nobody"}, {"bucket": "not-there"}],
)
def test_wrong_credentials_and_a_missing_bucket_are_errors_of_the_configuration(
    server, options, caplog
):
    with pytest.raises(ConfigError, match="correct url or credentials") as raised:
        open_on(server.connection("x", **options))
    said = f"{raised.value!r} {raised.value.__cause__} {caplog.text}"
    assert "wr0ng" not in said
    assert "s3cret/key" not in said


def test_connections_that_have_died_unheard_cost_a_deadline_and_are_replaced(server, proxy, prefix):
    with open_on(
        server.connection(prefix, port=proxy.port, timeout_s=0.5),
        call_timeout_s=0.5,
        job_timeout_s=8.0,
    ) as harness:
        harness.store(K[:4])
        proxy.set(drops_open=True)
        assert recovers(harness, K[:4])
        assert harness.tier.gauges()["timeouts"] > 0


def test_a_server_that_reads_slowly_costs_the_deadline_and_holds_nothing(server, proxy, prefix):
    with open_on(
        server.connection(prefix, port=proxy.port, timeout_s=0.5),
        call_timeout_s=0.5,
        job_timeout_s=1.0,
    ) as harness:
        harness.store(K[:2])
        proxy.set(reader_pause_s=0.1)
        assert kinds(harness.store(K[8:24])) <= _NO_ANSWER
        assert harness.tier.gauges()["bytes_in_flight"] == 0
        proxy.set()
        assert recovers(harness, K[:2])
        assert harness.store(K[8:24]) == {}
        assert recovers(harness, K[8:24])


def test_two_hosts_that_write_the_same_keys_at_once_both_succeed(server, prefix):
    connection = server.connection(prefix)
    with open_on(connection) as one, open_on(connection) as other:
        jobs = []
        for harness in (one, other):
            harness.fill(K, range(len(K)))
            jobs.append(harness.job(K, range(len(K)), is_promotion=False))
        with ThreadPoolExecutor() as pool:
            stores = [
                pool.submit(harness.run, harness.tier.store(job))
                for harness, job in zip((one, other), jobs, strict=True)
            ]
        assert [store.result() for store in stores] == [{}, {}]
        assert recovers(one, K)
        assert recovers(other, K)


def test_a_prefix_of_64_blocks_costs_at_most_8_requests(server, prefix):
    with open_on(server.connection(prefix)) as harness:
        harness.store(K[:40], range(40))
        before = harness.tier.gauges()["requests"]
        assert list(harness.run(harness.tier.longest_prefixes([K]))) == [40]
        assert harness.tier.gauges()["requests"] - before <= 8


def test_names_are_spread_over_prefixes_and_a_description_says_whose_they_are(server, prefix):
    connection = server.connection(prefix)
    with open_on(connection) as harness:
        harness.store(K[:8])
    names = names_in(connection)
    (description,) = [name for name in names if name.endswith(".json")]
    blocks = [name.split("/") for name in names if name != description]
    assert {namespace for namespace, *_ in blocks} == {description.removesuffix(".json")}
    assert len({digits for _, digits, _ in blocks}) == 8
    assert all(len(digits) == 3 and name.startswith(digits) for _, digits, name in blocks)


@pytest.fixture(params=["directory", "S3"])
def connection(request, tmp_path):
    if request.param == "directory":
        return ObjectOptions(url=f"file://{tmp_path}/blocks")
    server = request.getfixturevalue("server")
    return server.connection(request.getfixturevalue("prefix"))


def test_an_age_is_renewed_by_a_copy_to_and_fro_that_leaves_nothing(connection):
    with open_on(connection, ttl_s=60.0) as harness:
        harness.store(K[:2])
        before = sorted(names_in(connection))
        harness.run(harness.tier._client.renew(K[:3]))
        assert sorted(names_in(connection)) == before
        assert recovers(harness, K[:2])


def test_a_bad_object_is_removed_only_if_it_is_still_the_bad_one(connection):
    with open_on(connection) as harness:
        harness.store(K[:1])
        client = harness.tier._client
        name, store = client._name(K[0]), connection.open()
        good = bytes(obstore.get(store, name).bytes())
        obstore.put(store, name, b"bad")
        bad = read(harness, K[0], 1 << 20)
        obstore.put(store, name, good)
        assert harness.run(client.remove_if(K[0], bad, "")) is False
        assert recovers(harness, K[:1])
        obstore.put(store, name, b"bad")
        assert kinds(harness.load(K[:1])) == {CorruptBlockError}
        assert harness.contains(K[:1]) == frozenset()
        assert harness.run(client.remove_if(K[0], bad, "")) is False
        assert harness.store(K[:1]) == {}
        assert recovers(harness, K[:1])


def test_an_object_that_is_too_long_is_not_read(connection):
    with open_on(connection) as harness:
        harness.store(K[:1])
        obstore.put(connection.open(), harness.tier._client._name(K[0]), bytes(1 << 20))
        found = read(harness, K[0], BLOCK_BYTES + 128)
        assert len(found.data) == 0
        assert kinds(harness.load(K[:1])) == {CorruptBlockError}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Server returned non-2xx status code: 403 Forbidden", RefusedError),
        ("404 Not Found: <Code>NoSuchBucket</Code>", RefusedError),
        ("507 Insufficient Storage", TierFullError),
        ("507 Insufficient Storage: <Code>XMinioStorageFull</Code>", TierFullError),
        ("403 Forbidden: <Code>QuotaExceeded</Code>", TierFullError),
        ("500 Internal Server Error: write /data/1.dat: no space left on device", TierFullError),
        (f"PUT http://host/{'x' * 500} - status code: 507 Insufficient Storage", TierFullError),
        ("PUT http://host/timeout/QuotaExceeded: 500 Internal Error", TierUnavailableError),
        ("500: <Resource>/b/timeout</Resource><Key>StorageFull</Key>", TierUnavailableError),
        ("500 Internal Server Error: <Code>InternalError</Code>", TierUnavailableError),
        ("error sending request Debug source: source: TimedOut, s3cret", CallTimeoutError),
        ("operation timed out\n\nDebug source: (s3cret)", CallTimeoutError),
        ("connection reset", TierUnavailableError),
        ("503 Service Unavailable: <Code>SlowDown</Code>", SlowDownError),
        ("503 The server is busy: <Code>ServerBusy</Code>", SlowDownError),
        ("429 Too Many Requests", SlowDownError),
        ("503 Service Unavailable", TierUnavailableError),
    ],
)
def test_an_error_of_the_library_is_named_by_what_it_means(text, kind, tmp_path):
    client = ObjectClient(ObjectOptions(url=f"file://{tmp_path}/blocks").open(), "0" * 32, {})
    error = client.mapped(obstore.exceptions.GenericError(text))
    assert type(error) is kind
    assert "s3cret" not in str(error)


def test_the_first_writer_wins_where_two_write_at_once(connection):
    with open_on(connection) as harness:
        obstore.put(connection.open(), harness.tier._client._name(K[0]), b"first")
        value = value_of(harness, K[0], 0)
        (error,) = harness.run(harness.tier._client.put(K[:1], [value]))
        assert isinstance(error, ValueExistsError)
        assert bytes(read(harness, K[0], 1 << 20).data) == b"first"
