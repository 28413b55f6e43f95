"""Calls to Valkey or Redis through `redis` (asyncio). The only module that knows the library."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvoffload_async.errors import (
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.tiers.remote.client import RefusedError, RemoteClient, Value
from kvoffload_async.tiers.remote.envelope import Bytes
from kvoffload_async.tiers.valkey.address import Address
from kvoffload_async.types import OffloadKey

_PORTION_BYTES: Final = 4 << 20
_PORTION_BLOCKS: Final = 256
_READ_BYTES: Final = 256 << 10
"""What asyncio takes from a socket at most: with less, each piece costs the loop several turns."""
_SPARE_CONNECTIONS: Final = 8
"""For probes, renewals and checks, which need not wait for payload."""

_REMOVE_IF: Final = (
    "local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[2]) "
    "if type(value) == 'table' then value = '' end "  # it is no string
    "if redis.sha1hex(value) == ARGV[1] then return redis.call('DEL', KEYS[1]) end "
    "return 0"
)
_WHOLE: Final = "-1"
_REFUSALS: Final = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
)


@dataclass(frozen=True, slots=True)
class ValkeyConnection:
    """How to connect.

    Attributes:
        address: Where to.
        is_cluster: Whether that is a node of a cluster.
        connections: Calls with payload at once, in each direction.
        connect_timeout_s: Seconds for a connection.
        ca_file: Certificates to verify the server's with; None: the system's.
        cert_file: This client's own certificate.
        key_file: That certificate's key.
    """

    address: Address
    is_cluster: bool = False
    connections: int = 8
    connect_timeout_s: float = 5.0
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @property
    def most_connections(self) -> int:
        """Connections to a server at once, of both directions and of what has no payload."""
        return 2 * self.connections + _SPARE_CONNECTIONS

    def open(self) -> Redis | RedisCluster:
        """Return the library's client; it connects when it is used."""
        address = self.address
        options: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "username": address.username,
            "password": address.password,
            # Every call has a deadline of its own, and repeats are counted where they are made.
            "socket_timeout": None,
            "socket_connect_timeout": self.connect_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": self.most_connections,
            "protocol": 2,
            "socket_read_size": _READ_BYTES,
        }
        if address.has_tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": self.ca_file,
                "ssl_certfile": self.cert_file,
                "ssl_keyfile": self.key_file,
            }
        if self.is_cluster:
            return RedisCluster(**options)
        return Redis(db=address.database, **options)


