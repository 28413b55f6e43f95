"""The server, or a cluster's nodes: slot owners, and pipelines to each node.

The size of each reply is checked before the library parses it.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import hiredis  # noqa: F401 - the library parses with it, and `BoundedReader` relies on that
from redis import exceptions
from redis.asyncio import Connection, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.tiers.remote.client import heard
from kvoffload_async.tiers.remote.lookups import Lookups
from kvoffload_async.tiers.valkey.address import Login, Route, ValkeySettings

_SHORT_BYTES: Final = 4096
"""Maximum bytes of a line, and of a reply without payload: an error, a status, a number."""
_ELEMENT_BYTES: Final = 16
"""Overhead counted for each array element, in addition to its bytes."""
_MOST_DEPTH: Final = 8
_LINES: Final = re.compile(rb"(?:[+:-][^\r\n]{0,256}\r\n)+")
"""Matches consecutive short replies, such as the replies to a probe."""
_LINE_TYPES: Final = b"+-:"
_END: Final = b"\r\n"

_most_bytes: ContextVar[int] = ContextVar("most_bytes", default=0)


@contextmanager
def replies_up_to(most_bytes: int) -> Iterator[None]:
    """Allow each reply read by this task `most_bytes` beyond the limit of short replies."""
    token = _most_bytes.set(most_bytes)
    try:
        yield
    finally:
        _most_bytes.reset(token)


class ReplyError(Exception):
    """A reply is larger than the maximum for its call, or is not RESP2."""


class ReplyBounds:
    """Tracks the replies of one connection by their headers, without storing payload.

    A parser allocates the size announced by a header, such as `*2147483647` or `$536870912`, or
    buffers a line until it ends. So announced sizes are checked first.
    """

    def __init__(self) -> None:
        """Track a new connection, from its first reply on."""
        self._line = b""  # partial header
        self._payload_bytes = 0  # remaining bytes of a bulk string, including its line end
        self._arrays: list[int] = []  # remaining elements of each incomplete array
        self._reply_bytes = 0

    def feed(self, data: bytes) -> None:
        """Check the next bytes received on the connection.

        Raises:
            ReplyError: They must not be parsed; close the connection.
        """
        bound = _SHORT_BYTES + _most_bytes.get()
        data, self._line = self._line + data, b""
        position = 0
        while position < len(data):
            if self._payload_bytes:
                step = min(self._payload_bytes, len(data) - position)
                self._payload_bytes -= step
                position += step
                continue
            if not self._arrays and (lines := _LINES.match(data, position)):
                position = lines.end()
                continue
            end = data.find(_END, position)
            if end < 0:
                if len(data) - position > _SHORT_BYTES:
                    raise ReplyError(f"a reply has a line of more than {_SHORT_BYTES} bytes")
                self._line = data[position:]
                return
            self._header(data[position:end], bound)
            position = end + len(_END)

    def _header(self, line: bytes, bound: int) -> None:
        kind, rest = line[:1], line[1:]
        self._reply_bytes += len(line)
        elements = 0
        if kind in (b"$", b"*"):
            count = _count_of(rest)
            if kind == b"$" and count >= 0:
                self._reply_bytes += count
                self._payload_bytes = count + len(_END)
            elif kind == b"*" and count > 0:
                elements = count
                self._reply_bytes += _ELEMENT_BYTES * count
        elif not kind or kind not in _LINE_TYPES:
            raise ReplyError(f"{kind!r} is not a valid reply type")
        if self._reply_bytes > bound:
            raise ReplyError(f"a reply has more than {bound} bytes")
        if elements:
            if len(self._arrays) >= _MOST_DEPTH:
                raise ReplyError(f"a reply has arrays {_MOST_DEPTH + 1} deep")
            self._arrays.append(elements)
            return
        while self._arrays:
            self._arrays[-1] -= 1
            if self._arrays[-1]:
                return
            self._arrays.pop()
        self._reply_bytes = 0


def _count_of(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > len(str(1 << 63)):
        raise ReplyError("the length of a reply is not a number")
    return int(text)


Node = tuple[str, int]
"""Host and port of a server."""
Command = tuple[bytes | str | int | memoryview, ...]

_READ_BYTES: Final = 256 << 10
"""Read size on the socket, asyncio's maximum; smaller reads need more loop iterations."""
_SPARE_CONNECTIONS: Final = 8
"""Additional connections for probes, renewals and checks, so that these do not wait for payload."""
_SLOTS_REPLY_BYTES: Final = 8 << 20
"""Maximum bytes of a reply to `CLUSTER SLOTS`, with a different owner for each slot."""
_MOST_NODES: Final = 1024
_MOST_ASKED: Final = 3
"""Maximum number of nodes asked for the slot owners before giving up."""


