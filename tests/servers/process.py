"""A server process of a test: on a port of its own, ended for certain."""

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack

import pytest

READY_S = 60.0

at_length = pytest.mark.skipif(
    os.environ.get("KVOFFLOAD_SERVERS") != "all",
    reason="it takes a server long: nox -s servers, or KVOFFLOAD_SERVERS=all",
)


def free_ports(count):
    """Return ports that nobody listens on, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_until(is_done):
    """Ask until the answer is yes; AssertionError where that takes too long."""
    deadline_s = time.monotonic() + READY_S
    while not is_done():
        assert time.monotonic() < deadline_s, "it takes too long"
        select.select([], [], [], 0.02)


class ServerProcess:
    """Starts a command, waits until its port answers, and kills it.

    Attributes:
        command: What to run; the kernel kills it with this process, where that can be had.
        log: File that its output goes to.
    """

    def __init__(self, command, port, log, **options):
        killer = shutil.which("setpriv")
        self.command = [*([killer, "--pdeathsig", "KILL"] if killer else []), *map(str, command)]
        self.port = port
        self.log = log
        self._options = options
        self._process = None

    def start(self):
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **self._options,
            )
        deadline_s = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise RuntimeError(f"no server: {self.log.read_text(errors='replace')[-2000:]}")
            select.select([], [], [], 0.02)

    def kill(self):
        """End it as a crash would: SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self):
        """Stop it as a host does that hangs: connections stay, and nothing answers."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self):
        """Have it go on."""
        os.kill(self._process.pid, signal.SIGCONT)

    def _answers(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True
