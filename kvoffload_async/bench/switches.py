"""How often the process's Python threads had to wait: what a busy interpreter costs a tier."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

_LINE: Final = "voluntary_ctxt_switches:"


def count_switches() -> dict[int, int]:
    """Return the voluntary context switches of each Python thread but the one that asks.

    A thread makes one whenever it waits: for work, for a system call, or for the interpreter's
    lock. Threads of native code, which never wait for that lock, do not count.
    """
    own = threading.get_ident()
    others = [thread.native_id for thread in threading.enumerate() if thread.ident != own]
    return {number: _switches_of(number) for number in others if number is not None}


def switches_since(before: dict[int, int]) -> int:
    """Return how many there were since `before`, which `count_switches` has returned."""
    return sum(count - before.get(thread, 0) for thread, count in count_switches().items())


def _switches_of(thread: int) -> int:
    try:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended just now
        return 0
    return next(int(line.removeprefix(_LINE)) for line in lines if line.startswith(_LINE))
