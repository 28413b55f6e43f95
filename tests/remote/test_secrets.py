"""No secret in anything that a run prints, logs, raises or counts, in order and with faults."""

import json
import logging
import traceback
from urllib.parse import quote

import prometheus_client
import pytest
from servers import seaweedfs
from servers.proxy import Proxy
from servers.valkey import ValkeyServer
from typer.testing import CliRunner

from kvoffload_async import ConfigError, OffloadConfig, TieringOffloadingSpec
from kvoffload_async.cli.app import app
from kvoffload_async.config import without_secrets
from kvoffload_async.observe.prometheus import OffloadCollector
from kvoffload_async.observe.trace_events import TraceEventFile
from kvoffload_async.status.client import ask
from kvoffload_async.testing.harness import key_of
from kvoffload_async.types import LookupResult, ReqContext

VALKEY_SECRET = "v4lkey/p@ss word"  # noqa: S105 - made up
WRONG_SECRET = "wr0ng/p@ss+word"  # noqa: S105 - made up
K = [key_of(number) for number in range(8)]
FAULTS = ({}, {"flip_at": 2000}, {"flip_at": 1}, {"reset_at": 3}, {"refuses": True}, {})
STEP_S = 0.02
UNDECIDED = {LookupResult.RETRY, LookupResult.HIT_PENDING}

pytestmark = pytest.mark.filterwarnings("default")  # of a library whose connection was reset


class ValkeyRun:
    """A server with a password, and the configuration of a tier on it."""

    secret = VALKEY_SECRET

    def __init__(self, server):
        self.server = server

    def tier(self, port, secret=VALKEY_SECRET):
        url = f"valkey://:{quote(secret, safe='')}@127.0.0.1:{port}/0"
        return {"type": "valkey", "url": url}


class ObjectRun:
    """The same of an S3 server."""

    secret = seaweedfs.SECRET_ACCESS_KEY

    def __init__(self, server):
        self.server = server

    def tier(self, port, secret=seaweedfs.SECRET_ACCESS_KEY):
        connection = self.server.connection("secrets", port=port, secret_access_key=secret)
        return seaweedfs.tier_config(connection)


@pytest.fixture(scope="module")
def valkey_run(tmp_path_factory):
    with ValkeyServer(tmp_path_factory.mktemp("server"), password=VALKEY_SECRET) as server:
        yield ValkeyRun(server)


@pytest.fixture(scope="module")
def object_run(s3_server):
    return ObjectRun(s3_server)


@pytest.fixture(params=["valkey", pytest.param("object", marks=pytest.mark.servers)])
def run(request):
    return request.getfixturevalue(f"{request.param}_run")


@pytest.fixture
def proxy(run):
    with Proxy(run.server.port) as proxy:
        yield proxy


@pytest.fixture
def status_socket(tmp_path_factory):
    return str(tmp_path_factory.mktemp("s") / "kv.sock")


def config_of(tier):
    quick = {"call_timeout_s": 0.2, "io_timeout_s": 0.5, "max_retries": 1, "open_timeout_s": 20.0}
    return {
        "cpu_bytes_to_use": "1MiB",
        "block_bytes": "4KiB",
        "model": "org/model",
        "breaker_retry_s": 0.1,
        "secondary_tiers": [tier | quick],
    }


def check(said, *secrets):
    """No secret is in a text, as it is or as a URL or JSON writes it."""
    assert len(said) > 100
    for secret in secrets:
        forms = {secret, quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1]}
        for form in forms | {secret[:8]}:
            assert form not in said


def finish_jobs(manager, lookup=None):
    """Go on until nothing is under way, and a lookup has its answers."""
    while True:
        manager.on_schedule_end()
        answers = lookup() if lookup else ()
        if not UNDECIDED.intersection(answers) and not manager.has_pending_work():
            return
        manager.wait_for_progress(STEP_S)


