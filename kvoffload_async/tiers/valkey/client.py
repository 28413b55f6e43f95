"""Commands to Valkey or Redis: strings on one server, or on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, ClassVar, Final, cast

from kvoffload_async.errors import (
    CallTimeoutError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvoffload_async.tiers.remote.calls import run_together
from kvoffload_async.tiers.remote.client import (
    Parts,
    RefusedError,
    RemoteClient,
    Server,
    Target,
    Value,
)
from kvoffload_async.tiers.remote.existence import ExpiringKeys
from kvoffload_async.tiers.valkey.address import ValkeySettings
from kvoffload_async.tiers.valkey.connection import Command
from kvoffload_async.tiers.valkey.listing import list_page
from kvoffload_async.tiers.valkey.nodes import Node, Nodes
from kvoffload_async.tiers.valkey.replies import ReplyError, ServerError
from kvoffload_async.types import OffloadKey

_PORTION_BYTES: Final = 4 << 20
_PORTION_BLOCKS: Final = 256
_LABEL_BYTES: Final = 16
_MOST_WITNESSES: Final = 16
_CONDEMNED_S: Final = 60.0
_PROOF_MS: Final = 60_000
"""Lifetime of the key whose write proves that a node accepts writes."""

_INFO_BYTES: Final = 64 << 10
_MEMORY: Final = re.compile(
    rb"^maxmemory:(\d{1,19})\r?$.*?^maxmemory_policy:([\w-]{1,32})\r?$", re.MULTILINE | re.DOTALL
)

_REMOVE_IF: Final = (
    "local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[2]) "
    "if type(value) == 'table' then value = '' end "  # not a string
    "if redis.sha1hex(value) == ARGV[1] then return redis.call('DEL', KEYS[1]) end "
    "return 0"
)
_WHOLE: Final = "-1"
_REFUSALS: Final = (
    "WRONGPASS",
    "NOAUTH",
    "NOPERM",
    "ERR AUTH",
    "ERR Client sent AUTH",
    "ERR invalid password",
)
"""How the server's answers to wrong credentials and missing permissions begin."""


