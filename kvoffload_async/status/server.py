"""The status socket of a running engine: answers each request with one line of JSON.

The Unix socket is served by its own thread instead of the event loop: with `OffloadEngine` the loop
is that of the server's requests, which clients of the socket must not delay. The thread serves one
connection at a time, at most twenty per second, each for one request and at most two seconds;
others wait in the listener's queue, which the system limits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from weakref import WeakMethod, WeakSet

from kvoffload_async.config import parse_socket_path
from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import ConfigError, OffloadError, text_of
from kvoffload_async.statistics import COMMON_GAUGES, OffloadingStatistics
from kvoffload_async.system_calls import naming_refusal
from kvoffload_async.timeline import SlowRequest

logger = logging.getLogger(__name__)

SOCKET_VARIABLE: Final = "KVOFFLOAD_STATUS_SOCKET"
"""Environment variable with the socket's path, used if the configuration has none."""
STATUS_REQUEST: Final = b"status"
STATUS_VERSION: Final = 1
"""Version of the JSON format; a new field does not change the version."""
MAX_QUEUED: Final = 16
"""Maximum number of connections waiting to be accepted; the system refuses more."""
COMMAND_PREFIX: Final = b"cache "
"""Precedes the JSON object of a command in its request."""
MAX_REQUEST_BYTES: Final = 128 << 10
CONNECTION_TIMEOUT_S: Final = 1.0
_PAUSE_S: Final = 0.05
_STOP_S: Final = 2.0
_LOCK_TRIES: Final = 100
_LOCK_PAUSE_S: Final = 0.01

_GONE: Final = "the engine was garbage-collected without `close()`"

_Identity = tuple[int, int, int]
Answer = Callable[[bytes], bytes]
"""Maps a request to its response, both without line end; must not raise."""


class StatusSocket:
    """A Unix socket that listens from construction, and answers from `serve` until `close`.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        path: Path of the socket.
    """

    def __init__(self, path: str) -> None:
        """Listen on the path, with mode 0600; a dead process's socket is replaced.

        Raises:
            ConfigError: A live process listens there, another file exists, or the socket cannot be
                created.
        """
        self.path = path
        self._errors = ErrorLog(logger, "answering a client of the status socket")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._peer: socket.socket | None = None
        """The connection being served."""
        self._closed = False
        try:
            self._listener, self._identity = _listen(path)
        except OSError as error:
            raise ConfigError(
                f"status_socket: cannot create a socket at {path!r}: {error.strerror or error}; "
                "give a path in an existing directory that this user can write to"
            ) from error
        _open_sockets.add(self)

    def serve(self, answer: Answer) -> None:
        """Start a thread that answers clients; raises RuntimeError if it cannot be started."""
        thread = threading.Thread(
            target=self._run, args=(answer,), name="kvoffload-status", daemon=True
        )
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """End the connection, stop the thread and remove the socket; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._remove()
        self._stop.set()
        if self._thread is None:
            self._listener.close()
            return
        for waiting in (self._listener, self._peer):
            if waiting is not None:
                with contextlib.suppress(OSError):  # the thread has closed it
                    waiting.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_STOP_S)
        if self._thread.is_alive():  # it is computing a response, and closes them afterwards
            logger.warning("%s did not stop within %s s", self._thread.name, _STOP_S)

    # -- internal -------------------------------------------------------------------------------

    def _run(self, answer: Answer) -> None:
        try:
            while not self._stop.is_set():
                with self._errors.survived():
                    self._serve_next(answer)
                # Limits the rate, so that busy clients delay only each other.
                self._stop.wait(_PAUSE_S)
        finally:
            self._remove()  # the socket is no longer served
            self._listener.close()

    def _serve_next(self, answer: Answer) -> None:
        """Wait for a client, and answer its request if it is not too long."""
        try:
            peer, _ = self._listener.accept()
        except OSError:  # the socket is closed, or no descriptor is free
            return
        # If the client is too slow or has gone, the next one is served.
        with peer, contextlib.suppress(OSError):
            self._peer = peer
            try:
                if self._stop.is_set() or (request := _request_of(peer)) is None:
                    return
                response = answer(request) + b"\n"
                peer.settimeout(CONNECTION_TIMEOUT_S)
                peer.sendall(response)
            finally:
                self._peer = None

    def _remove(self) -> None:
        """Remove the socket file unless another file has replaced it; idempotent.

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

    def _leave_to_parent(self) -> None:
        """Close inherited descriptors in a forked child, which does not serve the socket."""
        self._closed = True
        for inherited in (self._listener, self._peer):
            if inherited is not None:
                inherited.close()


def _request_of(peer: socket.socket) -> bytes | None:
    """Return a client's request; None if it is too long.

    Raises:
        TimeoutError: It did not arrive in time.
        OSError: The client has closed the connection.
    """
    deadline_s = time.monotonic() + CONNECTION_TIMEOUT_S
    request = bytearray()
    while b"\n" not in request:
        if len(request) > MAX_REQUEST_BYTES:
            return None
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        peer.settimeout(left_s)
        received = peer.recv(MAX_REQUEST_BYTES + 1 - len(request))
        if not received:
            raise ConnectionResetError
        request += received
    return bytes(request.partition(b"\n")[0])


_open_sockets: WeakSet[StatusSocket] = WeakSet()


def _in_child() -> None:
    for opened in list(_open_sockets):
        opened._leave_to_parent()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_in_child)


