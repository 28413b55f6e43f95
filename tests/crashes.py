"""Workloads that are killed: a server runs each in a child of its own, and a test talks to it.

Requests go to the server's stdin as JSON lines, answers come from its stdout. One process that has
imported everything forks a child for each workload, which takes a few milliseconds.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvoffload_async.testing.harness import TierHarness

TESTS = Path(__file__).parent
RANDOM_KILLS = int(os.environ.get("KVOFFLOAD_RANDOM_KILLS", "280"))
"""How many kills at random times a sweep tries."""
DEADLINE_S = 60
SERVING_S = 3600


class WrongBytesError(Exception):
    pass


def load(harness: TierHarness, keys) -> dict[int, Exception]:
    """Load blocks; return the failures by index. What was served must be right."""
    failures = harness.load(keys)
    for slot, key in enumerate(keys):
        if slot not in failures and not harness.holds(key, slot):
            raise WrongBytesError(key.hex())
    return failures


# -- the server ---------------------------------------------------------------------------------


def answer(value: dict) -> None:
    os.write(1, (json.dumps(value) + "\n").encode())


def forked(call: Callable[[], dict]) -> int:
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


def serve(**workloads: Callable[..., dict]) -> None:
    """Run the workloads of these names that are asked for, until there is nobody to ask.

    A request is the name as `kind` and the arguments; with `delay_s`, the child is killed then.
    """
    pause = threading.Event()
    for line in sys.stdin:
        request = json.loads(line)
        workload = workloads[request.pop("kind")]
        delay_s = request.pop("delay_s", None)
        child = forked(partial(workload, **request))
        if delay_s is not None:
            pause.wait(delay_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        answer({"killed": os.WIFSIGNALED(status), "status": status})


def crew(
    processes: int, kills: int, seed: int, pause_s: float, start: Callable[[int], dict]
) -> dict:
    """Keep processes at work and kill one after the other; in the end, all of them.

    Args:
        processes: How many are at work.
        kills: How many are killed.
        seed: Of what is drawn here; each process gets a number of its own for what it draws.
        pause_s: The longest time between two kills.
        start: What each does until it is killed.
    """
    draw, pause = random.Random(seed), threading.Event()
    numbers = itertools.count(seed * 1_000_000)
    pids = [forked(partial(start, next(numbers))) for _ in range(processes)]
    for killed in range(1, kills + 1):
        pause.wait(draw.uniform(0.002, pause_s))
        _end(pids.pop(draw.randrange(len(pids))))
        if kills - killed >= len(pids) + 1:
            pids.append(forked(partial(start, next(numbers))))
    return {"kills": kills}


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"process {pid} ended by itself, with status {status}")


# -- who talks to it ----------------------------------------------------------------------------


class Process:
    """A script that speaks JSON lines; `argument` is its only one."""

    def __init__(self, script: Path, argument: dict | None = None) -> None:
        arguments = [] if argument is None else [json.dumps(argument)]
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        )
        self._watchdog = threading.Timer(SERVING_S, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def __enter__(self):
        return self

    def __exit__(self, *_error) -> None:
        self.close()

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._watchdog.cancel()

    def tell(self, request: dict | None = None) -> None:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict:
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def run(self, kind: str, **request) -> list[dict]:
        """Have a child do something; return what it said, and then how it ended."""
        self.tell({"kind": kind} | request)
        said = [self.hear()]
        while "killed" not in said[-1]:
            said.append(self.hear())
        return said