class BoundedReader(asyncio.StreamReader):
    """A stream reader that raises an error instead of returning bytes of a too long reply.

    hiredis reads a stream by `read` alone. The library's parser in Python does not: it takes over
    if hiredis is too old for the library, and must not read without bounds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create the reader of a new connection."""
        super().__init__(loop=loop)
        self._bounds = ReplyBounds()

    async def read(self, n: int = -1) -> bytes:
        """Read bytes, and return them if no reply exceeds a bound.

        Raises:
            ReplyError: They exceed a bound; the library closes the connection.
        """
        data = await super().read(n)
        if data:
            heard()
            self._bounds.feed(data)
        return data

    async def readline(self) -> bytes:
        """Raise ReplyError, because this method would read unchecked bytes."""
        raise ReplyError("redis-py parses without hiredis; install kvoffload-async[valkey]")

    async def readexactly(self, n: int) -> bytes:
        """Raise ReplyError, because this method would read unchecked bytes."""
        return await self.readline()


class RoutedConnection(Connection):
    """The library's connection, which looks up the address and credentials whenever it connects."""

    def __init__(
        self,
        *,
        route: Route,
        log_in: Callable[[], Awaitable[Login]],
        **options: Any,  # noqa: ANN401 - as the library's
    ) -> None:
        """Create a connection without connecting.

        Args:
            route: To the server.
            log_in: Returns what to log in with now.
            options: The library's.
        """
        super().__init__(host=route.host, port=route.port, **options)
        self._route = route
        self._log_in = log_in
        self._generation = route.generation

    async def connect(self) -> None:
        """Connect unless connected; reconnect if `Route.leave` was called since then."""
        if self.is_connected and self._generation != self._route.generation:
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[no-untyped-call] # of the library

    async def _connect(self) -> None:
        """Open the streams; the library calls this method to connect."""
        self._generation = self._route.generation
        login = await self._log_in()
        self.password = login.password
        connected = await self._route.connect()
        loop = asyncio.get_running_loop()
        reader = BoundedReader(loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        server_name = None if login.tls is None else self.host
        async with asyncio.timeout(self.socket_connect_timeout):
            transport, _ = await loop.create_connection(
                lambda: protocol, sock=connected, ssl=login.tls, server_hostname=server_name
            )
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)


@dataclass(slots=True)
class _Client:
    library: Any  # untyped: raw commands have no reply types
    gate: asyncio.Semaphore
    """Makes callers wait for a free connection, where the library would raise an error."""
    route: Route


_UNFIT: Final = (
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,  # and MasterDownError
)
"""Error replies of a server that cannot serve clients, or not yet; its address may meanwhile lead
to another server."""
_MOST_NAMES: Final = 1024


