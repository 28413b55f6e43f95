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

from kvoffload_async import OffloadEngine
from kvoffload_async.observe.prometheus import METRICS, MetricKind, OffloadCollector

DOCS = Path(__file__).parents[2] / "docs" / "metrics"
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
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def has_data(self, expression):
        """Tell whether there is a value; nothing divided by nothing is none."""
        url = self._url + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=5.0) as answer:  # noqa: S310 - our own server
            found = json.load(answer)["data"]["result"]
        return any(series["value"][1] != "NaN" for series in found)

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
def scraping(folder, target):
    """Run Prometheus over one target."""
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 250ms}\n"
        f"rule_files: [{DOCS / 'alerts.yml'}]\n"
        f"scrape_configs: [{{job_name: kvoffload, static_configs: [{{targets: ['{target}']}}]}}]\n",
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
            yield target["expr"].replace("$__rate_interval", "1m").replace("$engine", ".*")


def of_rules():
    """Yield what the rules compare; that it is not too much yet is no lack of data."""
    text = (DOCS / "alerts.yml").read_text(encoding="utf-8")
    for rule in re.findall(r"expr: (?:>-\n)?(.+?)\n +(?:for|labels):", text, re.DOTALL):
        compared = re.fullmatch(r"(.+) > [\d.]+", " ".join(rule.split()))
        yield compared[1]


def of_metrics():
    for metric in METRICS:
        suffix = "_bucket" if metric.kind is MetricKind.HISTOGRAM else ""
        if metric.name != "kvoffload_tier_errors_total":  # nothing fails here
            yield metric.name + suffix


async def work(engine):
    """Store, load and look up, so that every rate has something to divide by."""
    hashes = [bytes([number]) * 32 for number in range(4)]
    for round_number in range(3):
        async with engine.request(f"r{round_number}", hashes) as request:
            held = await engine.lookup(request)
            await engine.load(request, list(range(held)))
            await engine.store(request, list(range(4)))
        while engine.manager.has_pending_work():
            await engine.wait_for_progress(1.0)
        await engine.reset()


async def evaluated(tmp_path, expressions):
    """Return which of the expressions have no data for an engine at work."""
    config = {
        "cpu_bytes_to_use": "1MiB",
        "model": "org/model",
        "secondary_tiers": [
            {"type": "slab", "root_dir": str(tmp_path / "slab"), "capacity_bytes": "8MiB"},
            {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "8MiB"},
        ],
    }
    kv_caches = {"layer": torch.zeros((8, 4096), dtype=torch.uint8)}
    async with OffloadEngine(config, kv_caches=kv_caches) as engine:
        registry = CollectorRegistry()
        registry.register(OffloadCollector({"0": engine.stats}))
        server, thread = start_http_server(0, "127.0.0.1", registry)
        try:
            await work(engine)
            target = f"127.0.0.1:{server.server_port}"
            with scraping(tmp_path, target) as prometheus:
                asking = asyncio.create_task(asyncio.to_thread(prometheus.missing, expressions))
                while not asking.done():
                    await work(engine)
                    await asyncio.wait({asking}, timeout=POLL_S)
                missing = await asking
            metrics = generate_latest(registry)
        finally:
            server.shutdown()
            server.server_close()
            thread.join(DEADLINE_S)
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


def test_promtool_accepts_the_rules():
    command = [found("promtool"), "check", "rules", str(DOCS / "alerts.yml")]
    checked = subprocess.run(command, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_promtool_accepts_the_configuration_of_the_page_about_metrics(tmp_path):
    (config,) = (
        block.text
        for block in doc_blocks.blocks_of(DOCS.parent / "howto" / "metrics.md")
        if block.title == "prometheus.yml"
    )
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(DOCS / "alerts.yml", tmp_path)
    command = [found("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
