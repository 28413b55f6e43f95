"""A helper process as the engine sees it: started, asked, killed where it does not answer.

Nothing that it sends is believed: an answer that is not one to an open call, of the size that the
call has, is the end of it. After a helper has ended, whoever asks next has another one started.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.config import (
    Options,
    at_least,
    one_of,
    option,
    parse_name,
    parse_seconds,
    parse_size_bytes,
    parse_url,
    shown,
)
from kvoffload_async.errors import ConfigError, TierError, TierUnavailableError, drop_tracebacks
from kvoffload_async.tiers.files.settings import IntegrityOptions
from kvoffload_async.tiers.mooncake import helper
from kvoffload_async.tiers.mooncake.cells import Geometry, Parts, SharedCells
from kvoffload_async.tiers.mooncake.helper import JOIN, LENGTH, frame

_MAX_REPLICAS: Final = 64
_HOST_AND_PORT: Final = re.compile(r"[^\s:/]+:\d{1,5}")
_COMMAND: Final = (sys.executable, "-P", helper.__file__)


class Protocol(enum.StrEnum):
    """Transport of a store's data."""

    TCP = "tcp"
    RDMA = "rdma"


def parse_master(value: object, key: str) -> str:
    """Return a host with a port; raises ConfigError."""
    master = parse_name(value, key)
    if _HOST_AND_PORT.fullmatch(master) is None:
        raise ConfigError(f"{key}: {shown(master)} is not valid; write HOST:PORT")
    return master


def parse_text(value: object, key: str) -> str:
    """Return a text, which may be empty; raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {shown(value)} is not valid; it must be a text")
    return value


def parse_optional_size_bytes(value: object, key: str) -> int:
    """Return a size in bytes that may be 0; raises ConfigError."""
    return 0 if type(value) is int and value == 0 else parse_size_bytes(value, key)


@dataclass(frozen=True, kw_only=True)
class MooncakeConnection(Options):
    """The options with which a client joins a store."""

    master: str = option(parse_master, remedy="HOST:PORT of the store's master")
    """Host and port of the store's master."""
    metadata_url: str = option(parse_url, remedy="a URL such as http://HOST:8080/metadata")
    """URL of the metadata server through which clients of the store find each other, such as
    http://HOST:8080/metadata."""
    host: str = option(parse_name, "127.0.0.1")
    """Name or address by which other hosts reach this host."""
    segment_bytes: int = option(parse_optional_size_bytes, "1GiB")
    """Memory that the helper process contributes to the store; 0: none."""
    protocol: Protocol = option(one_of(Protocol), Protocol.TCP)
    """Transport of the data: "tcp" or "rdma"."""
    rdma_devices: str = option(parse_text, "")
    """Comma-separated names of the devices for "rdma"."""
    replicas: int = option(at_least(1, _MAX_REPLICAS), 1)
    """Copies of each block, each in the memory of another client."""


@dataclass(frozen=True, kw_only=True)
class HelperSettings(Options):
    """The options of a helper process, and values derived from others.

    Attributes:
        start_timeout_s: Seconds to start another helper process and to join the store with it.
        leave_timeout_s: Seconds to leave the store when the tier closes; then it is killed.
        command: Command of the process; the numbers of the parent and of the socket are added.
    """

    buffer_bytes: int = option(parse_size_bytes, "64MiB")
    """Maximum memory that the helper process shares with the engine, half of it for each direction;
    at least two blocks."""
    call_timeout_s: float = option(parse_seconds, 10.0)
    """Deadline in seconds of one call of the library; after it the helper process is killed and
    replaced."""
    start_timeout_s: float = 30.0
    leave_timeout_s: float = 5.0
    command: tuple[str, ...] = _COMMAND


@dataclass(frozen=True, kw_only=True)
class MooncakeOptions(MooncakeConnection, HelperSettings, IntegrityOptions):
    """All options of a `mooncake` tier."""


MOST_NAMES: Final = 4096
"""Of one call."""

_PAYLOAD_FREE_CALLS: Final = 4
_MOST_ANSWER_BYTES: Final = 64 << 10
_MOST_TEXT: Final = 500
_REAP_S: Final = 5.0

Answer = list[int] | TierError | ConfigError


@dataclass(slots=True, eq=False)
class _Call:
    """A call without an answer yet: who waits, how many statuses it has, what comes at its end."""

    answer: asyncio.Future[Answer]
    statuses: int
    when_ended: Callable[[], object]


