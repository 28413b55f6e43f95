"""A Unix socket for querying a running engine: one request line, one response line.

It is served by its own thread instead of the event loop: with `OffloadEngine` the loop is that of
the server's requests, which clients of the socket must not delay. The thread works in rounds, at
most twenty per second; per round each connection has at most one read and one write. A connection
makes one request, has two seconds in total, and at most sixteen are open; others wait in the
listener's queue, which the system limits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakSet

from kvoffload_async.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 16
MAX_QUEUED: Final = 16
"""Connections waiting to be accepted; the system refuses more."""
MAX_REQUEST_BYTES: Final = 1024
CONNECTION_TIMEOUT_S: Final = 2.0
_ROUND_S: Final = 0.05
_STOP_S: Final = 2.0
_LOCK_TRIES: Final = 100
_LOCK_PAUSE_S: Final = 0.01

_Identity = tuple[int, int, int]
Answer = Callable[[bytes], bytes]
"""Maps a request to its response, both without line end; must not raise."""


@dataclass(slots=True)
class SocketCounters:
    """Counters of connections.

    Attributes:
        answered: Connections that received their response.
        refused: Connections with a too long request.
        timed_out: Connections that did not complete in time.
        broken_off: Connections closed early by the client.
    """

    answered: int = 0
    refused: int = 0
    timed_out: int = 0
    broken_off: int = 0

    def read(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Connection:
    """One client: its partial request, or the rest of its response."""

    peer: socket.socket
    deadline_s: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class StatusSocket:
    """Listens from construction, and answers from `serve` until `close`.

    Thread: owner, except for the rounds, which run on their own thread.

    Attributes:
        path: Path of the socket.
        counters: Counters of connections.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen on the path, with mode 0600; a dead process's socket is replaced.

        Raises:
            ConfigError: A live process listens there, another file exists, or the socket cannot be
                created.
        """
        self.path = path
        self.counters = SocketCounters()
        self._clock = clock
        self._answer: Answer = _not_yet
        self._answers: dict[bytes, bytes] = {}
        """Responses of a round, so that equal requests are answered once."""
        self._connections: set[_Connection] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        with _usable(path):
            self._listener, self._identity = _listen(path)
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._listens = False
        _open_sockets.add(self)

    def serve(self, answer: Answer) -> None:
        """Start answering, on a separate thread."""
        self._answer = answer
        self._thread = threading.Thread(target=self._run, name="kvoffload-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connections, stop the thread and remove the socket; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._remove()
        with contextlib.suppress(OSError):  # the thread has failed, and closed them
            self._wake.send(b"\0")
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():  # it is computing a response, and closes them afterwards
                logger.warning("%s did not stop within %s s", self._thread.name, _STOP_S)
        else:
            self._close_descriptors()

    def run_round(self, timeout_s: float | None) -> None:
        """Wait for clients, at most `timeout_s` or until a deadline, and serve each once."""
        self._answers.clear()
        self._watch_listener()
        for key, _ in self._selector.select(self._patience_s(timeout_s)):
            if isinstance(key.data, _Connection):
                self._serve(key.data)
            elif key.fileobj is self._listener:
                self._accept()
        now_s = self._clock()
        for connection in [c for c in self._connections if c.deadline_s <= now_s]:
            self.counters.timed_out += 1
            self._end(connection)

    # -- internal -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.run_round(None)
                # Limits the rate, so that busy clients delay only each other.
                self._stop.wait(_ROUND_S)
        finally:
            self._remove()  # the socket is no longer served
            self._close_descriptors()

    def _patience_s(self, timeout_s: float | None) -> float | None:
        if not self._connections:
            return timeout_s
        left_s = max(0.0, min(c.deadline_s for c in self._connections) - self._clock())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def _watch_listener(self) -> None:
        """Poll the listener only below the connection limit, to avoid a busy loop."""
        has_room = len(self._connections) < MAX_CONNECTIONS
        if has_room and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._listens and not has_room:
            self._selector.unregister(self._listener)
        self._listens = has_room

    def _accept(self) -> None:
        while len(self._connections) < MAX_CONNECTIONS:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # the queue is empty, or no descriptor is free: retry in a later round
                return
            peer.setblocking(False)
            connection = _Connection(peer, self._clock() + CONNECTION_TIMEOUT_S)
            self._connections.add(connection)
            self._selector.register(peer, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            is_done = self._receive(connection) if connection.answer is None else False
            is_done = is_done or self._send(connection)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.counters.broken_off += 1
            is_done = True
        if is_done:
            self._end(connection)

    def _receive(self, connection: _Connection) -> bool:
        """Read available data; return whether to close the connection."""
        received = connection.peer.recv(MAX_REQUEST_BYTES + 1 - len(connection.request))
        connection.request += received
        line, end, _ = connection.request.partition(b"\n")
        if not end:
            self.counters.broken_off += not received
            is_too_long = len(connection.request) > MAX_REQUEST_BYTES
            self.counters.refused += is_too_long
            return not received or is_too_long
        request = bytes(line)
        if request not in self._answers:
            self._answers[request] = self._answer(request) + b"\n"
        connection.answer = memoryview(self._answers[request])
        self._selector.modify(connection.peer, selectors.EVENT_WRITE, connection)
        return False

    def _send(self, connection: _Connection) -> bool:
        """Send as much as possible; return whether everything was sent."""
        answer = connection.answer
        if answer is None:
            return False
        connection.answer = answer[connection.peer.send(answer) :]
        self.counters.answered += not connection.answer
        return not connection.answer

    def _end(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.peer)
        connection.peer.close()

    def _remove(self) -> None:
        """Remove the path unless another file replaced it; idempotent.

        Call it before closing the listener, because until then the inode number cannot be reused.
        """
        own, self._identity = self._identity, None
        try:
            if own is not None and _identity(path := Path(self.path)) == own:
                path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s could not be removed: %s", self.path, error)

    def _close_descriptors(self) -> None:
        for connection in list(self._connections):
            connection.peer.close()
        self._connections.clear()
        for opened in (self._selector, self._listener, self._waker, self._wake):
            opened.close()

    def _leave_to_parent(self) -> None:
        """Close inherited descriptors in a forked child, which does not serve the socket."""
        self._closed = True
        self._close_descriptors()


def _not_yet(_request: bytes) -> bytes:
    return b'{"error": "the engine is being opened"}'


_open_sockets: WeakSet[StatusSocket] = WeakSet()


def _in_child() -> None:
    for opened in list(_open_sockets):
        opened._leave_to_parent()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_in_child)


def _listen(path: str) -> tuple[socket.socket, _Identity | None]:
    """Return a listening socket and the identity of its file."""
    with _locked_directory(Path(path).parent):
        _remove_stale(Path(path))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # Linux creates the file with the socket's own mode
            listener.bind(path)
            identity = _identity(Path(path))
            listener.listen(MAX_QUEUED)
        except BaseException:
            listener.close()
            raise
        return listener, identity


@contextlib.contextmanager
def _locked_directory(directory: Path) -> Iterator[None]:
    """Lock a directory, so that no process removes another's new socket as stale."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        pause = threading.Event()
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            pause.wait(_LOCK_PAUSE_S)
        else:
            raise OSError(errno.EAGAIN, f"{directory} is locked by another process")
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    """Remove a stale socket.

    Raises:
        ConfigError: A process listens on it, or it is not a socket.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(
                f"status_socket: {str(path)!r} exists and is not a socket; give another path"
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its queue is full
            owner = "a busy process"
        else:
            owner = f"process {_pid_of(probe)}"
    raise ConfigError(
        f"status_socket: {str(path)!r} is in use by {owner}; give each engine a path of its own"
    )


def _pid_of(connected: socket.socket) -> int:
    size = struct.calcsize("3i")
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def _identity(path: Path) -> _Identity:
    """Return a file's identity, to distinguish it from earlier and later files."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


@contextlib.contextmanager
def _usable(path: str) -> Iterator[None]:
    """Convert an OSError to a ConfigError that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"status_socket: cannot create a socket at {path!r}: {error.strerror or error}; give "
            "a path in an existing directory that this user can write to"
        ) from error
