"""Client of an engine's status socket."""

from __future__ import annotations

import json
import socket
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

from kvoffload_async.errors import InputError, OffloadError
from kvoffload_async.statistics import (
    BUCKET_BOUNDS_S,
    EngineStatistics,
    HistogramStatistics,
    OffloadingStatistics,
)
from kvoffload_async.status.server import COMMAND_PREFIX, STATUS_REQUEST, STATUS_VERSION
from kvoffload_async.timeline import SlowRequest

MAX_STATUS_BYTES: Final = 4 << 20
_POLL_S: Final = 0.1
_MAX_NUMBER: Final = 1 << 63
_MAX_UPTIME_S: Final = 1e10
_KINDS: Final = {kind.__name__: kind for kind in (OffloadingStatistics, EngineStatistics)}


class NoAnswerError(OffloadError):
    """No engine answered on the status socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Status reported by a running engine.

    Attributes:
        version: Version of the format; adding a field does not change it.
        pid: The engine's process.
        model: Name of the model whose blocks it holds, if known.
        time_s: Time of the report, in seconds since 1970.
        uptime_s: Seconds since the engine was configured, by a monotonic clock.
        statistics: Result of `stats()`.
        slowest: The slowest recent requests; None if the engine does not record them.
    """

    version: int
    pid: int
    model: str | None
    time_s: float
    uptime_s: float
    statistics: OffloadingStatistics
    slowest: tuple[SlowRequest, ...] | None = None


def ask(path: str, timeout_s: float = 5.0, request: bytes = STATUS_REQUEST) -> str:
    """Return the status line of an engine, or its answer to another request. Blocks.

    Args:
        path: Its `status_socket`.
        timeout_s: Total timeout in seconds.
        request: The request, without line end.

    Raises:
        NoAnswerError: Nothing listens on the socket, or there was no answer in time.
        InputError: The answer is not an engine's.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX) as engine:
            engine.settimeout(timeout_s)
            engine.connect(path)
            engine.sendall(request + b"\n")
            line = _line_of(engine, deadline_s)
    except TimeoutError as error:
        raise NoAnswerError(f"{path}: nobody answers within {timeout_s:g} s") from error
    except BlockingIOError as error:
        raise NoAnswerError(f"{path}: too many others are asking") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise NoAnswerError(
            f"{path}: no engine answers: {why}; start one with this status_socket"
        ) from error
    if not line.endswith(b"\n") or len(line) > MAX_STATUS_BYTES:
        raise InputError(f"{path}: the answer is no line of at most {MAX_STATUS_BYTES} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the answer is no text: {error}") from error


def command(path: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Have an engine execute a command, and return its state at its end, or at the time's. Blocks.

    Args:
        path: The engine's `status_socket`.
        request: See `CacheCommands.answer`.
        timeout_s: Seconds to wait for the end; afterwards the engine goes on with the command.

    Raises:
        NoAnswerError: The engine does not answer, or refuses the command.
        InputError: The answer is not an engine's.
    """
    deadline_s = time.monotonic() + timeout_s
    state = _send(path, request)
    pause = threading.Event()
    while not state["is_done"] and (left_s := deadline_s - time.monotonic()) > 0:
        pause.wait(min(_POLL_S, left_s))
        state = _send(path, {"id": state["id"]})
    return state


def _send(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    line = ask(path, request=COMMAND_PREFIX + json.dumps(request).encode())
    try:
        state = json.loads(line)
        if "error" in state:
            raise NoAnswerError(f"{path}: {state['error']}")
        _require(state["id"], int)
        _require(state["is_done"], bool)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not the answer of an engine: {error!r}") from error
    found: dict[str, Any] = state
    return found


def parse_report(line: str, path: str) -> EngineReport:
    """Parse an engine's status line.

    Raises:
        NoAnswerError: The line says that the engine cannot answer now.
        InputError: The line is not from an engine of this release.
    """
    try:
        answer = json.loads(line)
        if "error" in answer:
            raise NoAnswerError(f"{path}: {answer['error']}")
        if answer["version"] != STATUS_VERSION:
            raise InputError(
                f"{path}: status of version {answer['version']}, this is {STATUS_VERSION}; use the "
                "kvoffload of the engine's release"
            )
        statistics = _read(_KINDS[answer["kind"]], answer["statistics"])
        report: EngineReport = _read(EngineReport, {**answer, "statistics": statistics})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not the status of an engine: {error!r}") from error
    return report


def _line_of(engine: socket.socket, deadline_s: float) -> bytes:
    line = bytearray()
    while len(line) <= MAX_STATUS_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        engine.settimeout(left_s)
        if not (part := engine.recv(1 << 16)):
            break
        line += part
    return bytes(line)


def _read(kind: Any, value: Any) -> Any:  # noqa: ANN401 - any type of the tree
    """Convert a JSON value to a type; raises TypeError if it does not match."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _read_fields(kind, value)
    if origin is types.UnionType:
        return None if value is None else _read(arguments[0], value)
    if origin is tuple:
        _require(value, list)
        return tuple(_read(arguments[0], one) for one in value)
    if origin is not None and issubclass(origin, Mapping):
        _require(value, dict)
        return {str(key): _read(arguments[1], one) for key, one in value.items()}
    _require(value, *((int, float) if kind is float else (kind,)))
    if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:  # also rejects NaN
        raise ValueError("a number that is too large")
    return value


def _read_fields(kind: Any, value: Any) -> Any:  # noqa: ANN401 - any dataclass of the tree
    """Return a dataclass from a JSON object; unknown fields of later releases are ignored."""
    if isinstance(value, kind):
        return value
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name in value]
    made = kind(**{name: _read(hints[name], value[name]) for name in names})
    if isinstance(made, EngineReport) and not 0 <= made.uptime_s <= _MAX_UPTIME_S:
        raise ValueError(f"uptime_s is {made.uptime_s!r}")
    if isinstance(made, HistogramStatistics) and len(made.counts) != len(BUCKET_BOUNDS_S) + 1:
        raise ValueError(f"a histogram of {len(made.counts)} buckets")
    return made


def _require(value: object, *kinds: type[Any]) -> None:
    if not isinstance(value, kinds):
        names: Sequence[str] = [kind.__name__ for kind in kinds]
        raise TypeError(f"{type(value).__name__} where {' or '.join(names)} is expected")