def _listen(path: str) -> tuple[socket.socket, _Identity | None]:
    """Return a listening socket and the identity of its file."""
    with _locked_directory(Path(path).parent):
        _remove_stale(Path(path))
        listener = socket.socket(socket.AF_UNIX)
        try:
            with naming_refusal("fchmod"):
                os.fchmod(listener.fileno(), 0o600)  # Linux creates the file with the socket's mode
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
            given = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            owner = f"process {struct.unpack('3i', given)[0]}"
    raise ConfigError(
        f"status_socket: {str(path)!r} is in use by {owner}; give each engine a path of its own"
    )


def _identity(path: Path) -> _Identity:
    """Return a file's identity, to distinguish it from earlier and later files."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


ReadStatistics = Callable[[], OffloadingStatistics]
ReadSlowest = Callable[[], Sequence[SlowRequest] | None]
AnswerCommand = Callable[[object], Mapping[str, Any]]
"""Answers a command, given as parsed JSON; does not wait."""


class EngineStatus:
    """The status socket of one engine, if configured.

    A thread of its own answers requests, so an engine answers also while it is idle or hangs.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self, model: str | None, read: ReadStatistics | None = None) -> None:
        """Create the object without a socket.

        Args:
            model: Name of the model whose blocks the engine holds.
            read: Method that returns the statistics; None: the one passed to `serve`.
        """
        self._model = model
        # Weak, so that an engine that was not closed can be garbage-collected, with a warning.
        self._method = None if read is None else WeakMethod(read)
        self._began_s = time.monotonic()
        self._socket: StatusSocket | None = None
        self._errors = ErrorLog(logger, "reading the statistics for the status socket")

    def listen(self, path: str | None, suffix: str = "", *, needs_socket: bool = False) -> None:
        """Create the socket if there is a path; clients wait for answers until `serve`.

        Args:
            path: The configured path; None: that of the environment, if there is one.
            suffix: Ends the path, for engines that share a configuration.
            needs_socket: Whether commands are to be accepted, for which there must be a path.

        Raises:
            ConfigError: There must be a path, or the socket cannot be created; see `StatusSocket`.
        """
        if path is None and (path := os.environ.get(SOCKET_VARIABLE)):
            parse_socket_path(path, SOCKET_VARIABLE)
        if needs_socket and not path:
            raise ConfigError(
                "status_socket_commands: true is not valid without a socket; set status_socket or "
                f"{SOCKET_VARIABLE}, or leave it out"
            )
        self._socket = StatusSocket(path + suffix) if path else None

    def serve(
        self,
        read: ReadStatistics,
        read_slowest: ReadSlowest,
        answer_command: AnswerCommand | None = None,
    ) -> None:
        """Answer requests with the results of these methods, as long as their objects are alive.

        Args:
            read: Returns the statistics.
            read_slowest: Returns the slowest requests.
            answer_command: Answers commands; None: they are refused.
        """
        if self._socket is not None:
            method, slowest = self._method or WeakMethod(read), WeakMethod(read_slowest)
            commands = None if answer_command is None else WeakMethod(answer_command)
            self._socket.serve(
                lambda asked: (
                    _answer_command(asked, commands)
                    if asked.startswith(COMMAND_PREFIX)
                    else self._answer(asked, method, slowest)
                )
            )

    def close(self) -> None:
        """Remove the socket; idempotent."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def _answer(
        self,
        request: bytes,
        method: WeakMethod[ReadStatistics],
        slowest: WeakMethod[ReadSlowest],
    ) -> bytes:
        """Return the answer to a request. Runs on the socket's thread."""
        if request.strip() != STATUS_REQUEST:
            return _error(f'the request must be "{STATUS_REQUEST.decode()}" and a line end')
        read, read_slowest = method(), slowest()
        if read is None or read_slowest is None:
            return _error(_GONE)
        try:
            return self._status_line(read(), read_slowest())
        except OffloadError as error:
            return _error(text_of(error))
        except BaseException as error:  # noqa: BLE001 - a third party's tier; keep serving
            self._errors.note(error)
            return _error(f"the statistics cannot be read: {text_of(error)}")

    def _status_line(
        self, stats: OffloadingStatistics, slowest: Sequence[SlowRequest] | None
    ) -> bytes:
        statistics = asdict(stats)
        for tier in statistics["tiers"]:
            _drop_what_is_no_number(tier)
        status = {
            "version": STATUS_VERSION,
            "pid": os.getpid(),
            "model": self._model,
            "time_s": time.time(),
            "uptime_s": time.monotonic() - self._began_s,
            "kind": type(stats).__name__,
            "statistics": statistics,
            "slowest": None if slowest is None else [asdict(request) for request in slowest],
        }
        return json.dumps(status, separators=(",", ":"), allow_nan=False).encode()


def _answer_command(request: bytes, answer: WeakMethod[AnswerCommand] | None) -> bytes:
    """Return the answer to a command. Runs on the socket's thread."""
    if answer is None:
        return _error(
            "this engine accepts no commands: set status_socket_commands in its configuration"
        )
    if (method := answer()) is None:
        return _error(_GONE)
    try:
        command = json.loads(request.removeprefix(COMMAND_PREFIX))
    except (ValueError, RecursionError) as error:
        return _error(f"the command is not JSON: {error}")
    return json.dumps(method(command), separators=(",", ":")).encode()


def _drop_what_is_no_number(tier: dict[str, Any]) -> None:
    """Remove gauges of a tier that JSON cannot represent."""
    gauges = tier["gauges"] = {
        str(name): value
        for name, value in tier["gauges"].items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    for name in COMMON_GAUGES:
        tier[name] = gauges.get(name)


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
