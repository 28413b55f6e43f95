"""Sources of requests: serving traces, and the built-in workload.

A request is the list of its prompt's block ids. A trace has one JSON object per line, in the format
of the Mooncake project. `hash_ids` is read: equal ids mean equal prefixes up to and including that
block. Requests that arrive by the clock also have a `timestamp` in milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from kvoffload_async.errors import InputError

MAX_BLOCK_ID = 2**64 - 1
MAX_TIMESTAMP_MS = 2**53
"""Largest timestamp, which a float represents exactly."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at a time.

    Attributes:
        at_s: Seconds from the first request's arrival.
        block_ids: The blocks of its prompt.
        output_tokens: Tokens that were generated for it; 0 if unknown.
    """

    at_s: float
    block_ids: Sequence[int]
    output_tokens: int = 0


class RequestSource(ABC):
    """A stream of requests, optionally cut after the first `limit`.

    With `blocks_per_chunk`, a request's ids are those of its full chunks; the rest of its prompt is
    left out. The last block's id stands for the chunk: equal ids mean equal prefixes.
    """

    def __init__(self, limit: int | None = None, blocks_per_chunk: int = 1) -> None:
        self._limit = limit
        self._per_chunk = blocks_per_chunk
        self._taken = 0

    def __iter__(self) -> Iterator[Sequence[int]]:
        return self._counted(map(self._chunks, self._requests()))

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the requests with their times of arrival, instead of iterating over them.

        Raises:
            InputError: A request has no time, or one before that of its predecessor.
        """
        return self._counted(
            replace(arrival, block_ids=self._chunks(arrival.block_ids))
            for arrival in self._arrivals()
        )

    def close(self) -> None:  # noqa: B027 - most hold no resources
        """Release the source's resources."""

    @abstractmethod
    def most_blocks(self) -> int | None:
        """Return the maximum number of blocks per request; None if unknown."""

    @property
    def fraction_done(self) -> float:
        """Fraction of the stream consumed, from 0 to 1."""
        of_limit = self._taken / self._limit if self._limit else 0.0
        return min(1.0, max(of_limit, self._fraction_of_all()))

    @abstractmethod
    def _requests(self) -> Iterator[Sequence[int]]:
        """Yield all requests."""

    def _arrivals(self) -> Iterator[Arrival]:
        """Yield all requests with their times of arrival; raises InputError if they have none."""
        raise InputError("--arrivals: these requests have no timestamps; give a trace with them")

    def _chunks(self, block_ids: Sequence[int]) -> Sequence[int]:
        return block_ids[self._per_chunk - 1 :: self._per_chunk]

    def _counted(self, requests: Iterator[T]) -> Iterator[T]:
        for request in islice(requests, self._limit):
            self._taken += 1
            yield request

    def _fraction_of_all(self) -> float:
        """Fraction of the unlimited stream consumed; 0 if its length is unknown."""
        return 0.0


STDIN = "-"
"""Path that stands for standard input."""

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Maximum line length, far above any request's; ends the reading of a file that is no trace."""


class TraceFile(RequestSource):
    """A trace file, read line by line during the replay, so pipes work. Open until `close`."""

    def __init__(self, path: Path, limit: int | None = None, blocks_per_chunk: int = 1) -> None:
        """Open the trace file.

        Raises:
            InputError: It cannot be read.
        """
        super().__init__(limit, blocks_per_chunk)
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
        """Scan the whole trace, if the file is seekable.

        Raises:
            InputError: The file cannot be read, or a line is malformed.
        """
        if not self._is_regular or str(self._path) == STDIN:
            return None
        with closing(TraceFile(self._path, self._limit, self._per_chunk)) as trace:
            return max(map(len, trace), default=0)

    def _requests(self) -> Iterator[Sequence[int]]:
        return self._parsed(parse_line)

    def _arrivals(self) -> Iterator[Arrival]:
        return self._parsed(ArrivalParser().parse)

    def _parsed(self, parse: Callable[[bytes], T]) -> Iterator[T]:
        is_empty = True
        for number, line in enumerate(iter(self._read_line, b""), 1):
            if line.isspace():
                continue
            try:
                request = parse(line)
            except InputError as error:
                raise InputError(f"{self._path}: Malformed line {number}: {error}") from error
            is_empty = False
            yield request
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
    """Return the block ids in one line of a trace.

    Raises:
        InputError: The line is not an object with a list `hash_ids` of valid block ids.
    """
    return _block_ids(_parse_json(line))


