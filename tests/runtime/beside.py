"""Processes beside the test's, of its user or others; they meet the test at points on their way."""

import multiprocessing
import os
import signal

from kvoffload_async.runtime.shared_region import SharedBuffer

DEADLINE_S = 120.0
SLOTS, STRIDE = 5, 8192

# A server that has imported what they need makes each of them in a few milliseconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pytest", SharedBuffer.__module__])


class Beside:
    """A process that runs one function, whose first argument is its end of a pipe to us."""

    def __init__(self, function, *args, uid=None):
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_run, args=(theirs, uid, function, args))
        self._process.start()
        theirs.close()

    def reported(self):
        """Return the next thing that it has reported; at the end what the function returned."""
        assert self._pipe.poll(DEADLINE_S), "it hangs"
        return self._pipe.recv()

    def go_on(self, message="go on"):
        self._pipe.send(message)

    def kill(self):
        self._process.kill()
        self._process.join(DEADLINE_S)
        assert self._process.exitcode == -signal.SIGKILL

    def close(self):
        self._pipe.close()
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._process.close()


def _run(pipe, uid, function, args):
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    try:
        pipe.send(function(pipe, *args))
    except Exception as error:  # noqa: BLE001 - the test checks it
        pipe.send(error)


def join(directory, participant=0, num_participants=2, *, num_slots=SLOTS, **options):
    return SharedBuffer(
        "t",
        num_slots * STRIDE,
        STRIDE,
        participant=participant,
        num_participants=num_participants,
        directory=directory,
        **{"join_timeout_s": DEADLINE_S} | options,
    )


def participate(pipe, directory, participant, point):
    """Join; tell the first coming to a point, and stop there."""
    points = {point}

    def stop_at(reached):
        if reached in points:
            points.clear()
            pipe.send(reached)
            pipe.recv()

    def stopping(name, function):
        def call(*args):
            stop_at(f"before {name}")
            result = function(*args)
            stop_at(f"after {name}")
            return result

        return call

    for name in ("ftruncate", "posix_fallocate", "pwrite", "open"):
        setattr(os, name, stopping(name, getattr(os, name)))
    buffer = join(directory, participant)
    stop_at("mapped")
    return "shares it" if buffer.view.shape == (SLOTS, STRIDE) else None


def map_pages(pipe, directory):
    """Join as the second one, with slots of some pages, and stay."""
    buffer = SharedBuffer(
        "t", 64 * 65536, 65536, participant=1, num_participants=2, directory=directory
    )
    pipe.send("mapped")
    pipe.recv()
    return buffer.release()