class Helper:
    """One helper process, from its start to its end.

    Thread: loop, but for the constructor.

    Attributes:
        pid: Its number.
        cells: The memory that it shares.
        why_ended: Why it is of no use any more; empty as long as it is.
        is_joined: Whether it has joined the store.
        loads: Parts of the memory for calls of `get`.
        stores: Those for `put`.
    """

    def __init__(
        self,
        connection: MooncakeConnection,
        settings: HelperSettings,
        row_bytes: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start it; waits for nothing. Raises ConfigError, TierUnavailableError."""
        self.cells = SharedCells(Geometry.of(settings.buffer_bytes, row_bytes), row_bytes)
        self.why_ended = ""
        self.is_joined = False
        self._connection = connection
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, _Call] = {}
        self._last_number = JOIN
        self._received = bytearray()
        self._loop = loop
        self._left = asyncio.Event()
        self._gone = asyncio.Event()
        self._reaper = threading.Thread(target=self._reap, name="kvoffload-reaper", daemon=True)
        self._socket, theirs = socket.socketpair()
        kept = (theirs.fileno(), self.cells.file)
        try:
            # In a session of its own: a Ctrl-C at the terminal is for the engine, which closes it.
            self._process = subprocess.Popen(  # noqa: S603 - this package's own module
                [*settings.command, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=kept,
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            self.cells.close_file()
            raise TierUnavailableError(f"mooncake: no helper can be started ({error})") from None
        finally:
            theirs.close()
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """How the process has ended: minus the number of a signal; None where it has not."""
        return self._process.returncode

    async def join(self) -> None:
        """Let it join the store.

        Raises:
            ConfigError: The library cannot be loaded, or the memory not be registered.
            TierUnavailableError: The master cannot be reached, or the process has ended.
        """
        geometry = self.cells.geometry
        # Here and not in the constructor, which runs on another thread.
        self.stores, self.loads = (Parts(self.cells.firsts(direction)) for direction in (0, 1))
        self._room = asyncio.Semaphore(_PAYLOAD_FREE_CALLS)
        transport, _ = await self._loop.create_unix_connection(
            lambda: _Link(self), sock=self._socket
        )
        self._transport = transport
        how = {
            **asdict(self._connection),
            "buffer_fd": self.cells.file,
            "buffer_bytes": self.cells.num_bytes,
            "calls": 2 * geometry.parts + _PAYLOAD_FREE_CALLS,
        }
        await self._send(JOIN, how, 0, lambda: None)
        self.cells.close_file()
        self.is_joined = True

    async def ask(self, call: str, names: Sequence[str]) -> list[int]:
        """Make a call that moves no payload; raises TierUnavailableError.

        One that nobody waits for any more keeps its place until it is answered.
        """
        await self._room.acquire()
        return await self._call(self._room.release, call, names)

    async def move(
        self, call: str, names: Sequence[str], at: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Make a call that uses a part of the memory, which has ended when this returns.

        Cancelled, it ends the process: nobody else may have the part before that.

        Raises:
            TierUnavailableError: The call has failed.
        """
        try:
            return await self._call(lambda: None, call, names, at, sizes)
        except asyncio.CancelledError:
            self.end("a transfer was given up")
            raise

    def end(self, why: str) -> None:
        """Kill it, and fail every call; idempotent."""
        if self.why_ended:
            return
        self.why_ended = why
        self._process.kill()
        self._reaper.start()  # a thread: the loop may end before the process has
        self.cells.close_file()
        self._left.set()
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.abort()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            self._answer(call, self._failure())

    async def leave(self) -> None:
        """Let it leave the store, unless it hangs; kill it at the deadline, or if cancelled."""
        try:
            if self._transport is not None and not self.why_ended and not self._calls:
                self._transport.write(frame({"call": "close"}))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.leave_timeout_s):
                        await self._left.wait()
        finally:
            self.end("its tier is closed")

    async def gone(self) -> None:
        """Wait until the process has ended, after `end`; raises TierUnavailableError."""
        try:
            async with asyncio.timeout(_REAP_S):
                await self._gone.wait()
        except TimeoutError:  # it hangs in the kernel
            raise TierUnavailableError(
                f"mooncake: helper {self.pid} was killed and does not end"
            ) from None
        self._reaper.join()

    def received(self, data: bytes) -> None:
        """Take in what it has sent."""
        self._received += data
        try:
            while not self.why_ended and (body := self._next_body()) is not None:
                self._take(json.loads(body))
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            self.end(f"it has sent what is no answer ({str(error)[:_MOST_TEXT]!r})")

    # -- inside ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Wait for the process, which was killed. Thread: its own."""
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._gone.set)

    async def _call(
        self,
        when_ended: Callable[[], object],
        call: str,
        names: Sequence[str],
        at: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> list[int]:
        self._last_number = number = self._last_number + 1
        timeout_s = self._settings.call_timeout_s
        timer = self._loop.call_later(timeout_s, self.end, f"no answer within {timeout_s:g} s")

        def ended() -> None:
            timer.cancel()
            when_ended()

        what = {"call": call, "id": number, "names": names, "at": at, "sizes": sizes}
        return await self._send(number, what, len(names), ended)

    async def _send(
        self, number: int, what: dict[str, Any], statuses: int, when_ended: Callable[[], object]
    ) -> list[int]:
        call = _Call(self._loop.create_future(), statuses, when_ended)
        if self.why_ended or self._transport is None:
            self._answer(call, self._failure())
        else:
            self._calls[number] = call
            self._transport.write(frame(what))
        answer = await call.answer
        try:
            if isinstance(answer, list):
                return answer
            raise answer
        finally:
            del answer, call  # what is raised holds this frame, which must not hold it

    def _next_body(self) -> bytes | None:
        """Return what is in the next frame, if all of it is there; raises ValueError."""
        if len(self._received) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._received)
        if size > _MOST_ANSWER_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        end = LENGTH.size + size
        if len(self._received) < end:
            return None
        body = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return body

    def _take(self, message: dict[str, Any]) -> None:
        """Pass an answer on; raises KeyError, TypeError, ValueError where it is none."""
        number, statuses, text = message["id"], message.get("statuses"), message.get("error")
        call = self._calls[number]
        answer: Answer
        if isinstance(text, str):
            is_config = number == JOIN and message.get("is_config") is True
            kind = ConfigError if is_config else TierUnavailableError
            answer = kind(f"{'' if is_config else 'mooncake: '}{text[:_MOST_TEXT]}")
        elif (
            not isinstance(statuses, list)
            or len(statuses) != call.statuses
            or any(type(status) is not int for status in statuses)
        ):
            raise ValueError(f"no {call.statuses} statuses")
        else:
            answer = statuses
        del self._calls[number]
        self._answer(call, answer)

    @staticmethod
    def _answer(call: _Call, answer: Answer) -> None:
        call.when_ended()
        if not call.answer.done():  # else whoever asked was cancelled
            call.answer.set_result(answer)

    def _failure(self) -> TierUnavailableError:
        return TierUnavailableError(f"mooncake: helper {self.pid}: {self.why_ended}")


