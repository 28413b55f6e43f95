"""A real Mooncake master, from the package `mooncake-transfer-engine-non-cuda`."""

import importlib.util
from pathlib import Path

import pytest
from servers.process import ServerProcess, free_ports

from kvoffload_async.tiers.mooncake.process import MooncakeSettings

SEGMENT_BYTES = 64 << 20


def binary():
    """Return the master's binary; skips where there is none, or the library cannot be loaded."""
    found = importlib.util.find_spec("mooncake")
    if found is None:
        pytest.skip("there is no Mooncake Store: install the extra mooncake")
    pytest.importorskip("mooncake.store", reason="needs libibverbs1", exc_type=ImportError)
    return Path(found.origin).parent / "mooncake_master"


class Library:
    """The store's client in this process, as its library makes it."""

    def __init__(self, connection):
        from mooncake import store

        self.store = store.MooncakeDistributedStore()
        how = connection
        status = self.store.setup(
            *(how.host, how.metadata_url, how.segment_bytes, 16 << 20),
            *(how.protocol, how.rdma_devices, how.master),
        )
        assert status == 0, f"{how.master} cannot be joined ({status})"
        self._replication = store.ReplicateConfig()
        self._replication.replica_num = how.replicas

    def register(self, address, num_bytes):
        assert self.store.register_buffer(address, num_bytes) == 0

    def put(self, names, addresses, sizes):
        return self.store.batch_put_from_multi_buffers(names, addresses, sizes, self._replication)

    def get(self, names, addresses, sizes):
        return self.store.batch_get_into_multi_buffers(names, addresses, sizes)

    def close(self):
        self.store.close()


class _Memory(ServerProcess):
    """A client that gives memory to a store, and does nothing else."""

    def __init__(self, folder, options, num_bytes):
        (port,) = free_ports(1)
        command = [binary().with_name("mooncake_client"), "--host=127.0.0.1", f"--port={port}"]
        command += [f"--global_segment_size={num_bytes >> 20}MB"]
        command += [f"--master_server_address={options['master']}"]
        command += [f"--metadata_server={options['metadata_url']}"]
        super().__init__(command, port, folder / "memory.log")


class MooncakeMaster(ServerProcess):
    """A master with a metadata server, and a client that gives memory to the store.

    Attributes:
        host: A client in this process, which gives none.
    """

    def __init__(self, folder, segment_bytes=SEGMENT_BYTES):
        self.port, self._metadata_port, metrics = free_ports(3)
        command = [binary(), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"]
        command += ["--enable_http_metadata_server=true", f"--metrics_port={metrics}"]
        command += ["--http_metadata_server_host=127.0.0.1", "--enable_metric_reporting=false"]
        command += [f"--http_metadata_server_port={self._metadata_port}"]
        super().__init__(command, self.port, folder / "mooncake.log")
        self._memory = _Memory(folder, self.options, segment_bytes)

    @property
    def options(self):
        url = f"http://127.0.0.1:{self._metadata_port}/metadata"
        return {"master": f"127.0.0.1:{self.port}", "metadata_url": url, "segment_bytes": 0}

    def connection(self, **options):
        return MooncakeSettings(**{**self.options, **options})

    def __enter__(self):
        self.start()
        self._memory.start()
        self.host = Library(self.connection())
        return self

    def __exit__(self, *_):
        self.host.close()
        self._memory.kill()
        self.kill()