def request(manager, name, fault):
    """Store anew what is not found."""
    ctx = ReqContext(name)
    manager.on_new_request(ctx)
    finish_jobs(manager, lambda: [manager.lookup(key, ctx) for key in K])
    extra = [key_of(100 + number) for number in range(4 * fault, 4 * fault + 4)]
    manager.prepare_store(extra, ctx)
    manager.complete_store(extra, ctx)
    manager.on_request_finished(ctx)
    finish_jobs(manager)
    manager.reset_cache()
    manager.on_reset_flushed()


def said_on(status_socket):
    """Return what an engine says there, and what is shown of it."""
    top = CliRunner().invoke(app, ["top", status_socket])
    assert top.exit_code == 0, top.output
    return [ask(status_socket), top.output]


@pytest.mark.slow
def test_a_run_with_faults_says_no_secret(run, proxy, caplog, status_socket, tmp_path):
    caplog.set_level(logging.DEBUG)
    config = config_of(run.tier(proxy.port))
    config |= {"status_socket": status_socket, "explain_requests": 100}
    parsed = OffloadConfig.parse(config)
    said = []
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        ctx = ReqContext("first")
        manager.on_new_request(ctx)
        manager.prepare_store(K, ctx)
        manager.complete_store(K, ctx)
        manager.on_request_finished(ctx)
        finish_jobs(manager)
        for number, fault in enumerate(FAULTS):
            proxy.set(**fault)
            request(manager, f"r{number}", number)
            said += said_on(status_socket)
        timelines = manager.timelines()
        assert len(timelines) == 1 + len(FAULTS)
        said += [form(timeline) for timeline in timelines for form in (str, repr)]
        with TraceEventFile(tmp_path / "trace.json") as events:
            for timeline in timelines:
                events.add(timeline)
        said.append((tmp_path / "trace.json").read_text())
        registry = prometheus_client.CollectorRegistry()
        registry.register(OffloadCollector({"0": manager.stats}))
        said.append(prometheus_client.generate_latest(registry).decode())
        (tier,) = manager.secondary_tiers
        inner = tier.link.actor._tier
        said += map(repr, (spec, parsed, manager, manager.stats(), tier, inner))
        said += map(repr, vars(inner).values())
        said += [
            inner.describe(),
            repr(inner.gauges()),
            json.dumps(without_secrets(config["secondary_tiers"][0])),
        ]
    said.append(caplog.text)
    assert "suspended" in caplog.text or "failed" in caplog.text
    check("\n".join(said), run.secret)


def test_a_wrong_secret_is_not_said_either(run, proxy, caplog):
    caplog.set_level(logging.DEBUG)
    config = config_of(run.tier(proxy.port, WRONG_SECRET))
    with pytest.raises(ConfigError) as raised:
        TieringOffloadingSpec(config).get_manager()
    said = "".join(traceback.format_exception(raised.value)) + repr(raised.value) + caplog.text
    check(said, run.secret, WRONG_SECRET)


@pytest.mark.parametrize(("secret", "status"), [(None, 0), (WRONG_SECRET, 2)])
def test_the_commands_say_no_secret(run, tmp_path, secret, status):
    tier = run.tier(run.server.port, *([secret] if secret else []))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(tier) | {"block_bytes": "16KiB"}))
    shown = CliRunner().invoke(app, ["check-config", str(path)])
    written = {"--trace-out": tmp_path / "trace.json", "--report": tmp_path / "report.html"}
    arguments = ["replay", "--config", str(path), "--limit", "2", "-v", "--json", "-"]
    arguments += ["--explain", "0", *(str(part) for pair in written.items() for part in pair)]
    replayed = CliRunner().invoke(app, arguments)
    assert (shown.exit_code, replayed.exit_code) == (0, status), replayed.output
    said = shown.output + replayed.output + replayed.stderr
    if status == 0:
        said += "".join(path.read_text() for path in written.values())
    check(said, run.secret, WRONG_SECRET)
