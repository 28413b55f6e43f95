"""What a remote tier needs of a client library: a few calls over keys, each safe to repeat."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvoffload_async.errors import TierError, TierUnavailableError
from kvoffload_async.tiers.remote.envelope import Bytes
from kvoffload_async.types import OffloadKey

Server = Hashable
"""Which of a store's servers, as its client calls it; None: the only one, or none is known."""


class RefusedError(TierUnavailableError):
    """The server refuses this client: a wrong password, a missing right. No retry helps."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a store has for a key.

    Attributes:
        data: Its bytes; none where it is too long to be a block, and was not read.
        version: What the store calls this version, where it does.
    """

    data: memoryview
    version: str | None = None

    def sha1(self) -> str:
        """Return the SHA-1 of the bytes: for stores that know versions by nothing else."""
        return hashlib.sha1(self.data, usedforsecurity=False).hexdigest()


class RemoteClient(ABC):
    """A client of one store. Errors of its library come out as they are, and `mapped` names them.

    Every call may be repeated, and may be cancelled: afterwards it touches no memory of the
    caller's, and its connection is not used again with an answer outstanding.

    Thread: loop.
    """

    place: ClassVar[str]
    """What kind of store it is, for messages."""
    answers_many: ClassVar[bool]
    """Whether one call answers for many keys; otherwise each costs a request."""
    renews_age: ClassVar[bool] = True
    """Whether `renew` keeps values from expiring."""

    @abstractmethod
    async def connect(self) -> None:
        """Find out whether the store can be used, and note what it holds; may be repeated."""

    @abstractmethod
    async def check(self) -> None:
        """Ask the server whether it is there: about no value."""

    @abstractmethod
    async def exist(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a value."""

    @abstractmethod
    async def get(
        self, keys: Sequence[OffloadKey], most_bytes: int
    ) -> Sequence[Value | TierError | None]:
        """Return the value of each key, why it could not be read, or None where there is none.

        Args:
            keys: Of which blocks.
            most_bytes: A longer value need not be read.
        """

    @abstractmethod
    async def put(
        self, keys: Sequence[OffloadKey], values: Sequence[Bytes]
    ) -> Sequence[TierError | None]:
        """Store values where there are none yet; return for each why it could not be stored."""

    @abstractmethod
    async def remove_if(self, key: OffloadKey, value: Value, sha1: str) -> bool:
        """Remove a value if it still is this one, which has this SHA-1; return whether it was."""

    @abstractmethod
    async def renew(self, keys: Sequence[OffloadKey]) -> None:
        """Have values that are there expire as late as if they had been written now."""

    @abstractmethod
    def mapped(self, error: Exception) -> TierError:
        """Return what an error of the library means; its text may still have secrets in it."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection; may be repeated."""

    def server_of(self, key: OffloadKey) -> Server:
        """Return which server has a key: one that is down costs the keys of the others nothing."""
        del key
        return None

    def by_server(self, keys: Iterable[OffloadKey]) -> dict[Server, list[int]]:
        """Return the indices of the keys that each server has; a call takes those of one."""
        servers: dict[Server, list[int]] = {}
        for i, key in enumerate(keys):
            servers.setdefault(self.server_of(key), []).append(i)
        return servers

    async def check_server(self, server: Server) -> None:
        """Ask one of several servers whether it is there."""
        del server
        await self.check()

    def portion_blocks(self, value_bytes: int) -> int:
        """Return how many values of this length one call takes at most."""
        del value_bytes
        return 1
