"""Which boot of which kernel this is: what was written in another one may have been lost."""

from __future__ import annotations

import socket
from pathlib import Path


def boot_id() -> str:
    """Return what is unique to this boot of this kernel; the host's name where there is nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
