"""A store without Mooncake: the helper as it is, over what `fake_library.py` makes up."""

import asyncio
import contextlib
import hashlib
import socket
import sys
from pathlib import Path

import pytest
from servers.process import wait_until

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.mooncake import helper
from kvoffload_async.tiers.mooncake.process import MooncakeSettings
from kvoffload_async.tiers.mooncake.tier import MooncakeTier

K = [key_of(number) for number in range(40)]
PATIENT = {
    "call_timeout_s": 300.0,
    "response_timeout_s": 300.0,
    "start_timeout_s": 300.0,
    "leave_timeout_s": 300.0,
}
LIBRARY = Path(__file__).with_name("fake_library.py")


class FakeStore:
    """A folder with a store's values, and a port that a helper finds somebody at.

    Attributes:
        command: What the helper is run by.
    """

    def __init__(self, folder):
        self.folder = folder
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.command = (sys.executable, "-I", "-S", str(LIBRARY), helper.__file__, str(folder))
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.master = f"127.0.0.1:{port}"

    def settings(self, **options):
        return MooncakeSettings(
            master=self.master,
            metadata_url="http://127.0.0.1/metadata",
            segment_bytes=0,
            **{"command": self.command, "buffer_bytes": 1 << 20, **PATIENT, **options},
        )

    def tier(self, **options):
        return MooncakeTier(self.settings(**options))

    def fail(self, how, content=b""):
        """Let something go wrong from now on."""
        (self.faults / how).write_bytes(content)

    def mend(self):
        for fault in self.faults.iterdir():
            fault.unlink()

    def wait_for_fault(self):
        """Wait until it has gone wrong."""
        wait_until((self.faults / "reached").exists)

    def value_of(self, tier, key):
        """Return the path of a block's value."""
        (name,) = tier._names([key])
        return self.folder / hashlib.sha256(name.encode()).hexdigest()

    def damage(self, tier, key):
        path = self.value_of(tier, key)
        if not path.exists():
            return False
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return True

    def close(self):
        self._listener.close()


def helper_of(tier):
    return tier._supervisor._helper


def restart(harness):
    """Have a call find that there is no helper, and wait until the next one is there."""
    supervisor = harness.tier._supervisor
    with pytest.raises(TierUnavailableError, match="no helper process"):
        harness.contains(K[:1])

    assert harness.run(is_joined(harness.tier)) or supervisor._pause_s


async def is_joined(tier):
    """Tell whether there is a helper that has joined, once none is being started."""
    starting = tier._supervisor._starting
    if starting is not None:
        await asyncio.wait({starting})
    helper = helper_of(tier)
    return helper is not None and helper.is_joined and not helper.why_ended


def children():
    """Return the numbers of this process's children."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found |= set((task / "children").read_text().split())
    return found


def is_running(pid):
    """Tell whether there is such a process, dead ones that nobody has waited for included."""
    return Path(f"/proc/{pid}").exists()
