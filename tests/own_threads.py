"""The package's threads in this process: which there are, and which do not end."""

import threading
import time
from collections.abc import Collection
from pathlib import Path

PREFIX = "kvoffload"
GRACE_S = 20.0
"""On a busy machine a thread that has nothing left to do may be a while about ending."""


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(PREFIX)}


def left(before: Collection[threading.Thread]) -> list[str]:
    """Return the names of those that were started since and do not end."""
    deadline_s = time.monotonic() + GRACE_S
    started = running().difference(before)
    for thread in started:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return sorted(thread.name for thread in started if thread.is_alive())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Threadless:
    """A system that gives no thread after the first few."""

    def __init__(self, monkeypatch, allowed):
        real = threading.Thread.start

        def start(thread):
            if not allowed:
                raise RuntimeError("can't start new thread")
            allowed.pop()
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
