"""What users do who share a directory for shared memory, each in a process; see `beside`."""

import fcntl
import importlib
import os
import signal

from runtime.beside import join

SIZE = 45_056
"""Bytes of the file for two participants."""


def plant(_pipe, kind, *paths):
    """Put something there, as an attacker would."""
    for path in paths:
        _plant(kind, path)


def _plant(kind, path):
    if kind == "fifo":
        os.mkfifo(path)
        path.chmod(0o666)
    elif kind == "symlink":
        path.symlink_to("/dev/null")
    elif kind == "directory":
        path.mkdir(0o777)
    else:
        with path.open("xb") as file:
            os.fchmod(file.fileno(), 0o600 if kind == "private" else 0o666)
            file.truncate(SIZE)


def start(_pipe, directory):
    """Start an engine with one participant; return whether it made its file."""
    buffer = join(directory, 0, 1)
    return buffer.is_creator and buffer.release()


def start_stopping(pipe, directory, module, name, times=1):
    """Start an engine; it stops before the n-th call of a function and tells its first argument."""
    stops = iter(range(times))
    module = importlib.import_module(module)
    original = getattr(module, name)

    def stopping(first, *args):
        if next(stops, None) == times - 1:
            pipe.send(first)
            pipe.recv()
        return original(first, *args)

    setattr(module, name, stopping)
    return start(pipe, directory)


def lease(pipe, path):
    """Plant a file and keep others from opening it at once."""
    plant(pipe, "public", path)
    with path.open("rb+") as file:
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the kernel asks it to give up with
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        pipe.send("has it")
        pipe.recv()


def start_two(pipe, directory):
    """Start an engine of two participants; stop between them."""
    first = join(directory, 0, 2)
    pipe.send(first.is_creator)
    pipe.recv()
    second = join(directory, 1, 2)
    first.view[0, 0] = os.geteuid() % 251
    return second.view[0, 0] == os.geteuid() % 251 and not second.is_creator