class _Link(asyncio.Protocol):
    """What comes from a helper, and its end."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper

    def data_received(self, data: bytes) -> None:
        self._helper.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._helper.end("it has ended")


logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class HelperSupervisor:
    """Has one helper at a time. Thread: loop.

    Attributes:
        starts: Helpers that were started.
        ends: Those that have ended by themselves, or were killed.
    """

    def __init__(
        self,
        connection: MooncakeConnection,
        settings: HelperSettings,
        row_bytes: int,
        io: IoRunner,
    ) -> None:
        """Start none yet."""
        self.starts = 0
        self.ends = 0
        self._connection = connection
        self._settings = settings
        self._row_bytes = row_bytes
        self._io = io
        self._helper: Helper | None = None
        self._starting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._next_start_s = 0.0

    async def open(self) -> None:
        """Start the first one, and let it join; raises ConfigError, TierUnavailableError."""
        await self._start()

    def helper(self) -> Helper:
        """Return the helper that has joined.

        Raises:
            TierUnavailableError: There is none; another one is started in the background.
        """
        helper = self._helper
        if helper is not None and helper.is_joined and not helper.why_ended:
            return helper
        loop = asyncio.get_running_loop()
        if self._starting is None and loop.time() >= self._next_start_s:
            if helper is not None and helper.is_joined:
                self.ends += 1
                logger.warning("mooncake: %s (status %s)", helper.why_ended, helper.status)
            self._starting = loop.create_task(self._replace(), name="mooncake:helper")
        why = "none has been started" if helper is None else helper.why_ended or "it joins"
        raise TierUnavailableError(f"mooncake: there is no helper process: {why}")

    async def close(self) -> None:
        """End what runs; idempotent."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})
        helper = self._helper
        if helper is not None:
            await helper.leave()
            await helper.gone()
            self._helper = None

    # -- inside ---------------------------------------------------------------------------------

    async def _start(self) -> None:
        old = self._helper
        if old is not None:  # its memory is free before the next one's is taken
            await old.gone()
            self._helper = None

        loop = asyncio.get_running_loop()

        def begin() -> None:  # which may go on after a cancellation, so it leaves the helper here
            self._helper = Helper(self._connection, self._settings, self._row_bytes, loop)

        helper: Helper | None = None
        try:
            await self._io.run(Direction.METADATA, begin)
            self.starts += 1
            helper = self._helper
            if helper is not None:
                await helper.join()
        except BaseException as error:
            if (helper := self._helper) is not None:
                helper.end(f"it could not join ({error})")
            raise

    async def _replace(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._start()
        except (ConfigError, TierError, TimeoutError) as error:
            self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            why = str(error) or "it takes too long"
            logger.warning("mooncake: no helper can be started: %s", why)
            drop_tracebacks(error)
        else:
            self._pause_s = 0.0
            logger.warning("mooncake: another helper has joined %s", self._connection.master)
        finally:
            self._next_start_s = loop.time() + self._pause_s
            self._starting = None