class ValkeyClient(RemoteClient):
    """Blocks as strings of a server: SET NX PX, GETRANGE, pipelined."""

    place: ClassVar[str] = "valkey"
    answers_many: ClassVar[bool] = True

    def __init__(
        self,
        connection: ValkeyConnection,
        namespace: str,
        ttl_s: float | None,
        emptied: Callable[[], None],
    ) -> None:
        """Connect to nothing yet.

        Args:
            connection: Where to.
            namespace: 32 hexadecimal digits.
            ttl_s: Seconds that a block lives unused; None: as long as the server keeps it.
            emptied: Called when the server has lost its contents.
        """
        # Of two classes without a common base: the type checker knows neither by the calls here.
        self._library: Any = connection.open()
        # The library raises where there is no connection left; here who comes then waits.
        self._gate = asyncio.Semaphore(connection.most_connections)
        self._label_name = f"kvo:{namespace}".encode()
        self._prefix = self._label_name + b":"
        self._label: bytes | None = None
        self._ttl_ms = None if ttl_s is None else max(1, round(ttl_s * 1000))
        self._emptied = emptied

    async def connect(self) -> None:
        await self._library.ping()
        self._label = await self._current_label()

    async def check(self) -> None:
        self._compare_label(await self._current_label())

    async def exist(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        async with self._pipeline() as pipeline:
            pipeline.get(self._label_name)
            for key in keys:
                pipeline.exists(self._prefix + key)
            label, *answers = await pipeline.execute()
        if label != self._label:
            self._compare_label(await self._current_label())
        return frozenset(key for key, answer in zip(keys, answers, strict=True) if answer)

    async def get(
        self, keys: Sequence[OffloadKey], most_bytes: int
    ) -> Sequence[Value | TierError | None]:
        """Read values as far as they may be blocks: one can have 512 MiB."""
        async with self._pipeline() as pipeline:
            for key in keys:
                pipeline.getrange(self._prefix + key, 0, most_bytes)
            answers = await pipeline.execute(raise_on_error=False)
        found = [_bytes_of(answer) for answer in answers]
        # Nothing is read where nothing is, nor of a value without bytes, or that is no string.
        empty = [key for key, data in zip(keys, found, strict=True) if not data]
        present = await self.exist(empty) if empty else frozenset()
        return [
            Value(memoryview(data), str(most_bytes) if len(data) > most_bytes else _WHOLE)
            if data or key in present
            else None
            for key, data in zip(keys, found, strict=True)
        ]

    async def put(
        self, keys: Sequence[OffloadKey], values: Sequence[Bytes]
    ) -> Sequence[TierError | None]:
        async with self._pipeline() as pipeline:
            for key, value in zip(keys, values, strict=True):
                pipeline.set(self._prefix + key, value.data, nx=True, px=self._ttl_ms)
            answers = await pipeline.execute(raise_on_error=False)
        return [self.mapped(a) if isinstance(a, Exception) else None for a in answers]

    async def remove_if(self, key: OffloadKey, value: Value, sha1: str) -> bool:
        """Remove a value that begins, or is, as it was read; its version says how far that went."""
        name = self._prefix + key
        extent = value.version or _WHOLE
        async with self._gate:
            return bool(await self._library.eval(_REMOVE_IF, 1, name, sha1, extent))

    async def renew(self, keys: Sequence[OffloadKey]) -> None:
        if self._ttl_ms is None:
            return
        async with self._pipeline() as pipeline:
            for key in keys:
                pipeline.pexpire(self._prefix + key, self._ttl_ms)
            await pipeline.execute()

    def mapped(self, error: Exception) -> TierError:
        if isinstance(error, exceptions.OutOfMemoryError):
            return TierFullError("the server is at its maxmemory")
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, _REFUSALS) or "CERTIFICATE_VERIFY_FAILED" in text:
            return RefusedError(text)
        if isinstance(error, exceptions.TimeoutError):
            return TierTimeoutError(text)
        return TierUnavailableError(text)

    async def close(self) -> None:
        await self._library.aclose()

    def portion_blocks(self, value_bytes: int) -> int:
        return max(1, min(_PORTION_BLOCKS, _PORTION_BYTES // value_bytes))

    @asynccontextmanager
    async def _pipeline(self) -> AsyncIterator[Any]:  # of two classes, too
        async with self._gate, self._library.pipeline(transaction=False) as pipeline:
            yield pipeline

    def _compare_label(self, label: bytes | None) -> None:
        """Note the server's label; another one than before means that its contents are gone."""
        was, self._label = self._label, label
        if was is not None and label != was:
            self._emptied()

    async def _current_label(self) -> bytes | None:
        """Return the server's label, a new one where it has none; None if it has no memory left."""
        async with self._pipeline() as pipeline:
            pipeline.set(self._label_name, secrets.token_hex(8), nx=True)
            pipeline.get(self._label_name)
            answers = await pipeline.execute(raise_on_error=False)
        label: bytes | Exception | None = answers[1]
        if isinstance(label, Exception):
            raise label  # whoever made the call breaks the cycle of error and frame
        return label


def _bytes_of(answer: bytes | Exception) -> bytes:
    """Return what was read, nothing of what is no string; raises any other error."""
    if not isinstance(answer, Exception):
        return answer
    if "WRONGTYPE" in str(answer):
        return b""
    raise answer
