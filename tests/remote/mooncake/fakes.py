"""A store without Mooncake: the helper as it is, over what `fake_library.py` makes up."""

import hashlib
import socket
import sys
from pathlib import Path

from servers.process import wait_until

from kvoffload_async.tiers.mooncake import helper
from kvoffload_async.tiers.mooncake.settings import HelperSettings, MooncakeConnection
from kvoffload_async.tiers.mooncake.tier import MooncakeTier

PATIENT = {"call_timeout_s": 300.0, "start_timeout_s": 300.0, "leave_timeout_s": 300.0}
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
        self.connection = MooncakeConnection(f"127.0.0.1:{port}", "http://127.0.0.1/metadata")

    def tier(self, integrity_key=None, **settings):
        settings = {"command": self.command, "buffer_bytes": 1 << 20, **PATIENT, **settings}
        return MooncakeTier(self.connection, integrity_key, HelperSettings(**settings))

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
        (name,) = tier._place.names([key])
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
    return tier._keeper._helper


def is_running(pid):
    """Tell whether there is such a process, dead ones that nobody has waited for included."""
    return Path(f"/proc/{pid}").exists()
