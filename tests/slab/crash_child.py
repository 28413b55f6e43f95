"""Runs workloads on a `slab` store in forked children, and kills them. Its own script.

Requests come as JSON lines on stdin, answers go as JSON lines to stdout. One process that has
imported everything forks a child for each workload, which takes a few milliseconds.
"""

import json
import os
import random
import signal
import sys
import threading
import traceback
from pathlib import Path

from slab.shelves import BLOCK, FIXED, KIB, Shelves

from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierFullError
from kvoffload_async.testing.fileops import FaultyFileOps
from kvoffload_async.testing.harness import TierHarness, key_of

K = [key_of(number) for number in range(60)]
BAD = K[1]
CAPACITY = FIXED + 14 * BLOCK
OPTIONS = {"capacity_bytes": CAPACITY, "segment_bytes": 24 * KIB, "io_threads": 2}


class WrongBytesError(Exception):
    pass


class UnsyncedFileOps(FaultyFileOps):
    """A kill loses nothing that was written: waiting for the device would test nothing here."""

    def fdatasync(self, fd: int) -> None:
        self._before_fd("fdatasync", fd)


def scripted(root: str, kill_at: int | None, *, torn: bool = False, verify: bool = True) -> dict:
    """A workload that makes the same calls every time: grow, evict, compact, find a bad block."""
    ops = UnsyncedFileOps()
    if kill_at is not None:
        ops.kill(kill_at, torn=torn)
    shelves = Shelves(Path(root))
    with shelves.open(ops, verify=verify, **OPTIONS) as harness:
        for first in range(0, 12, 3):
            harness.store(K[first : first + 3])
        load(harness, K[:3])
        if verify:
            shelves.damage(BAD)
        load(harness, [K[0], BAD])
        for first in range(12, 36, 4):
            harness.store(K[first : first + 4])
    with shelves.open(ops, verify=verify, **OPTIONS) as harness:
        harness.store(K[36:38])
        load(harness, K[30:38])
    return {"calls": [call.name for call in ops.calls]}


def load(harness: TierHarness, keys) -> int:
    failures = harness.load(keys)
    for slot, key in enumerate(keys):
        if slot not in failures and not harness.holds(key, slot):
            raise WrongBytesError(key.hex())
    for error in failures.values():
        if not isinstance(error, BlockMissingError | CorruptBlockError):
            raise error
    return len(keys) - len(failures)


def traffic(root: str, seed: int, *, verify: bool = True) -> dict:
    """Random stores and loads until the process is killed."""
    draw = random.Random(seed)
    options = OPTIONS | {"io_threads": 3, "piece_bytes": 2 * BLOCK, "verify": verify}
    with Shelves(Path(root)).open(**options) as harness:
        while True:
            keys = draw.sample(K, draw.randint(1, 8))
            if draw.random() < 0.7:
                for error in harness.store(keys).values():
                    if not isinstance(error, TierFullError):
                        raise error
            else:
                load(harness, keys)


def answer(value: dict) -> None:
    os.write(1, (json.dumps(value) + "\n").encode())


def forked(call) -> int:
    """Run a call in a child; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        answer(call())
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(1)


def serve() -> None:
    pause = threading.Event()
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("kind")
        if kind == "scripted":
            child = forked(lambda request=request: scripted(**request))
        else:
            delay_s = request.pop("delay_s")
            child = forked(lambda request=request: traffic(**request))
            pause.wait(delay_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        answer({"killed": os.WIFSIGNALED(status), "status": status})


if __name__ == "__main__":
    serve()
