"""Controls a helper process: starts it, sends calls to it, kills it if it does not respond.

Its messages are not trusted: any message other than a well-formed reply to an open call ends the
helper. After a helper has ended, the next call starts a new one in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from kvoffload_async.abc.tier import Direction, IoRunner, KVIdentity, TierLocation
from kvoffload_async.config import (
    Options,
    TierOptions,
    at_least,
    one_of,
    option,
    parse_name,
    parse_seconds,
    parse_size_bytes,
    parse_url,
    shown,
)
from kvoffload_async.errors import (
    CallTimeoutError,
    ConfigError,
    ServerHangError,
    TierError,
    TierUnavailableError,
    drop_tracebacks,
    naming_shortage,
    text_of,
)
from kvoffload_async.tiers.files.settings import SealingOptions
from kvoffload_async.tiers.mooncake import helper
from kvoffload_async.tiers.mooncake.cells import Geometry, SharedCells
from kvoffload_async.tiers.mooncake.helper import JOIN, LENGTH, frame
from kvoffload_async.tiers.remote.calls import HangDetector
from kvoffload_async.tiers.remote.client import Server

_MAX_REPLICAS: Final = 64
_MIN_SEGMENT_BYTES: Final = 16 << 20
"""The library joins no store with less."""
_MAX_LEAVE_S: Final = 5.0
_HOST_AND_PORT: Final = re.compile(r"[^\s:/]+:\d{1,5}")
_COMMAND: Final = (sys.executable, "-P", helper.__file__)


class Protocol(enum.StrEnum):
    """Transport protocol of a store's data."""

    TCP = "tcp"
    RDMA = "rdma"


def parse_master(value: object, key: str) -> str:
    """Parse the master's `HOST:PORT`; raises ConfigError."""
    master = parse_name(value, key)
    if _HOST_AND_PORT.fullmatch(master) is None:
        raise ConfigError(f"{key}: {shown(master)} is not valid; write HOST:PORT")
    return master


def parse_text(value: object, key: str) -> str:
    """Return a text, which may be empty; raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {shown(value)} is not valid; it must be a text")
    return value


def parse_segment_bytes(value: object, key: str) -> int:
    """Return 0, or a size in bytes that the library takes; raises ConfigError."""
    num_bytes = 0 if type(value) is int and value == 0 else parse_size_bytes(value, key)
    if 0 < num_bytes < _MIN_SEGMENT_BYTES:
        raise ConfigError(f"{key}: {shown(value)} is not valid; give 0 or at least 16MiB")
    return num_bytes


@dataclass(frozen=True, kw_only=True)
class MooncakeConnection(Options):
    """The options with which a client joins a store."""

    master: str = option(parse_master, remedy="HOST:PORT of the store's master")
    """Host and port of the store's master."""
    metadata_url: str = option(
        parse_url, remedy="a URL such as http://HOST:8080/metadata", is_shown=False
    )
    """URL of the metadata server through which clients of the store find each other, such as
    http://HOST:8080/metadata."""
    host: str = option(parse_name, "127.0.0.1")
    """Name or address by which other hosts reach this host."""
    segment_bytes: int = option(parse_segment_bytes, "1GiB")
    """Memory that the helper process contributes to the store: at least 16 MiB, or 0 for none."""
    protocol: Protocol = option(one_of(Protocol), Protocol.TCP)
    """Transport of the data: "tcp" or "rdma"."""
    rdma_devices: str = option(parse_text, "")
    """Comma-separated names of the devices for "rdma"."""
    replicas: int = option(at_least(1, _MAX_REPLICAS), 1)
    """Copies of each block, each in the memory of another client."""


