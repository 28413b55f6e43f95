"""A real Mooncake master, from the package `mooncake-transfer-engine-non-cuda`."""

import importlib.util
from pathlib import Path

import pytest
from servers.process import ServerProcess, free_ports

from kvoffload_async.tiers.mooncake.client import MooncakeConnection

SEGMENT_BYTES = 64 << 20


def binary():
    """Return the master's binary; skips where there is none, or the library cannot be loaded."""
    found = importlib.util.find_spec("mooncake")
    if found is None:
        pytest.skip("there is no Mooncake Store: install the extra mooncake")
    pytest.importorskip("mooncake.store", reason="needs libibverbs1", exc_type=ImportError)
    return Path(found.origin).parent / "mooncake_master"


class MooncakeMaster(ServerProcess):
    """A master with a metadata server, and a client that gives memory to the store."""

    def __init__(self, folder, segment_bytes=SEGMENT_BYTES):
        self._segment_bytes = segment_bytes
        self.port, self._metadata_port, metrics = free_ports(3)
        command = [binary(), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"]
        command += ["--enable_http_metadata_server=true", f"--metrics_port={metrics}"]
        command += ["--http_metadata_server_host=127.0.0.1", "--enable_metric_reporting=false"]
        command += [f"--http_metadata_server_port={self._metadata_port}"]
        super().__init__(command, self.port, folder / "mooncake.log")

    @property
    def options(self):
        url = f"http://127.0.0.1:{self._metadata_port}/metadata"
        return {"master": f"127.0.0.1:{self.port}", "metadata_url": url, "segment_bytes": 0}

    def connection(self, **options):
        return MooncakeConnection(**{**self.options, **options})

    def __enter__(self):
        self.start()
        self.host = self.connection(segment_bytes=self._segment_bytes).open()
        return self

    def __exit__(self, *_):
        self.host.close()
        self.kill()
