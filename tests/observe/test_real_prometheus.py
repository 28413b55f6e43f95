"""A real Prometheus scrapes a running engine: everything that is shown of it has data.

It takes `prometheus` and `promtool` from the path, or from the folder that KVOFFLOAD_PROMETHEUS_BIN
names; `nox -s prometheus` brings them.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import doc_blocks
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from kvoffload_async import OffloadEngine, SecondaryTierFactory, TieringOffloadingSpec
from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.observe.prometheus import METRICS, MetricKind, OffloadCollector
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import ReqContext, make_offload_key

DOCS = Path(__file__).parents[2] / "docs" / "metrics"
RULE_TESTS = Path(__file__).parent / "alert_rules.yml"
DEADLINE_S = 60.0
POLL_S = 0.2


def found(name):
    folder = os.environ.get("KVOFFLOAD_PROMETHEUS_BIN")
    path = shutil.which(name, path=folder) if folder else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: `nox -s prometheus` brings it")
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, what):
        with urllib.request.urlopen(self._url + what, timeout=5.0) as answer:  # noqa: S310 - our own
            return json.load(answer)["data"]

    def has_data(self, expression):
        """Tell whether there is a value; nothing divided by nothing is none."""
        found = self.ask("query?" + urllib.parse.urlencode({"query": expression}))["result"]
        return any(series["value"][1] != "NaN" for series in found)

    def firing(self, count):
        """Return the firing alerts, once there are so many."""
        deadline_s = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        alerts = []
        while len(alerts) < count and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):  # it does not listen yet
                alerts = [a for a in self.ask("alerts")["alerts"] if a["state"] == "firing"]
            pause.wait(POLL_S)
        return alerts

    def missing(self, expressions):
        """Return the expressions that have no data; those without any are asked again."""
        deadline_s = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):  # it does not listen yet
                expressions = [each for each in expressions if not self.has_data(each)]
            if not expressions:
                break
            pause.wait(POLL_S)
        return expressions


@contextmanager
def scraping(folder, *targets):
    """Run Prometheus over targets; a rule that waits a minute waits a second here."""
    rules = folder / "alerts.yml"
    rules.write_text(
        (DOCS / "alerts.yml").read_text(encoding="utf-8").replace("for: 1m", "for: 1s"),
        encoding="utf-8",
    )
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 250ms, evaluation_interval: 250ms}\n"
        f"rule_files: [{rules}]\n"
        f"scrape_configs: [{{job_name: kvoffload, static_configs: [{{targets: {[*targets]}}}]}}]\n",
        encoding="utf-8",
    )
    with (folder / "log").open("wb") as log:
        command = [
            found("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def of_dashboard():
    dashboard = json.loads((DOCS / "dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = re.sub(r"\$__(rate_interval|range)", "1m", target["expr"])
            yield re.sub(r"\$(engine|instance)", ".*", expression)


def of_rules():
    """Yield what the rules compare; that it is not too much yet is no lack of data."""
    text = (DOCS / "alerts.yml").read_text(encoding="utf-8")
    for rule in re.findall(r"expr: (?:>-\n)?(.+?)\n +(?:for|labels):", text, re.DOTALL):
        compared = re.fullmatch(r"(.+) (?:>|==) [\d.]+", " ".join(rule.split()))
        yield compared[1]


ABSENT = {
    "kvoffload_tier_errors_total": "nothing fails here",
    "kvoffload_tier_unopened_since_timestamp_seconds": "every tier is open",
    "kvoffload_tier_load_blocks_per_second": "all loads are equally large",
}


def of_metrics():
    for metric in METRICS:
        suffix = "_bucket" if metric.kind is MetricKind.HISTOGRAM else ""
        if metric.name not in ABSENT:
            yield metric.name + suffix


@contextmanager
def served(stats):
    """Serve the metrics of an engine "0"; yields the registry and the address."""
    registry = CollectorRegistry()
    registry.register(OffloadCollector({"0": stats}))
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield registry, f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE_S)


async def work(engine):
    """Store, load and look up, so that every rate has something to divide by."""
    hashes = [bytes([number]) * 32 for number in range(4)]
    for round_number in range(3):
        async with engine.request(f"r{round_number}", hashes) as request:
            held = await engine.lookup(request)
            await engine.load(request, list(range(held)))
            await engine.store(request, list(range(4)))
        while engine.driver.has_pending_work():
            await engine.wait_for_progress(1.0)
        await engine.reset()


async def evaluated(tmp_path, expressions):
    """Return which of the expressions have no data for an engine at work."""
    config = {
        "cpu_bytes_to_use": "1MiB",
        "model": "org/model",
        "secondary_tiers": [
            {
                "type": "slab",
                "root_dir": str(tmp_path / "slab"),
                "capacity_bytes": "8MiB",
                "prefill_blocks_per_s": 1.0,
            },
            {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "8MiB"},
        ],
    }
    kv_caches = {"layer": torch.zeros((8, 4096), dtype=torch.uint8)}
    async with OffloadEngine(config, kv_caches=kv_caches) as engine:
        with served(engine.stats) as (registry, address):
            await work(engine)
            with scraping(tmp_path, address) as prometheus:
                asking = asyncio.create_task(asyncio.to_thread(prometheus.missing, expressions))
                while not asking.done():
                    await work(engine)
                    await asyncio.wait({asking}, timeout=POLL_S)
                missing = await asking
            metrics = generate_latest(registry)
    return missing, metrics


@pytest.mark.slow
def test_every_metric_and_every_expression_of_dashboard_and_rules_has_data(tmp_path):
    promtool = found("promtool")
    expressions = [*of_metrics(), *of_dashboard(), *of_rules()]
    assert len(expressions) > len(METRICS) + 20
    missing, metrics = asyncio.run(evaluated(tmp_path, expressions))
    assert missing == []
    command = [promtool, "check", "metrics"]
    checked = subprocess.run(command, input=metrics, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


class UnreachableTier(ExampleTier):
    async def open(self, env):
        raise TierUnavailableError("connection refused")


class UnwritableTier(ExampleTier):
    async def store(self, job):
        raise TierUnavailableError("read-only file system")


@pytest.mark.slow
def test_of_two_hosts_with_an_engine_0_each_the_right_one_is_named_by_every_alert(
    tmp_path, monkeypatch
):
    registry = SecondaryTierFactory._registry
    own = {"unreachable": lambda: UnreachableTier, "unwritable": lambda: UnwritableTier}
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, **own})
    common = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "org/model"}
    unopened = {"type": "unreachable", "required": False}
    first = {**common, "secondary_tiers": [unopened, {"type": "example"}]}
    second = {**common, "secondary_tiers": [{"type": "unwritable"}, {"type": "example"}]}
    with TieringOffloadingSpec(first) as one, TieringOffloadingSpec(second) as other:
        managers = one.get_manager(), other.get_manager()
        for manager in managers:
            ctx = ReqContext("r")
            manager.on_new_request(ctx)
            for number in range(4):  # more than `breaker_fault_threshold` stores
                keys = [make_offload_key(bytes([number]) * 32, 0)]
                manager.prepare_store(keys, ctx)
                manager.complete_store(keys, ctx)
                manager.on_schedule_end()
                while manager.has_pending_work():
                    manager.wait_for_progress(1.0)
                    manager.on_schedule_end()
        with (
            served(managers[0].stats) as (_, a),
            served(managers[1].stats) as (_, b),
            scraping(tmp_path, a, b) as prometheus,
        ):
            assert prometheus.missing(["kvoffload_tier_unopened_since_timestamp_seconds"]) == []
            alerts = [alert["labels"] for alert in prometheus.firing(2)]
    named = {(a["alertname"], a["instance"], a["tier"], a.get("direction")) for a in alerts}
    assert named == {
        ("KvoffloadTierNotOpen", a, "unreachable", None),
        ("KvoffloadTierSuspended", b, "unwritable", "store"),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", DOCS / "alerts.yml"],
        ["check", "rules", DOCS / "vllm-alerts.yml"],
        ["test", "rules", RULE_TESTS],
    ],
)
def test_promtool_accepts_the_rules_and_their_tests_pass(arguments):
    command = [found("promtool"), *map(str, arguments)]
    checked = subprocess.run(command, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_accepts_the_configuration_of_the_page_about_metrics(tmp_path):
    (config,) = (
        block.text
        for block in doc_blocks.blocks_of(DOCS.parent / "howto" / "observe.md")
        if block.title == "prometheus.yml"
    )
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(DOCS / "alerts.yml", tmp_path)
    command = [found("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
