"""Serving traces: JSON lines, a request a line, as the Mooncake project publishes them.

Only `hash_ids` is read: the ids of the prompt's blocks in order, where equal ids mean equal
prefixes up to and including that block.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from kvoffload_async.errors import InputError
from kvoffload_async.replay.source import MAX_BLOCK_ID, RequestSource

STDIN = "-"
"""The path that means standard input."""

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Far above any request, and it keeps a file that is no trace from being read as one line."""


class TraceFile(RequestSource):
    """A trace, read line by line as it is replayed; a pipe will do. Open until `close`."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        """Open it.

        Raises:
            InputError: It cannot be read.
        """
        super().__init__(limit)
        self._path = path
        self._read_bytes = 0
        try:
            self._file = sys.stdin.buffer if str(path) == STDIN else path.open("rb")
        except OSError as error:
            raise _unreadable(path, error) from error
        status = os.fstat(self._file.fileno())
        self._size_bytes = status.st_size
        self._is_regular = stat.S_ISREG(status.st_mode)

    def close(self) -> None:
        self._file.close()

    def most_blocks(self) -> int | None:
        """Read the trace once more, if that is possible.

        Raises:
            InputError: It cannot be read, or a line is malformed.
        """
        if not self._is_regular or str(self._path) == STDIN:
            return None
        with closing(TraceFile(self._path, self._limit)) as trace:
            return max(map(len, trace), default=0)

    def _requests(self) -> Iterator[Sequence[int]]:
        is_empty = True
        for number, line in enumerate(iter(self._read_line, b""), 1):
            if line.isspace():
                continue
            try:
                block_ids = parse_line(line)
            except InputError as error:
                raise InputError(f"{self._path}: Malformed line {number}: {error}") from error
            is_empty = False
            yield block_ids
        if is_empty:
            raise InputError(f"{self._path}: no request; a trace has one a line, with hash_ids")

    def _read_line(self) -> bytes:
        try:
            line = self._file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        self._read_bytes += len(line)
        return line

    def _fraction_of_all(self) -> float:
        return self._read_bytes / self._size_bytes if self._size_bytes else 0.0


def parse_line(line: bytes) -> list[int]:
    """Return the block ids of one line.

    Raises:
        InputError: It is no object with a list `hash_ids` of integers in the range of block ids.
    """
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        request = json.loads(line.rstrip().decode())
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not usable JSON: {error}") from error
    block_ids = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(block_ids, list):
        raise InputError('it must be an object with a list "hash_ids"')
    for index, block_id in enumerate(block_ids):
        # Not isinstance: true and false are integers to it.
        if type(block_id) is not int or not 0 <= block_id <= MAX_BLOCK_ID:
            raise InputError(
                f"hash_ids[{index}] is {json.dumps(block_id)[:40]}; "
                f"it must be an integer from 0 to {MAX_BLOCK_ID}"
            )
    return block_ids


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read: {error.strerror or error}")