class Nodes:
    """Runs commands on the servers that own their keys.

    The library's cluster client fails a whole pipeline if one node does not answer, and discovers
    nodes only from those that do; therefore this class uses a plain client per node.

    Thread: loop.
    """

    def __init__(self, settings: ValkeySettings) -> None:
        """Create without connecting."""
        self.settings = settings
        self._first: Node = settings.address.host, settings.address.port
        # Half of the time is left to connect.
        self._lookups = Lookups(settings.call_timeout_s / 2)
        self._clients: dict[Node, _Client] = {}
        self._owners: list[Node | None] = []
        """The owner of each slot, if a cluster's slots are known."""
        self._guide: Node | None = None
        """The node that last reported the slot owners."""

    def node_of(self, name: bytes) -> Node | None:
        """Return the node that owns a key; None if it is unknown, or there is only one server."""
        return self._owners[key_slot(name)] if self._owners else None

    def owns_slots(self, node: Node) -> bool:
        """Return whether a node owns any slots."""
        return node in self._owners

    @property
    def slots(self) -> Sequence[Node | None]:
        """The owner of each slot; empty if there is only one server, or they are unknown."""
        return self._owners

    @property
    def owners(self) -> Sequence[Node]:
        """The nodes of a cluster that own slots, in order."""
        return sorted({node for node in self._owners if node is not None})

    def name_on(self, node: Node, stem: bytes) -> bytes | None:
        """Return a key (`stem` and a number) that a node owns; None if none was found."""
        names = (b"%b%d" % (stem, number) for number in range(_MOST_NAMES))
        return next((name for name in names if self.node_of(name) == node), None)

    async def refresh(self, doubted: Node | None = None) -> None:
        """Update the slot owners from the first node that answers in time.

        Args:
            doubted: A node to ask last: one that is cut off from the others knows old owners.

        Raises:
            Exception: The library's error; no node asked has answered.
        """
        first = self._guide or self._first
        others = [node for node in self._clients if node != first]
        nodes = [first, *random.sample(others, min(len(others), _MOST_ASKED - 1))]
        nodes.sort(key=lambda node: node == doubted)
        for node in nodes:
            try:
                async with asyncio.timeout(self.settings.call_timeout_s / (_MOST_ASKED + 1)):
                    (slots,) = await self._run(node, [("CLUSTER", "SLOTS")], _SLOTS_REPLY_BYTES)
                if isinstance(slots, Exception):
                    raise slots
                self._owners = _owners_of(slots, node)
            except (exceptions.RedisError, OSError, ReplyError):
                if node is nodes[-1]:
                    raise
            else:
                self._guide = node
                await self._close({*self._clients} - {*self._owners, self._first, node})
                return

    async def run(
        self, node: Node | None, commands: Sequence[Command], most_bytes: int = 0
    ) -> list[Any]:
        """Run commands on one node; return for each its reply or error.

        Args:
            node: The node; None: the only server.
            commands: Commands with one key each.
            most_bytes: Maximum size of each reply, beyond that of a short one.

        Raises:
            Exception: The library's error; the node did not answer.
        """
        if node is None:
            if self.settings.is_cluster:
                raise TierUnavailableError("no node of the cluster owns these keys")
            node = self._first
        replies = await self._run(node, commands, most_bytes)
        if self._owners:
            await self._redirect(commands, replies, most_bytes)
        return replies

    async def close(self) -> None:
        """Close all connections; may be repeated."""
        await self._close(set(self._clients))

    async def _run(self, node: Node, commands: Sequence[Command], most_bytes: int) -> list[Any]:
        client = self._clients.get(node) or self._open(node)
        async with client.gate:
            generation = client.route.generation
            try:
                async with client.library.pipeline(transaction=False) as pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)
                    with replies_up_to(most_bytes):
                        replies: list[Any] = await pipeline.execute(raise_on_error=False)
                for reply in replies:
                    if isinstance(reply, _UNFIT):
                        raise reply
            except _UNFIT:
                client.route.leave(generation)
                raise
        return replies

    def _open(self, node: Node) -> _Client:
        if len(self._clients) >= _MOST_NODES:
            raise ReplyError(f"the cluster names more than {_MOST_NODES} nodes")
        settings = self.settings
        most_connections = 2 * settings.connections + _SPARE_CONNECTIONS  # for both directions
        route = Route(*node, self._lookups, settings.call_timeout_s)
        pool = ConnectionPool(
            RoutedConnection,
            max_connections=most_connections,
            route=route,
            log_in=self._log_in,
            db=settings.address.database,
            username=settings.address.username,
            # Deadlines, retries and their counters are in `Calls`.
            socket_timeout=None,
            socket_connect_timeout=settings.call_timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            socket_read_size=_READ_BYTES,
        )
        gate = asyncio.Semaphore(most_connections)
        client = self._clients[node] = _Client(Redis.from_pool(pool), gate, route)
        return client

    async def _log_in(self) -> Login:
        settings = self.settings
        if settings.password_file is None and not settings.address.has_tls:
            return settings.read_login()  # reads no file
        return await self._lookups.run("credentials", settings.read_login)

    async def _redirect(
        self, commands: Sequence[Command], replies: list[Any], most_bytes: int
    ) -> None:
        """Repeat commands on the nodes to which their keys have been or are being moved."""
        moved: dict[Node, list[int]] = {}
        for i, reply in enumerate(replies):
            if isinstance(reply, exceptions.AskError):
                moved.setdefault((reply.host, reply.port), []).append(i)
                if isinstance(reply, exceptions.MovedError):
                    self._owners[reply.slot_id % REDIS_CLUSTER_HASH_SLOTS] = reply.host, reply.port
        for node, indices in moved.items():
            again = [part for i in indices for part in (("ASKING",), commands[i])]
            try:
                answers = await self._run(node, again, most_bytes)
            except (exceptions.RedisError, OSError, ReplyError) as error:
                answers = [error] * len(again)
            for i, answer in zip(indices, answers[1::2], strict=True):
                replies[i] = answer

    async def _close(self, nodes: set[Node]) -> None:
        clients = [self._clients.pop(node) for node in nodes if node in self._clients]
        for client in clients:
            await client.library.aclose()


def _owners_of(slots: list[Any], asked: Node) -> list[Node | None]:
    """Return the owner of each slot, from a reply to `CLUSTER SLOTS`."""
    owners: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    try:
        for first, last, (host, port, *_), *_ in slots:
            if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS or owners[first] or owners[last]:
                raise ReplyError(f"slots {first} to {last} are invalid, or have two owners")
            node = (host.decode() if host else asked[0], int(port))
            owners[first : last + 1] = [node] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError):
        raise ReplyError("the reply to CLUSTER SLOTS is malformed") from None
    return owners
