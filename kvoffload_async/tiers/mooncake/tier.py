"""The `mooncake` tier itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeVar

import numpy as np

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import (
    AsyncTier,
    Direction,
    TierBounds,
    TierCapabilities,
    TierEnvironment,
)
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    TierClosedError,
    TierError,
    TierUnavailableError,
)
from kvoffload_async.tiers.files.integrity import IntegrityKey
from kvoffload_async.tiers.mooncake.client import MooncakeClient, MooncakeConnection
from kvoffload_async.tiers.remote.envelope import Bytes, Envelopes, namespace_of
from kvoffload_async.types import JobMetadata, Locality, OffloadKey

T = TypeVar("T")

_HEAD_BYTES: Final = 256
"""Room for a header and its key."""
_PORTION_BYTES: Final = 16 << 20
_PORTION_BLOCKS: Final = 256


@dataclass(slots=True)
class MooncakeCounters:
    """What a tier has seen.

    Attributes:
        requests: Calls that were begun.
        failed: Those that failed as a whole.
        probed_keys: Keys that the store was asked about.
        read_again: Blocks that did not verify, and so were read once more.
        corrupt: Blocks that did not verify then either.
        removed: Those of them that were removed.
    """

    requests: int = 0
    failed: int = 0
    probed_keys: int = 0
    read_again: int = 0
    corrupt: int = 0
    removed: int = 0


class _Place:
    """What an open tier works with: the store, and memory that it may read and write."""

    def __init__(
        self, client: MooncakeClient, env: TierEnvironment, key: IntegrityKey | None
    ) -> None:
        self.env = env
        self.client = client
        self.rows: Bytes = np.asarray(env.kv_view)
        self.heads: Bytes = np.zeros((len(self.rows), _HEAD_BYTES), dtype=np.uint8)
        layout = env.identity.digest
        self.envelopes = Envelopes(layout, self.rows.shape[1], key)
        self._prefix = f"kvo:{namespace_of(layout, key)}:"
        for memory in (self.rows, self.heads):
            client.register(memory.ctypes.data, memory.nbytes)
        self._rows_at, self._heads_at = self.rows.ctypes.data, self.heads.ctypes.data

    def name(self, key: OffloadKey) -> str:
        return self._prefix + key.hex()

    def memory_of(
        self, job: JobMetadata, indices: Sequence[int]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Return names, addresses and sizes of blocks: header and row of each."""
        row_bytes = self.rows.shape[1]
        slots = job.block_ids
        names = [self.name(job.keys[i]) for i in indices]
        addresses = [
            [
                self._heads_at + int(slots[i]) * _HEAD_BYTES,
                self._rows_at + int(slots[i]) * row_bytes,
            ]
            for i in indices
        ]
        sizes = [[self.envelopes.header_bytes(job.keys[i]), row_bytes] for i in indices]
        return names, addresses, sizes


