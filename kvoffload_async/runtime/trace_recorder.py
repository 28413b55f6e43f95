"""Records the requests of a running engine as a trace, for `kvoffload simulate` and `replay`."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO, Final

from kvoffload_async.types import OffloadKey, ReqContext

_logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 256 * 1024 * 1024
"""Size at which a file is rotated: an hour of a busy host, a week of a quiet one."""
_MAX_WAITING: Final = 1024
"""Requests that may wait for the disk; more are dropped and counted."""


class TraceRecorder:
    """Writes one line per ended request, in a thread of its own; the owner never waits for it.

    Block ids are hashes of the keys under a secret that is drawn at start and never stored: they
    are equal for equal blocks of one run, and tell nothing of prompts. The file is rotated once it
    is full; one predecessor, with the suffix `.1`, is kept.

    Attributes:
        dropped_requests: Requests that were not recorded, as the disk was too slow or failed.
    """

    def __init__(self, path: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Start the thread, which creates the file; an existing one is rotated away."""
        self._path = Path(path)
        self._max_file_bytes = max_file_bytes
        self._secret = os.urandom(16)
        self._start_s = time.monotonic()
        self._waiting: queue.Queue[tuple[float, Sequence[OffloadKey]] | None] = queue.Queue(
            _MAX_WAITING
        )
        self._has_failed = False
        self._is_closed = False
        self.dropped_requests = 0
        self._thread = threading.Thread(target=self._run, name="kvoffload-trace", daemon=True)
        self._thread.start()

    def note(self, ctx: ReqContext, used: Sequence[OffloadKey]) -> None:
        """Record a request that has ended; its prompt is that of its first KV-cache group.

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
        """Write the requests that wait, for `timeout_s` seconds at most; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline_s = time.monotonic() + timeout_s
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return  # the disk hangs; the thread is a daemon
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        try:
            while self._write_file():
                pass
        except OSError as error:
            self._has_failed = True
            _logger.warning(
                "record_trace: %s cannot be written: %s; no more requests are recorded",
                self._path,
                error.strerror or error,
            )
            while self._waiting.get() is not None:
                self.dropped_requests += 1

    def _write_file(self) -> bool:
        """Write one file; return whether it is full."""
        if self._path.exists():
            self._rotate()
        with self._path.open("w", encoding="ascii") as file:
            size_bytes = 0
            while (request := self._waiting.get()) is not None:
                size_bytes += self._write(file, *request)
                if size_bytes >= self._max_file_bytes:
                    return True
        return False

    def _write(self, file: IO[str], at_s: float, keys: Sequence[OffloadKey]) -> int:
        group = keys[0][-4:]
        ids = [self._id_of(key) for key in keys if key[-4:] == group]
        written = file.write(json.dumps({"timestamp": int(at_s * 1000), "hash_ids": ids}) + "\n")
        if self._waiting.empty():
            file.flush()
        return written

    def _id_of(self, key: OffloadKey) -> int:
        return int.from_bytes(blake2b(key, digest_size=8, key=self._secret).digest(), "big")

    def _rotate(self) -> None:
        self._path.replace(self._path.with_name(self._path.name + ".1"))
