"""The server, or a cluster's nodes: slot owners, connections, and pipelines to each node."""

from __future__ import annotations

import asyncio
import random
from binascii import crc_hqx
from collections.abc import Sequence
from typing import Any, Final

from kvoffload_async.errors import CallTimeoutError, TierError, TierUnavailableError
from kvoffload_async.tiers.remote.client import Target
from kvoffload_async.tiers.remote.lookups import LookUpError, Lookups
from kvoffload_async.tiers.valkey.address import Login, Route, ValkeySettings
from kvoffload_async.tiers.valkey.connection import Command, Connection
from kvoffload_async.tiers.valkey.replies import ReplyError, ServerError

Node = tuple[str, int]
"""Host and port of a server."""

_SPARE_CONNECTIONS: Final = 8
"""Additional connections for probes, renewals and checks, so that these do not wait for payload."""
_SLOTS: Final = 16384
_SLOTS_REPLY_BYTES: Final = 8 << 20
"""Maximum bytes of a reply to `CLUSTER SLOTS`, with a different owner for each slot."""
_MOST_NODES: Final = 1024
_MOST_ASKED: Final = 3
"""Maximum number of nodes asked for the slot owners before giving up."""
_UNFIT: Final = {"READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN"}
"""Codes of a server that cannot serve clients, or not yet; its address may meanwhile lead to
another server."""
_MOST_NAMES: Final = 1024
_LIBRARY_NAME: Final = "kvoffload-async"
"""Shown by `CLIENT LIST`."""
_FAULTS: Final = (ServerError, ReplyError, OSError, LookUpError, TierError)
"""Errors of a node, which do not concern others."""


def slot_of(name: bytes) -> int:
    """Return the slot of a key in a cluster: that of its hash tag, if it has one."""
    _, brace, rest = name.partition(b"{")
    tag, end, _ = rest.partition(b"}")
    return crc_hqx(tag if brace and end and tag else name, 0) % _SLOTS