class MooncakeTier(AsyncTier):
    """Keeps each block in the memory of one or more clients of a Mooncake Store.

    Its calls block, and run on the tier's own I/O threads. One that hangs keeps its thread and its
    blocks' slots until it ends, and what waits behind it ends at its deadline.
    """

    def __init__(
        self, connection: MooncakeConnection, integrity_key: IntegrityKey | None = None
    ) -> None:
        """Describe the tier; nothing is joined before `open`."""
        self.capabilities = TierCapabilities(exclusive=False, locality=Locality.REMOTE)
        self.bounds = TierBounds(concurrent_blocks=64)
        self._connection = connection
        self._integrity_key = integrity_key
        self._counters = MooncakeCounters()
        self._place: _Place | None = None

    async def open(self, env: TierEnvironment) -> None:
        """Join the store, and register the primary's memory with it.

        Raises:
            ConfigError: The library cannot be loaded, or the memory not be registered.
            TierUnavailableError: The master cannot be reached.
        """
        joined: list[_Place] = []

        def join() -> None:
            client = self._connection.open()
            try:
                joined.append(_Place(client, env, self._integrity_key))
            except BaseException:
                client.close()
                raise

        try:
            await env.io.run(Direction.NONE, join)
        finally:  # also if it was cancelled: `close` has to leave what was joined then
            self._place = joined.pop() if joined else None

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Ask for all keys in one call."""
        place = self._opened()
        self._counters.probed_keys += len(keys)
        names = [place.name(key) for key in keys]
        found = await self._call(place, Direction.NONE, lambda: place.client.exist(names))
        return frozenset(key for key, is_there in zip(keys, found, strict=True) if is_there)

    async def store(self, job: JobMetadata) -> BlockFailures:
        place = self._opened()
        failures: dict[int, TierError] = {}
        for portion in self._portions(place, job):
            failures.update(self._too_long(job, portion))
            indices = [i for i in portion if i not in failures]

            def put(indices: Sequence[int] = indices) -> list[TierError | None]:
                for i in indices:
                    slot = job.block_ids[i]
                    header = place.envelopes.header(job.keys[i], place.rows[slot])
                    place.heads[slot, : len(header)] = header
                return place.client.put(*place.memory_of(job, indices))

            outcomes = await self._call(place, Direction.STORE, put)
            failures.update(_failed(indices, outcomes))
        return failures

    async def load(self, job: JobMetadata) -> BlockFailures:
        place = self._opened()
        failures: dict[int, TierError] = {}
        for portion in self._portions(place, job):
            failures.update(self._too_long(job, portion))
            indices = [i for i in portion if i not in failures]
            read = await self._read(place, job, indices)
            corrupt = [i for i, error in read.items() if isinstance(error, CorruptBlockError)]
            if corrupt:  # perhaps only on its way here: what is removed was bad twice
                self._counters.read_again += len(corrupt)
                for i in corrupt:
                    del read[i]
                read |= await self._read(place, job, corrupt)
                await self._remove(place, job, read)
            failures.update(read)
        return failures

    async def close(self) -> None:
        """Leave the store: what others do not have of this process's memory is lost to them."""
        place, self._place = self._place, None
        if place is not None:
            await place.env.io.run(Direction.NONE, place.client.close)

    def gauges(self) -> Mapping[str, float]:
        return asdict(self._counters)

    def describe(self) -> str:
        return f"mooncake at {self._connection.master}"

    # -- inside ---------------------------------------------------------------------------------

    async def _read(
        self, place: _Place, job: JobMetadata, indices: Sequence[int]
    ) -> dict[int, TierError]:
        """Read blocks into their slots; return those that are not there, or do not verify."""

        def get() -> list[TierError | None]:
            outcomes = place.client.get(*place.memory_of(job, indices))
            for at, i in enumerate(indices):
                if outcomes[at] is None:
                    key, slot = job.keys[i], job.block_ids[i]
                    header = place.heads[slot, : place.envelopes.header_bytes(key)]
                    outcomes[at] = place.envelopes.verify(key, header, place.rows[slot])
            return outcomes

        outcomes = await self._call(place, Direction.LOAD, get)
        return {
            i: BlockMissingError(f"block {job.keys[i].hex()} is not there")
            if isinstance(error, BlockMissingError)
            else error
            for i, error in _failed(indices, outcomes).items()
        }

    async def _remove(
        self, place: _Place, job: JobMetadata, failures: Mapping[int, TierError]
    ) -> None:
        """Remove what is bad: else the first writer would keep it for ever."""
        bad = [i for i, error in failures.items() if isinstance(error, CorruptBlockError)]
        self._counters.corrupt += len(bad)
        names = [place.name(job.keys[i]) for i in bad]
        if names:
            remove = place.client.remove
            self._counters.removed += await self._call(place, Direction.NONE, lambda: remove(names))

    async def _call(self, place: _Place, direction: Direction, call: Callable[[], T]) -> T:
        self._counters.requests += 1
        try:
            outcome = await place.env.io.run(direction, call)
        except TierError:
            self._counters.failed += 1
            raise
        if isinstance(outcome, list) and outcome and all(map(_is_unavailable, outcome)):
            self._counters.failed += 1
            raise TierUnavailableError(str(outcome[0]))  # nobody is there: no block is to blame
        return outcome

    @staticmethod
    def _too_long(job: JobMetadata, portion: range) -> dict[int, TierError]:
        return {
            i: TierError(f"block {job.keys[i].hex()}: its key is too long for this tier")
            for i in portion
            if Envelopes.header_bytes(job.keys[i]) > _HEAD_BYTES
        }

    @staticmethod
    def _portions(place: _Place, job: JobMetadata) -> Sequence[range]:
        step = max(1, min(_PORTION_BLOCKS, _PORTION_BYTES // place.rows.shape[1]))
        count = len(job.keys)
        return [range(first, min(first + step, count)) for first in range(0, count, step)]

    def _opened(self) -> _Place:
        if self._place is None:
            raise TierClosedError(f"{self.describe()} is not open")
        return self._place


def _is_unavailable(outcome: object) -> bool:
    return isinstance(outcome, TierUnavailableError)


def _failed(indices: Sequence[int], outcomes: Sequence[TierError | None]) -> dict[int, TierError]:
    return {i: error for i, error in zip(indices, outcomes, strict=True) if error is not None}