class ValkeyClient(RemoteClient):
    """Stores blocks as strings on a server, with pipelined SET NX PX and GETRANGE commands."""

    location: ClassVar[str] = "valkey"
    answers_many: ClassVar[bool] = True
    is_in_place: ClassVar[bool] = True

    def __init__(
        self, settings: ValkeySettings, namespace: str, emptied: Callable[[], None]
    ) -> None:
        """Create the client without connecting.

        Args:
            settings: The options.
            namespace: 32 hexadecimal digits.
            emptied: Called when the server has lost its contents.
        """
        self._nodes = Nodes(settings)
        self._label_name = f"kvo:{namespace}".encode()
        self._prefix = self._label_name + b":"
        self._label: bytes | None = None  # None: unknown; b"": there is none
        self._ttl_ms = None if settings.ttl_s is None else max(1, round(settings.ttl_s * 1000))
        self._emptied = emptied
        self._witnesses: deque[OffloadKey] = deque(maxlen=_MOST_WITNESSES)
        """Blocks seen recently on the server that has the namespace's label."""
        self._condemned = ExpiringKeys(_CONDEMNED_S)
        """Corrupt blocks that could not be removed. They count as absent, and the next store
        overwrites them."""

    async def connect(self) -> None:
        await self.check(None)

    async def check(self, server: Server) -> None:
        """Check that the server, or a node of a cluster, accepts a write.

        A node without slots need not respond.
        """
        node = cast("Node | None", server)
        if not self._nodes.settings.is_cluster:
            await self._check_label(None)
            return
        await self._nodes.refresh(doubted=node)
        if node is None or not self._nodes.owns_slots(node):
            return
        if self._nodes.node_of(self._label_name) == node:
            await self._check_label(node)
        elif name := self._nodes.name_on(node, self._label_name + b"?"):
            # Neither a full memory nor a missing permission is an error, as for the label.
            await self._nodes.run(node, [("SET", name, b"", "PX", _PROOF_MS)])
        else:
            _raise_first(await self._nodes.run(node, [("PING",)]))

    def server_of(self, key: OffloadKey) -> Server:
        return self._nodes.node_of(self._prefix + key)

    async def exist(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        node = self._node_of_all(keys)
        commands: list[Command] = [("EXISTS", self._prefix + key) for key in keys]
        has_label = self._nodes.node_of(self._label_name) == node
        if has_label:
            commands.append(self._read_label())
        replies = await self._nodes.run(node, commands)
        label = _label_of(replies.pop()) if has_label else self._label
        _raise_first(replies)
        if label != self._label:
            await self._check_label(node)
        present = [key for key, reply in zip(keys, replies, strict=True) if reply]
        self._saw(present)
        now_s = asyncio.get_running_loop().time()
        return frozenset(key for key in present if not self._condemned.has(key, now_s))

    async def get(
        self, keys: Sequence[OffloadKey], targets: Sequence[Target]
    ) -> Sequence[Value | TierError | None]:
        """Read values into their targets, and no more of them: a string may have 512 MiB."""
        commands: list[Command] = [
            ("GETRANGE", self._prefix + key, 0, target.capacity - 1)
            for key, target in zip(keys, targets, strict=True)
        ]
        replies = await self._nodes.run(self._node_of_all(keys), commands, targets)
        errors = {key: r for key, r in zip(keys, replies, strict=True) if _is_failure(r)}
        if len(errors) == len(keys):
            _raise_first(replies)
        sizes = [0 if key in errors else _size_of(r) for key, r in zip(keys, replies, strict=True)]
        # The size is 0 for absent keys, empty strings and other types.
        empty = [k for k, size in zip(keys, sizes, strict=True) if not size and k not in errors]
        present = await self.exist(empty) if empty else frozenset()
        self._saw([key for key, size in zip(keys, sizes, strict=True) if size])
        return [
            self.mapped(errors[key])
            if key in errors
            else Value(None, _WHOLE if size < target.capacity else str(size - 1))
            if size or key in present
            else None
            for key, target, size in zip(keys, targets, sizes, strict=True)
        ]

    async def put(
        self, keys: Sequence[OffloadKey], values: Sequence[Parts]
    ) -> Sequence[TierError | None]:
        """Store values; overwrite only corrupt ones that could not be removed.

        Overwriting needs no condition: a valid block written meanwhile by another host is replaced
        by an equally valid one.
        """
        lifetime = () if self._ttl_ms is None else ("PX", self._ttl_ms)
        commands: list[Command] = []
        now_s = asyncio.get_running_loop().time()
        for key, value in zip(keys, values, strict=True):
            condition = () if self._condemned.has(key, now_s) else ("NX",)
            commands.append(("SET", self._prefix + key, value, *lifetime, *condition))
        node = self._node_of_all(keys)
        replies = await self._nodes.run(node, commands)
        outcomes = [self.mapped(r) if isinstance(r, Exception) else None for r in replies]
        stored = [key for key, error in zip(keys, outcomes, strict=True) if error is None]
        self._condemned.discard(stored)
        self._saw(stored)
        return outcomes

    async def remove_if(self, key: OffloadKey, value: Value, sha1: str) -> bool:
        """Remove a value if unchanged, comparing only the bytes that were read (its version)."""
        name = self._prefix + key
        command = ("EVAL", _REMOVE_IF, 1, name, sha1, value.version or _WHOLE)
        self._condemned.add([key], asyncio.get_running_loop().time())
        (reply,) = await self._nodes.run(self._nodes.node_of(name), [command])
        if isinstance(reply, Exception):
            raise RefusedError(str(reply))  # a permission is missing: retries do not help
        self._condemned.discard([key])
        return bool(reply)

    async def remove(self, keys: Sequence[OffloadKey]) -> None:
        commands = [("DEL", self._prefix + key) for key in keys]
        _raise_first(await self._nodes.run(self._node_of_all(keys), commands))
        self._condemned.discard(keys)

    async def renew(self, keys: Sequence[OffloadKey]) -> None:
        ttl_ms = self._ttl_ms
        if ttl_ms is None:
            return
        errors: list[Exception] = []

        async def run(portion: Sequence[int]) -> None:
            names = [self._prefix + keys[i] for i in portion]
            commands = [("PEXPIRE", name, ttl_ms) for name in names]
            try:
                _raise_first(await self._nodes.run(self._nodes.node_of(names[0]), commands))
            except Exception as error:  # noqa: BLE001 - the library's own; raised below
                errors.append(error)

        await run_together(map(run, self.portions(keys, len(keys))), "remote:renewal")
        if errors:  # of a node that is down; keys of other nodes are renewed
            raise errors[0]

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        return await list_page(self._nodes, self._prefix, cursor, count)

    async def read_bounds(self) -> list[tuple[int, str]]:
        """Return `maxmemory` (0: none) and `maxmemory-policy` of each server that reveals them."""
        found: list[tuple[int, str]] = []
        nodes: Sequence[Node | None] = self._nodes.owners or (None,)
        for node in nodes:
            (reply,) = await self._nodes.run(node, [("INFO", "memory")], most_bytes=_INFO_BYTES)
            if isinstance(reply, bytes) and (match := _MEMORY.search(reply)):
                found.append((int(match[1]), match[2].decode()))
        return found

    def mapped(self, error: Exception) -> TierError:
        if isinstance(error, TierError):
            return error
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ServerError):
            if error.code == "OOM":
                return TierFullError("the server is at its maxmemory")
            if str(error).startswith(_REFUSALS):
                return RefusedError(text)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return RefusedError(text)
        if isinstance(error, TimeoutError):
            return CallTimeoutError(text)
        return TierUnavailableError(text)

    async def close(self) -> None:
        await self._nodes.close()

    def portion_blocks(self, value_bytes: int) -> int:
        return max(1, min(_PORTION_BLOCKS, _PORTION_BYTES // value_bytes))

    def _node_of_all(self, keys: Sequence[OffloadKey]) -> Node | None:
        """Return the node of keys on one server; commands for moved keys are redirected."""
        return self._nodes.node_of(self._prefix + keys[0])

    def _saw(self, keys: Sequence[OffloadKey]) -> None:
        """Record existing blocks on one server, if that server has the namespace's label."""
        if keys and self._nodes.node_of(self._label_name) == self._node_of_all(keys):
            self._witnesses.extend(islice(keys, _MOST_WITNESSES))

    def _read_label(self) -> Command:
        return ("GETRANGE", self._label_name, 0, _LABEL_BYTES)

    async def _check_label(self, node: Node | None) -> None:
        """Create the server's label if missing, and read it; fails on a read-only server.

        A changed label means that the contents are lost, unless recently seen blocks still exist:
        then only the label was evicted or overwritten.
        """
        make: Command = ("SET", self._label_name, secrets.token_hex(_LABEL_BYTES // 2))
        _, reply = await self._nodes.run(node, [(*make, "NX"), self._read_label()])
        label = _label_of(reply)
        if not label:  # no memory is left, or another client wrote a different value
            _, reply = await self._nodes.run(node, [make, self._read_label()])
            label = _label_of(reply)
        still_there: Sequence[Any] = ()
        if self._label and label != self._label and self._witnesses:
            witnesses = [("EXISTS", self._prefix + key) for key in self._witnesses]
            still_there = await self._nodes.run(node, witnesses)
            _raise_first(still_there)
        was, self._label = self._label, label
        if was and label != was and still_there and not any(still_there):
            self._emptied()


def _raise_first(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply


def _size_of(reply: object) -> int:
    """Return the size of a value that was read; 0 if the key has a value of another type."""
    if isinstance(reply, Exception):
        return 0
    if not isinstance(reply, int):
        raise ReplyError("a value was not answered with a string")
    return reply


def _label_of(reply: object) -> bytes:
    """Return the label in a reply; empty if it is not a valid label. Raises other errors."""
    if isinstance(reply, Exception) and _is_failure(reply):
        raise reply
    return reply if isinstance(reply, bytes) and len(reply) == _LABEL_BYTES else b""


def _is_failure(reply: object) -> bool:
    """Return whether a reply is an error other than that the key has a value of another type."""
    is_other_type = isinstance(reply, ServerError) and reply.code == "WRONGTYPE"
    return isinstance(reply, Exception) and not is_other_type