@dataclass(frozen=True, kw_only=True)
class MooncakeSettings(MooncakeConnection, SealingOptions):
    """The options of a `mooncake` tier, and values derived from others.

    Attributes:
        response_timeout_s: Seconds in which the store answers a call or a check made during the
            call, unless it hangs; then the helper process is killed and replaced.
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
    response_timeout_s: float = 2.0
    start_timeout_s: float = 30.0
    leave_timeout_s: float = 5.0
    command: tuple[str, ...] = _COMMAND

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        identity.require_model()
        common = TierOptions.take(options)
        settings = cls.take(
            options,
            response_timeout_s=common.probe_timeout_s,
            start_timeout_s=common.open_timeout_s,
            leave_timeout_s=min(_MAX_LEAVE_S, common.close_timeout_s / 2),
        )
        Geometry.of(settings.buffer_bytes, identity.block_bytes)
        return settings

    def locations(self, identity: KVIdentity) -> list[TierLocation]:
        name, memory_bytes = f"mooncake://{self.master}", self.segment_bytes + self.buffer_bytes
        return [TierLocation(name, memory_bytes, is_exclusive=False, key="master", is_memory=True)]


MOST_NAMES: Final = 4096
"""Maximum number of values that a call names."""

_PAYLOAD_FREE_CALLS: Final = 4
_CHECKED_NAME: Final = "kvo:check"
_MOST_ANSWER_BYTES: Final = 64 << 10
_MOST_TEXT: Final = 500
_REAP_S: Final = 5.0

Answer = list[int] | TierError | ConfigError


class Helper:
    """One helper process, from its start to its end.

    During slow calls the store is asked whether it has a name. If it does not answer, it hangs, and
    the process is killed; see `HangDetector`.

    Thread: loop, except for the constructor.

    Attributes:
        pid: Process id.
        cells: The shared memory.
        why_ended: Why the helper is unusable; empty while it is usable.
        is_joined: Whether it has joined the store.
        loads: First cells of the free parts of the memory for `get` calls.
        stores: First cells of the free parts of the memory for `put` calls.
    """

    def __init__(
        self, settings: MooncakeSettings, row_bytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start the process without waiting.

        Raises:
            ConfigError: The memory cannot be allocated.
            TierUnavailableError: The process cannot be started.
        """
        self.cells = SharedCells(Geometry.of(settings.buffer_bytes, row_bytes), row_bytes)
        self.stores, self.loads = self.cells.parts(0), self.cells.parts(1)
        self._room = asyncio.Semaphore(_PAYLOAD_FREE_CALLS)
        self.why_ended = ""
        self._failure_kind = TierUnavailableError
        self.is_joined = False
        self._settings = settings
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, tuple[asyncio.Future[Answer], int]] = {}
        """Id of each pending call -> its future answer, and the expected number of statuses."""
        self._hangs = HangDetector(self._check, settings.response_timeout_s)
        self._numbers = itertools.count(JOIN)
        self._loop = loop
        self._left = asyncio.Event()
        self._gone = asyncio.Event()
        self._socket, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(self.cells.close_file)
            undo.callback(self._socket.close)
            try:
                # In its own session, so that a Ctrl-C at the terminal reaches only the engine,
                # which closes it.
                self._process = subprocess.Popen(  # noqa: S603 - this package's own module
                    [*settings.command, str(os.getpid()), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self.cells.file),
                    start_new_session=True,
                )
            except OSError as error:
                raise TierUnavailableError(f"mooncake: cannot start a helper ({error})") from None
            finally:
                theirs.close()
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pid = self._process.pid
            # A thread, because the loop may end before the process; now, because there may be none
            # when the process is to be killed.
            self._reaper = threading.Thread(target=self._reap, name="kvoffload-reaper", daemon=True)
            with naming_shortage("mooncake: the thread of a helper cannot be started"):
                self._reaper.start()
            undo.pop_all()

    @property
    def status(self) -> int | None:
        """Exit status of the process, negative for a signal; None while it runs."""
        return self._process.returncode

    async def join(self) -> None:
        """Have the process join the store.

        Raises:
            ConfigError: The library cannot be loaded, or the memory not registered.
            TierUnavailableError: The master cannot be reached, or the process has ended.
        """
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._reading = self._loop.create_task(self._read(reader), name="mooncake:replies")
        how = {
            **{f.name: getattr(self._settings, f.name) for f in fields(MooncakeConnection)},
            "buffer_fd": self.cells.file,
            "buffer_bytes": self.cells.num_bytes,
            "calls": 2 * self.cells.geometry.parts + _PAYLOAD_FREE_CALLS + 1,  # and a check
        }
        await self._send(how, 0)
        self.cells.close_file()
        self.is_joined = True

    async def ask(self, call: str, names: Sequence[str]) -> list[int]:
        """Make a library call without payload, in the helper process.

        If the caller is cancelled, the call keeps its slot until it is answered.

        Raises:
            TierUnavailableError: The call failed.
        """
        await self._room.acquire()
        asking = self._loop.create_task(self._call(call, names), name="mooncake:question")
        asking.add_done_callback(lambda _ended: self._room.release())
        try:
            return await asyncio.shield(asking)
        finally:
            del asking  # avoid a reference cycle of exception and frame

    async def move(
        self, call: str, names: Sequence[str], at: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Make a library call that transfers payload; no transfer runs after this method returns.

        Cancellation kills the process, because the part must not be reused before the transfer
        ends.

        Raises:
            TierUnavailableError: The call failed.
        """
        try:
            return await self._call(call, names, at, sizes)
        except asyncio.CancelledError:
            self.end("a transfer was cancelled")
            raise

    def end(self, why: str, kind: type[TierUnavailableError] = TierUnavailableError) -> None:
        """Kill the process, and fail all calls with an error of type `kind`; idempotent."""
        if self.why_ended:
            return
        self.why_ended, self._failure_kind = why, kind
        self._process.kill()
        self.cells.close_file()
        self._left.set()
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.transport.abort()
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            self._answer(future, self._failure())

    async def leave(self) -> None:
        """Leave the store; kill the process on timeout, cancellation or pending calls."""
        try:
            if self._writer is not None and not self.why_ended and not self._calls:
                self._writer.write(frame({"call": "close"}))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.leave_timeout_s):
                        await self._left.wait()
        finally:
            self.end("the tier was closed")

    async def gone(self) -> None:
        """Wait until the process has ended, after `end`.

        Raises:
            TierUnavailableError: It did not end in time.
        """
        await self._hangs.close()
        if self._reading is not None:
            await asyncio.wait({self._reading})
        try:
            async with asyncio.timeout(_REAP_S):
                await self._gone.wait()
        except TimeoutError:  # hanging in the kernel
            raise TierUnavailableError(
                f"mooncake: helper {self.pid} was killed but has not exited"
            ) from None
        self._reaper.join()

    # -- internal -------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Wait until the process has exited. Thread: its own."""
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: there are no waiters
            self._loop.call_soon_threadsafe(self._gone.set)

    async def _call(
        self, call: str, names: Sequence[str], at: Sequence[int] = (), sizes: Sequence[int] = ()
    ) -> list[int]:
        """Make a library call; kill the process if it does not answer in time."""
        what = {"call": call, "names": names, "at": at, "sizes": sizes}
        began_s, timeout_s = self._loop.time(), self._settings.call_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as timer:
                with self._hangs.observing(None, timer):
                    return await self._send(what, len(names))
        except TimeoutError:
            if self._hangs.hangs_since(None, began_s):
                self.end("the store hangs: it answered neither a call nor a check", ServerHangError)
            else:
                self.end(f"no reply within {timeout_s:g} s", CallTimeoutError)
        raise self._failure()

    async def _check(self, _server: Server) -> None:
        await self._send({"call": "exist", "names": [_CHECKED_NAME], "at": (), "sizes": ()}, 1)

    async def _send(self, what: Mapping[str, Any], statuses: int) -> list[int]:
        """Send a request, which joins the store if it is the first; return the reply's statuses."""
        if self.why_ended or self._writer is None:
            raise self._failure()
        number = next(self._numbers)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._calls[number] = future, statuses
        self._writer.write(frame({"id": number, **what}))
        answer = await future
        try:
            if isinstance(answer, list):
                return answer
            raise answer
        finally:
            del answer, future  # avoid a reference cycle of exception and frame

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Complete calls with their replies, until the connection closes or a reply is invalid."""
        try:
            while True:
                self._take(await _receive(reader))
        except (asyncio.IncompleteReadError, OSError):
            self.end("the process has ended")
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            self.end(f"it sent an invalid reply ({str(error)[:_MOST_TEXT]!r})")

    def _take(self, message: dict[str, Any]) -> None:
        """Complete the pending call that a reply answers.

        Raises:
            KeyError: The reply is malformed; also TypeError and ValueError.
        """
        number, statuses, text = message["id"], message.get("statuses"), message.get("error")
        future, num_statuses = self._calls[number]
        answer: Answer
        if isinstance(text, str):
            is_config = number == JOIN and message.get("is_config") is True
            kind = ConfigError if is_config else TierUnavailableError
            answer = kind(f"{'' if is_config else 'mooncake: '}{text[:_MOST_TEXT]}")
        elif (
            not isinstance(statuses, list)
            or len(statuses) != num_statuses
            or any(type(status) is not int for status in statuses)
        ):
            raise ValueError(f"expected {num_statuses} statuses")
        else:
            answer = statuses
        del self._calls[number]
        self._hangs.heard(None)
        self._answer(future, answer)

    @staticmethod
    def _answer(future: asyncio.Future[Answer], answer: Answer) -> None:
        if not future.done():  # else the caller was cancelled
            future.set_result(answer)

    def _failure(self) -> TierUnavailableError:
        return self._failure_kind(f"mooncake: helper {self.pid}: {self.why_ended}")


async def _receive(reader: asyncio.StreamReader) -> Any:  # noqa: ANN401 - not yet checked
    """Return the next message of the helper process.

    Raises:
        ValueError: It is too long, or no JSON.
    """
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size > _MOST_ANSWER_BYTES:
        raise ValueError(f"a reply of {size} bytes")
    return json.loads(await reader.readexactly(size))


logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class HelperSupervisor:
    """Keeps one helper process running. Thread: loop.

    Attributes:
        starts: Number of helpers started.
        ends: Number of joined helpers that ended or were killed.
    """

    def __init__(self, settings: MooncakeSettings, row_bytes: int, io: IoRunner) -> None:
        """Create a supervisor without starting a helper."""
        self.starts = 0
        self.ends = 0
        self._settings = settings
        self._row_bytes = row_bytes
        self._io = io
        self._helper: Helper | None = None
        self._starting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._next_start_s = 0.0

    def helper(self) -> Helper:
        """Return the helper that has joined the store.

        Raises:
            TierUnavailableError: There is none; a replacement is started in the background.
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
        why = "not started" if helper is None else helper.why_ended or "still joining"
        raise TierUnavailableError(f"mooncake: no helper process: {why}")

    async def close(self) -> None:
        """Stop the helper; idempotent."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})
        helper = self._helper
        if helper is not None:
            await helper.leave()
            await helper.gone()
            self._helper = None

    # -- internal -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the first helper, or replace one that has ended, and join the store.

        Raises:
            ConfigError: The configuration cannot work here.
            TierUnavailableError: The store cannot be joined.
        """
        old = self._helper
        if old is not None:  # frees its memory before the next helper allocates
            await old.gone()
            self._helper = None

        loop = asyncio.get_running_loop()

        def begin() -> Helper:  # may continue after a cancellation, so it stores the helper here
            self._helper = helper = Helper(self._settings, self._row_bytes, loop)
            return helper

        try:
            helper = await self._io.run(Direction.METADATA, begin)
            self.starts += 1
            await helper.join()
        except BaseException as error:
            if self._helper is not None:
                self._helper.end(f"joining failed ({error})")
            raise

    async def _replace(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self.open()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
            self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            why = "timed out" if type(error) is TimeoutError else text_of(error)
            logger.warning("mooncake: starting a helper failed: %s", why)
            drop_tracebacks(error)
        else:
            self._pause_s = 0.0
            logger.warning("mooncake: a new helper has joined %s", self._settings.master)
        finally:
            self._next_start_s = loop.time() + self._pause_s
            self._starting = None
