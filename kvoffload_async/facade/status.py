"""The status socket of a running engine: its statistics as one line of JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final
from weakref import WeakMethod

from kvoffload_async.config import parse_socket_path
from kvoffload_async.errors import OffloadError, text_of
from kvoffload_async.runtime.status_socket import StatusSocket
from kvoffload_async.statistics import OffloadingStatistics
from kvoffload_async.timeline import SlowRequest

logger = logging.getLogger(__name__)

SOCKET_VARIABLE: Final = "KVOFFLOAD_STATUS_SOCKET"
"""Environment variable with the socket's path, used if the configuration has none."""
STATUS_REQUEST: Final = b"status"
STATUS_VERSION: Final = 1
"""Version of the JSON format; a new field does not change the version."""

ReadStatistics = Callable[[], OffloadingStatistics]
ReadSlowest = Callable[[], Sequence[SlowRequest] | None]


def path_from_environment() -> str | None:
    """Return the path from the environment; raises ConfigError."""
    path = os.environ.get(SOCKET_VARIABLE)
    return parse_socket_path(path, SOCKET_VARIABLE) if path else None


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
        self._failed = False

    def listen(self, path: str | None) -> None:
        """Create the socket if there is a path; clients wait for answers until `serve`.

        Raises:
            ConfigError: The socket cannot be created; see `StatusSocket`.
        """
        self._socket = None if path is None else StatusSocket(path)

    def serve(self, read: ReadStatistics, read_slowest: ReadSlowest) -> None:
        """Answer requests with the results of two methods, as long as their object exists."""
        if self._socket is not None:
            method, slowest = self._method or WeakMethod(read), WeakMethod(read_slowest)
            counters = self._socket.counters
            self._socket.serve(lambda asked: self._answer(asked, method, slowest, counters.read))

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
        read_counters: Callable[[], Mapping[str, int]],
    ) -> bytes:
        """Return the answer to a request. Runs on the socket's thread."""
        if request.strip() != STATUS_REQUEST:
            return _error(f'the request must be "{STATUS_REQUEST.decode()}" and a line end')
        read, read_slowest = method(), slowest()
        if read is None or read_slowest is None:
            return _error("the engine was garbage-collected without `close()`")
        try:
            return self._status_line(read(), read_slowest(), read_counters())
        except OffloadError as error:
            return _error(text_of(error))
        except BaseException as error:  # noqa: BLE001 - a third party's tier; keep serving
            what = f"the statistics cannot be read: {text_of(error)}"
            if not self._failed:
                self._failed = True
                logger.warning("status socket: %s", what)
            return _error(what)

    def _status_line(
        self,
        stats: OffloadingStatistics,
        slowest: Sequence[SlowRequest] | None,
        socket: Mapping[str, int],
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
            "socket": dict(socket),
        }
        return json.dumps(status, separators=(",", ":"), allow_nan=False).encode()


def _drop_what_is_no_number(tier: dict[str, Any]) -> None:
    """Remove gauges of a tier that JSON cannot represent."""
    gauges = tier["gauges"] = {
        str(name): value for name, value in tier["gauges"].items() if _is_number(value)
    }
    for name in ("used_bytes", "capacity_bytes"):
        tier[name] = gauges.get(name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
