"""LMCache's own commands over the adapter; the tests are collected where LMCache is installed."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from servers.process import ServerProcess, free_ports

ROOT = Path(__file__).parents[2]
collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["test_*.py"]

if importlib.util.find_spec("lmcache"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LMCache's dependencies', when they are imported
        import lmcache.v1.distributed.l2_adapters.factory  # noqa: F401 - for the tests

COMMAND = Path(sys.executable).with_name("lmcache")
ENVIRONMENT = {
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONPATH": str(ROOT),
}


def plugin(*tiers, **params):
    """Return the value for `--l2-adapter`."""
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvoffload_async.integrations.lmcache",
            "class_name": "KVOffloadL2Adapter",
            "adapter_params": {"tier": list(tiers), **params},
        }
    )


def run(*arguments, timeout_s=300):
    """Run a command of LMCache's; return what it prints."""
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def bench_l2(adapter, path, *, size_kib, num_keys, rounds=3, in_flight=1, **options):
    """Run `lmcache bench l2`; return the sections of its figures by operation."""
    given = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
    printed = run(
        *("bench", "l2", "--l2-adapter", adapter, "--num-keys", num_keys, "--no-skip-verify"),
        *("--data-size-kb", size_kib, "--rounds", rounds, "--lookup-max-hit-rate", "0.5"),
        *("--in-flight", in_flight, "--format", "json", "--output", path, *given),
    )
    assert f"All {in_flight * num_keys} keys data verified OK" in printed, printed
    figures = json.loads(Path(path).read_text())
    sections = figures.get("metrics", figures).values()
    return {one["operation"]: one for one in sections if "operation" in one}


class LmcacheServer(ServerProcess):
    """`lmcache server` on a CPU."""

    def __init__(self, folder, adapter):
        self.rpc_port, self.http_port = free_ports(2)
        command = [
            *(COMMAND, "server", "--port", self.rpc_port, "--http-port", self.http_port),
            *("--l1-size-gb", "0.5", "--eviction-policy", "LRU", "--chunk-size", "256"),
            *("--supported-transfer-mode", "engine_driven"),
            *("--shm-name", f"kvoffload-{self.rpc_port}", "--l2-adapter", adapter),
        ]
        environment = {**os.environ, **ENVIRONMENT}
        super().__init__(command, self.http_port, folder / "server.log", env=environment)

    def bench(self, num_requests):
        """Return what `lmcache bench server` prints, with every checksum equal."""
        return run(
            *("bench", "server", "--rpc-url", f"tcp://localhost:{self.rpc_port}", "--mode", "cpu"),
            *("--url", f"http://localhost:{self.http_port}", "--num-tokens", "2048"),
            *("--start", "0", "--end", num_requests, "--interval", "0", "--num-blocks", "256"),
            *("--kvcache-shape-spec", "(2,256,16,8,64):float16:4"),
        )


@pytest.fixture
def serve(tmp_path):
    """Start servers, which are killed at the end."""
    made = []

    def start(adapter):
        made.append(LmcacheServer(tmp_path, adapter))
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.kill()