class ArrivalParser:
    """Parses the lines of a trace whose requests arrive by their timestamps."""

    def __init__(self) -> None:
        self._first_ms: float | None = None
        self._last_ms = 0.0

    def parse(self, line: bytes) -> Arrival:
        """Return the request in the next line.

        Raises:
            InputError: As `parse_line`; or `timestamp` is missing, negative, or less than the one
                before, or `output_length` is not a number of tokens.
        """
        request = _parse_json(line)
        block_ids = _block_ids(request)
        at_ms, tokens = request.get("timestamp"), request.get("output_length", 0)
        if at_ms is None:
            raise InputError(
                'it has no "timestamp"; give each request its arrival in milliseconds, or omit '
                "--arrivals"
            )
        if type(at_ms) not in {int, float} or not 0 <= at_ms <= MAX_TIMESTAMP_MS:
            raise InputError(
                f"timestamp is {json.dumps(at_ms)[:40]}; it must be a number of milliseconds from "
                f"0 to {MAX_TIMESTAMP_MS}"
            )
        if at_ms < self._last_ms:
            raise InputError(
                f"timestamp {at_ms} is less than the one before, {self._last_ms}; sort the "
                "trace by its timestamps"
            )
        if type(tokens) is not int or not 0 <= tokens <= MAX_BLOCK_ID:
            raise InputError(
                f"output_length is {json.dumps(tokens)[:40]}; it must be a number of tokens"
            )
        if self._first_ms is None:
            self._first_ms = at_ms
        self._last_ms = at_ms
        return Arrival((at_ms - self._first_ms) / 1000, block_ids, tokens)


def _parse_json(line: bytes) -> Any:  # noqa: ANN401 - what JSON can be
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        return json.loads(line.rstrip().decode())
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not usable JSON: {error}") from error


def _block_ids(request: Any) -> list[int]:  # noqa: ANN401 - as above
    block_ids = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(block_ids, list):
        raise InputError('it must be an object with a list "hash_ids"')
    for index, block_id in enumerate(block_ids):
        # Not isinstance, which accepts booleans.
        if type(block_id) is not int or not 0 <= block_id <= MAX_BLOCK_ID:
            raise InputError(
                f"hash_ids[{index}] is {json.dumps(block_id)[:40]}; "
                f"it must be an integer from 0 to {MAX_BLOCK_ID}"
            )
    return block_ids


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read: {error.strerror or error}")


DEFAULT_SEED = 20_250_301
NUM_REQUESTS = 400
SYSTEM_PROMPT_BLOCKS = (12, 8, 4)

_START_SHARE = 0.25
_SOON_SHARE = 0.6
_NUM_SOON = 6
_GROWTH_BLOCKS = (2, 8)
_TURNS = (1, 9)


@dataclass(slots=True)
class _Conversation:
    blocks: list[int]
    turns_left: int


class ChatWorkload(RequestSource):
    """`NUM_REQUESTS` turns of several conversations; deterministic for a seed."""

    def __init__(
        self, limit: int | None = None, seed: int = DEFAULT_SEED, blocks_per_chunk: int = 1
    ) -> None:
        most = NUM_REQUESTS if limit is None else min(limit, NUM_REQUESTS)
        super().__init__(most, blocks_per_chunk)
        self._seed = seed

    def most_blocks(self) -> int:
        return (max(SYSTEM_PROMPT_BLOCKS) + _TURNS[1] * _GROWTH_BLOCKS[1]) // self._per_chunk

    def _requests(self) -> Iterator[Sequence[int]]:
        rng = random.Random(self._seed)  # noqa: S311 - reproducible, and no secret
        new_ids = count()
        prompts = [[next(new_ids) for _ in range(size)] for size in SYSTEM_PROMPT_BLOCKS]
        open_ones: list[_Conversation] = []  # most recent last
        for _ in range(NUM_REQUESTS):
            if not open_ones or rng.random() < _START_SHARE:
                talk = _Conversation(list(rng.choice(prompts)), rng.randint(*_TURNS))
            else:
                soon = rng.random() < _SOON_SHARE
                oldest = max(0, len(open_ones) - _NUM_SOON) if soon else 0
                talk = open_ones.pop(rng.randrange(oldest, len(open_ones)))
            talk.blocks.extend(next(new_ids) for _ in range(rng.randint(*_GROWTH_BLOCKS)))
            talk.turns_left -= 1
            if talk.turns_left:
                open_ones.append(talk)
            yield tuple(talk.blocks)
