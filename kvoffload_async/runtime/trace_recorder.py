"""Records the requests of a running engine as a trace, for `kvoffload simulate` and `replay`."""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import IO, Final, TypeVar

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.helper_thread import answered
from kvoffload_async.tiers.files.modes import Modes
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.types import OffloadKey, ReqContext

T = TypeVar("T")

_logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 256 * 1024 * 1024
"""Size at which a file is rotated: an hour of a busy host, a week of a quiet one."""
_MAX_WAITING: Final = 1024
"""Maximum number of requests waiting to be written; more are dropped and counted."""
_ANSWER_S: Final = 10.0
"""Timeout in seconds for the disk to respond at the start."""
_BEGINNING: Final = b'{"timestamp": '


class TraceFiles:
    """A trace file and its predecessor, in a folder that is opened once.

    Only regular files that begin like a trace, and that no other engine writes, are replaced. No
    symbolic link is followed. New files have mode 0600.
    """

    def __init__(self, path: str) -> None:
        """Open the folder.

        Raises:
            OSError: It cannot be opened.
        """
        self._path, self._predecessor = path, f"{path}.1"
        self._ops = FileOps()
        self._ops.enter(os.path.dirname(path), Modes(file_mode=0o600), make=False)  # noqa: PTH120

    def check(self, *, are_free: bool = False) -> bool:
        """Return whether a trace exists, which a new trace would make the predecessor.

        Args:
            are_free: Whether no other engine may be writing there.

        Raises:
            OSError: One of the two names belongs to something else.
        """
        self._is_trace(self._predecessor, are_free)
        return self._is_trace(self._path, are_free)

    def create(self) -> int:
        """Return the descriptor of a new trace file, locked until `close`.

        Raises:
            OSError: See `check`, or the file cannot be created.
        """
        if self.check(are_free=True):
            self._ops.rename(self._path, self._predecessor)
        fd = self._ops.create_anew(self._path)
        try:
            is_ours = self._ops.lock(fd, wait=False)
        except OSError:
            self.close(fd)
            raise
        if not is_ours:
            self.close(fd)
            raise OSError(errno.EBUSY, "another engine writes its trace there", self._path)
        return fd

    def close(self, fd: int) -> None:
        """Close a trace file."""
        self._ops.close(fd)

    def _is_trace(self, path: str, is_free: bool) -> bool:
        """Return whether a trace exists at a path; False if the file is absent or empty."""
        try:
            fd = self._ops.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            beginning = os.pread(fd, len(_BEGINNING), 0)
            if not _BEGINNING.startswith(beginning):
                raise OSError(errno.EEXIST, "the file is not a trace", path)
            if is_free and self._ops.is_locked(fd):
                raise OSError(errno.EBUSY, "another engine writes its trace there", path)
        finally:
            self._ops.close(fd)
        return bool(beginning)


def check_trace_files(path: str) -> None:
    """Check, without changing anything, that a trace can be written to a path.

    An engine may be writing there: vLLM's workers have the configuration of its scheduler.

    Raises:
        ConfigError: It cannot.
    """
    _answer(path, lambda: TraceFiles(path).check())


def _answer(path: str, call: Callable[[], T]) -> T:
    """Return the result of a disk call; raises ConfigError if it fails or times out."""
    try:
        return answered(call, _ANSWER_S)
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in {None, path} else ""
        raise ConfigError(
            f"record_trace: {path!r} cannot be written: {error.strerror or error}{where}; give "
            "each engine the path of a new file, in a directory that it can write"
        ) from error


class TraceRecorder:
    """Writes one line per ended request, in a thread of its own; the owner never waits for it.

    Block ids are hashes of the keys under a secret that is drawn at start and never stored: they
    are equal for equal blocks of one run, and tell nothing of prompts. The file is rotated once it
    is full; one predecessor, with the suffix `.1`, is kept; see `TraceFiles`.

    Attributes:
        dropped_requests: Requests that were not recorded, as the disk was too slow or failed.
    """

    def __init__(self, path: str) -> None:
        """Create the file and start the thread; an existing trace is rotated away.

        Raises:
            ConfigError: The path, or its predecessor's, is something else, or cannot be written.
        """
        self._path = path
        self._secret = os.urandom(16)
        self._start_s = time.monotonic()
        self._waiting: queue.Queue[tuple[float, Sequence[OffloadKey]] | None] = queue.Queue(
            _MAX_WAITING
        )
        self._has_failed = False
        self._is_closed = False
        self.dropped_requests = 0
        self._thread = threading.Thread(target=self._run, name="kvoffload-trace", daemon=True)
        self._files, self._fd = _answer(path, lambda: (files := TraceFiles(path), files.create()))
        try:
            self._thread.start()
        except RuntimeError:
            self._files.close(self._fd)
            raise

    def note(self, ctx: ReqContext, used: Sequence[OffloadKey]) -> None:
        """Record an ended request by the blocks of its first KV-cache group.

        Args:
            ctx: The request.
            used: The blocks that it used, head to tail, for a request without `key_positions`.
        """
        positions = ctx.key_positions
        keys = sorted(positions, key=positions.__getitem__) if positions else used
        if not keys:
            return
        if self._has_failed:
            self.dropped_requests += 1
            return
        try:
            self._waiting.put_nowait((time.monotonic() - self._start_s, tuple(keys)))
        except queue.Full:
            self.dropped_requests += 1

    def close(self, timeout_s: float) -> None:
        """Write the queued requests, for at most `timeout_s` seconds, and stop; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline_s = time.monotonic() + timeout_s
        try:
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass  # the disk hangs; the thread is a daemon
        if self.dropped_requests:
            _logger.warning(
                "record_trace: %s lacks %d requests: the disk was too slow, or failed",
                self._path,
                self.dropped_requests,
            )

    def _run(self) -> None:
        try:
            while self._write_file():
                self._fd = self._files.create()
        except OSError as error:
            self._has_failed = True
            _logger.warning(
                "record_trace: %s cannot be written: %s; no more requests are recorded",
                error.filename or self._path,
                error.strerror or error,
            )
            while self._waiting.get() is not None:
                self.dropped_requests += 1

    def _write_file(self) -> bool:
        """Write requests to one file and close it; return whether it is full."""
        try:
            with os.fdopen(self._fd, "w", encoding="ascii", closefd=False) as file:
                size_bytes = 0
                while (request := self._waiting.get()) is not None:
                    size_bytes += self._write(file, *request)
                    if size_bytes >= MAX_FILE_BYTES:
                        return True
            return False
        finally:
            self._files.close(self._fd)

    def _write(self, file: IO[str], at_s: float, keys: Sequence[OffloadKey]) -> int:
        group = keys[0][-4:]
        ids = [self._id_of(key) for key in keys if key[-4:] == group]
        written = file.write(json.dumps({"timestamp": int(at_s * 1000), "hash_ids": ids}) + "\n")
        if self._waiting.empty():
            file.flush()
        return written

    def _id_of(self, key: OffloadKey) -> int:
        return int.from_bytes(blake2b(key, digest_size=8, key=self._secret).digest(), "big")