class ConnectionPool:
    """The connections to one server. Thread: loop.

    Attributes:
        route: Leads to the server.
    """

    def __init__(self, node: Node, lookups: Lookups, settings: ValkeySettings) -> None:
        """Create without connecting."""
        self.route = Route(*node, lookups, settings.call_timeout_s)
        self._lookups = lookups
        self._settings = settings
        # For both directions.
        self._gate = asyncio.Semaphore(2 * settings.connections + _SPARE_CONNECTIONS)
        self._idle: list[Connection] = []
        self._is_closed = False

    async def call(
        self, commands: Sequence[Command], targets: Sequence[Target | None], most_bytes: int
    ) -> list[Any]:
        """Make a call on an idle connection or a new one; see `Connection.call`.

        A server that is not fit to serve is left: later calls connect again.
        """
        async with self._gate:
            connection = self._take() or await self._connect()
            try:
                replies = await connection.call(commands, targets, most_bytes)
            finally:
                if self._is_closed:
                    connection.close()
                elif connection.is_open:
                    self._idle.append(connection)
            for reply in replies:
                if isinstance(reply, ServerError) and reply.code in _UNFIT:
                    self.route.leave(connection.generation)
                    raise reply
        return replies

    async def close(self) -> None:
        """Close the idle connections, and every other one after its call."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
            await connection.closed()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.generation == self.route.generation:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        """Look up address and credentials, connect, and log in."""
        settings, connection = self._settings, Connection(self.route.generation)
        login = await self._log_in()
        try:
            connected = await self.route.connect()
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                sock=connected,
                ssl=login.tls,
                server_hostname=self.route.host if login.tls else None,
            )
        except TimeoutError as error:
            raise CallTimeoutError(f"{self.route.host}: no connection in time ({error})") from None
        username, database = settings.address.username, settings.address.database
        commands: list[Command] = []
        if username:
            commands.append(("AUTH", username, login.password or ""))
        elif login.password:
            commands.append(("AUTH", login.password))
        if database:
            commands.append(("SELECT", database))
        needed = len(commands)
        # Old servers do not know this command, and the user may not be permitted to use it.
        commands.append(("CLIENT", "SETINFO", "LIB-NAME", _LIBRARY_NAME))
        replies = await connection.call(commands)
        for reply in replies[:needed]:
            if isinstance(reply, Exception):
                connection.close()
                await connection.closed()
                raise reply
        return connection

    async def _log_in(self) -> Login:
        settings = self._settings
        if settings.password_file is None and not settings.address.has_tls:
            return settings.read_login()  # reads no file
        return await self._lookups.run("credentials", settings.read_login)


class Nodes:
    """Runs commands on the servers that own their keys.

    A node that does not answer fails its own calls alone.

    Thread: loop.
    """

    def __init__(self, settings: ValkeySettings) -> None:
        """Create without connecting."""
        self.settings = settings
        self._first: Node = settings.address.host, settings.address.port
        # Half of the time is left to connect.
        self._lookups = Lookups(settings.call_timeout_s / 2)
        self._pools: dict[Node, ConnectionPool] = {}
        self._owners: list[Node | None] = []
        """The owner of each slot, if a cluster's slots are known."""
        self._guide: Node | None = None
        """The node that last reported the slot owners."""

    def node_of(self, name: bytes) -> Node | None:
        """Return the node that owns a key; None if it is unknown, or there is only one server."""
        return self._owners[slot_of(name)] if self._owners else None

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
            Exception: No node asked has answered.
        """
        first = self._guide or self._first
        others = [node for node in self._pools if node != first]
        nodes = [first, *random.sample(others, min(len(others), _MOST_ASKED - 1))]
        nodes.sort(key=lambda node: node == doubted)
        for node in nodes:
            try:
                async with asyncio.timeout(self.settings.call_timeout_s / (_MOST_ASKED + 1)):
                    (slots,) = await self._call(
                        node, [("CLUSTER", "SLOTS")], most_bytes=_SLOTS_REPLY_BYTES
                    )
                if isinstance(slots, Exception):
                    raise slots
                self._owners = _owners_of(slots, node)
            except _FAULTS:
                if node is nodes[-1]:
                    raise
            else:
                self._guide = node
                await self._close({*self._pools} - {*self._owners, self._first, node})
                return

    async def run(
        self,
        node: Node | None,
        commands: Sequence[Command],
        targets: Sequence[Target] = (),
        most_bytes: int = 0,
    ) -> list[Any]:
        """Run commands on one node; return their replies, see `ReplyReader`.

        Args:
            node: The node; None: the only server.
            commands: Commands with one key each.
            targets: Where to read the values with which the commands are answered; none: the
                replies are short.
            most_bytes: Maximum size of every other reply, beyond that of a short one.

        Raises:
            Exception: The node did not answer, or is not fit to serve.
        """
        if node is None:
            if self.settings.is_cluster:
                raise TierUnavailableError("no node of the cluster owns these keys")
            node = self._first
        replies = await self._call(node, commands, targets, most_bytes)
        if self._owners:
            await self._redirect(node, commands, targets, replies)
        return replies

    async def close(self) -> None:
        """Close all connections; may be repeated."""
        await self._close(set(self._pools))

    async def _call(
        self,
        node: Node,
        commands: Sequence[Command],
        targets: Sequence[Target | None] = (),
        most_bytes: int = 0,
    ) -> list[Any]:
        pool = self._pools.get(node)
        if pool is None:
            if len(self._pools) >= _MOST_NODES:
                raise ReplyError(f"the cluster names more than {_MOST_NODES} nodes")
            pool = self._pools[node] = ConnectionPool(node, self._lookups, self.settings)
        return await pool.call(commands, targets, most_bytes)

    async def _redirect(
        self,
        asked: Node,
        commands: Sequence[Command],
        targets: Sequence[Target],
        replies: list[Any],
    ) -> None:
        """Repeat commands on the nodes to which their keys have been or are being moved."""
        moved: dict[Node, list[int]] = {}
        for i, reply in enumerate(replies):
            if isinstance(reply, ServerError) and reply.code in {"MOVED", "ASK"}:
                slot, node = _moved_to(reply, asked)
                moved.setdefault(node, []).append(i)
                if reply.code == "MOVED":
                    self._owners[slot] = node
        for node, indices in moved.items():
            again = [part for i in indices for part in (("ASKING",), commands[i])]
            into = [part for i in indices if targets for part in (None, targets[i])]
            try:
                answers = await self._call(node, again, into)
            except _FAULTS as error:
                answers = [error] * len(again)
            for i, answer in zip(indices, answers[1::2], strict=True):
                replies[i] = answer

    async def _close(self, nodes: set[Node]) -> None:
        pools = [self._pools.pop(node) for node in nodes if node in self._pools]
        for pool in pools:
            await pool.close()


def _moved_to(error: ServerError, asked: Node) -> tuple[int, Node]:
    """Return slot and node of a reply such as `MOVED 3999 10.0.0.7:6379`; no host: the same one."""
    try:
        _, slot, address = str(error).split(" ")
        host, _, port = address.rpartition(":")
        return int(slot) % _SLOTS, (host or asked[0], int(port))
    except ValueError:
        raise ReplyError("a redirection is malformed") from None


def _owners_of(slots: list[Any], asked: Node) -> list[Node | None]:
    """Return the owner of each slot, from a reply to `CLUSTER SLOTS`."""
    owners: list[Node | None] = [None] * _SLOTS
    try:
        for first, last, (host, port, *_), *_ in slots:
            if not 0 <= first <= last < _SLOTS or owners[first] or owners[last]:
                raise ReplyError(f"slots {first} to {last} are invalid, or have two owners")
            node = (host.decode() if host else asked[0], int(port))
            owners[first : last + 1] = [node] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError):
        raise ReplyError("the reply to CLUSTER SLOTS is malformed") from None
    return owners
