"""The `mooncake` tier."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Final, NamedTuple

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
    TierFullError,
    TierUnavailableError,
    Trouble,
    drop_tracebacks,
)
from kvoffload_async.tiers.mooncake.cells import HEAD_BYTES
from kvoffload_async.tiers.mooncake.process import (
    MOST_NAMES,
    Helper,
    HelperSupervisor,
    MooncakeSettings,
)
from kvoffload_async.tiers.remote.calls import run_together
from kvoffload_async.tiers.remote.client import Bytes, Envelopes
from kvoffload_async.tiers.remote.settings import REMEDIES
from kvoffload_async.types import JobMetadata, Locality, OffloadKey, block_text

_NO_HANDLE: Final = -200
_NOT_FOUND: Final = -704

Portion = Sequence[int]
"""Indices of blocks of a job, at most one per cell in a part of the helper's memory."""

Outcomes = dict[int, TierError]
"""Index of a failed block in the job -> its error."""


@dataclass(slots=True)
class MooncakeCounters:
    """Counters of a `mooncake` tier.

    Attributes:
        requests: Calls started.
        failed: Calls that failed as a whole.
        probed_keys: Keys looked up in the store.
        read_again: Blocks read again because verification failed.
        corrupt: Blocks that failed verification twice.
        removed: Corrupt blocks that were removed.
    """

    requests: int = 0
    failed: int = 0
    probed_keys: int = 0
    read_again: int = 0
    corrupt: int = 0
    removed: int = 0


class _Part(NamedTuple):
    """Some blocks of a job, with a cell of the helper's memory for each.

    Attributes:
        indices: Their indices in the job.
        first: The first cell.
    """

    helper: Helper
    job: JobMetadata
    indices: Portion
    first: int


class MooncakeTier(AsyncTier):
    """Blocks in a Mooncake Store, which pools memory of its clients.

    The client library runs in a helper process, which can access only a bounce buffer. Blocks are
    copied through the buffer, and verified in their destination. The store has its own capacity
    and eviction. A block for which it has no room is not stored.
    """

    declares = MooncakeSettings
    requires: ClassVar = {"mooncake": "install kvoffload-async[mooncake]"}
    remedies: ClassVar = {
        **REMEDIES,
        CorruptBlockError: "not served; if this recurs, check the memory of the store's clients",
        TierFullError: "no blocks are stored until there is space: raise segment_bytes on the "
        "hosts of the store",
        Trouble.TOO_SLOW: "raise cpu_bytes_to_use, set write_back to wait, or make the tier "
        "faster: raise buffer_bytes",
    }
    capabilities = TierCapabilities(exclusive=False, locality=Locality.REMOTE, deletes=True)
    bounds = TierBounds(concurrent_blocks=64)

    def __init__(self, settings: MooncakeSettings) -> None:
        """Configure the tier; the store is joined in `open`."""
        self._settings = settings
        self._counters = MooncakeCounters()
        self._supervisor: HelperSupervisor | None = None
        self._env: TierEnvironment | None = None

    async def open(self, env: TierEnvironment) -> None:
        """Start the helper and join the store.

        Raises:
            ConfigError: The library cannot be loaded, or the buffer not registered.
            TierUnavailableError: The master cannot be reached.
        """
        row_bytes = env.kv_view.nbytes // len(env.kv_view)
        settings = self._settings
        self._envelopes = Envelopes(
            env.identity.digest, row_bytes, settings.integrity_key, settings.encryption_keys
        )
        self._supervisor = HelperSupervisor(settings, row_bytes, env.io)
        await self._supervisor.open()
        self._env = env

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the stored keys; makes one call per few thousand keys."""
        helper = self._helper()
        self._counters.probed_keys += len(keys)
        found: set[OffloadKey] = set()
        for first in range(0, len(keys), MOST_NAMES):
            some = keys[first : first + MOST_NAMES]
            answers = await self._counted(helper.ask("exist", self._names(some)))
            if min(answers) < 0:
                self._counters.failed += 1
                raise TierUnavailableError(f"mooncake: the store returned status {min(answers)}")
            found.update(key for key, answer in zip(some, answers, strict=True) if answer == 1)
        return frozenset(found)

    async def store(self, job: JobMetadata) -> BlockFailures:
        return await self._run_job(job, self._store_part, lambda helper: helper.stores)

    async def load(self, job: JobMetadata) -> BlockFailures:
        return await self._run_job(job, self._load_part, lambda helper: helper.loads)

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Remove blocks from the store; a block that another client just reads may stay."""
        helper = self._helper()
        failures: Outcomes = {}
        for first in range(0, len(keys), MOST_NAMES):
            some = keys[first : first + MOST_NAMES]
            answers = await self._counted(helper.ask("remove", self._names(some)))
            failures |= {
                index: _error_of(status, keys[index])
                for index, status in enumerate(answers, first)
                if status not in {0, _NOT_FOUND}
            }
        return failures

    async def close(self) -> None:
        """Leave the store; blocks stored only in the helper's memory are lost."""
        self._env = None
        if self._supervisor is not None:
            await self._supervisor.close()

    def gauges(self) -> Mapping[str, float]:
        supervisor = self._supervisor
        helpers = {
            "helper_starts": supervisor.starts if supervisor else 0,
            "helper_ends": supervisor.ends if supervisor else 0,
        }
        return asdict(self._counters) | helpers

    def describe(self) -> str:
        return f"mooncake at {self._settings.master}"

    # -- internal -------------------------------------------------------------------------------

    async def _run_job(
        self,
        job: JobMetadata,
        run_part: Callable[[_Part], Awaitable[Outcomes]],
        parts_of: Callable[[Helper], asyncio.Queue[int]],
    ) -> BlockFailures:
        """Run a job in portions; an error of the store or helper fails the whole job."""
        helper = self._helper()
        failures: Outcomes = {
            i: TierError(f"{block_text(key)}: the key is too long for this tier")
            for i, key in enumerate(job.keys)
            if self._envelopes.header_bytes(key) > HEAD_BYTES
        }
        faults: list[TierError] = []
        parts = parts_of(helper)

        async def run(portion: Portion) -> None:
            first = await parts.get()
            try:
                if not faults:
                    failures.update(await run_part(_Part(helper, job, portion, first)))
            except TierError as error:
                drop_tracebacks(error)  # their frames hold the rows
                faults.append(error)
            finally:
                parts.put_nowait(first)

        indices = [i for i in range(len(job.keys)) if i not in failures]
        step = helper.cells.geometry.blocks
        portions = [indices[at : at + step] for at in range(0, len(indices), step)]
        await run_together(map(run, portions), f"mooncake:{job.job_id}")
        if faults:
            raise faults.pop(0)  # popped, to avoid a reference cycle with this frame
        return failures

    async def _store_part(self, part: _Part) -> Outcomes:
        def copy_in() -> None:
            for _, key, row, value in self._blocks(part):
                self._envelopes.wrap(key, row, value)

        await self._opened().io.run(Direction.STORE, copy_in)
        return await self._move(part, "put")

    async def _load_part(self, part: _Part) -> Outcomes:
        failures = await self._read(part)
        if not (corrupt := _corrupt(failures)):
            return failures
        self._counters.read_again += len(corrupt)  # perhaps damaged in transit
        again = await self._read(part._replace(indices=corrupt))
        failures = {i: e for i, e in failures.items() if i not in corrupt} | again
        corrupt = _corrupt(again)
        self._counters.corrupt += len(corrupt)
        if corrupt:  # a present block would never be overwritten
            names = self._names(part.job.keys[i] for i in corrupt)
            answers = await self._counted(part.helper.ask("remove", names))
            self._counters.removed += answers.count(0)
        return failures

    async def _read(self, part: _Part) -> Outcomes:
        """Read blocks into their slots; return the errors of missing and corrupt blocks."""
        failures = await self._move(part, "get")

        def copy_out() -> None:
            for i, key, row, value in self._blocks(part):
                if i not in failures:
                    error = self._envelopes.unwrap(key, value.data, row)
                    if error is not None:
                        failures[i] = error

        await self._opened().io.run(Direction.LOAD, copy_out)
        return failures

    async def _move(self, part: _Part, call: str) -> Outcomes:
        """Put or get the values in a part's cells; return the errors of failed blocks.

        Raises:
            TierUnavailableError: All of them failed.
        """
        keys, cells = [part.job.keys[i] for i in part.indices], part.helper.cells
        head = self._envelopes.header_bytes
        at = [cells.at(cell, head(key)) for cell, key in enumerate(keys, part.first)]
        sizes = list(map(self._envelopes.value_bytes, keys))
        statuses = await self._counted(part.helper.move(call, self._names(keys), at, sizes))
        failures = {
            i: _error_of(status, key)
            for i, key, status in zip(part.indices, keys, statuses, strict=True)
            if status < 0
        }
        faults = [e for e in failures.values() if isinstance(e, TierUnavailableError)]
        if len(faults) == len(part.indices):
            self._counters.failed += 1
            raise faults[0]
        return failures

    def _blocks(self, part: _Part) -> Iterator[tuple[int, OffloadKey, Bytes, Bytes]]:
        """Yield each block's index in the job, its key, its row, and the memory of its value."""
        rows = np.asarray(self._opened().kv_view)
        for cell, i in enumerate(part.indices, part.first):
            key, row = part.job.keys[i], rows[part.job.block_ids[i]]
            yield i, key, row, part.helper.cells.value(cell, self._envelopes.header_bytes(key))

    async def _counted(self, call: Awaitable[list[int]]) -> list[int]:
        self._counters.requests += 1
        try:
            return await call
        except TierError:
            self._counters.failed += 1
            raise

    def _names(self, keys: Iterable[OffloadKey]) -> list[str]:
        return [f"kvo:{self._envelopes.namespace}:{key.hex()}" for key in keys]

    def _opened(self) -> TierEnvironment:
        if self._env is None:
            raise TierClosedError(f"{self.describe()} is not open")
        return self._env

    def _helper(self) -> Helper:
        if self._env is None or self._supervisor is None:
            raise TierClosedError(f"{self.describe()} is not open")
        return self._supervisor.helper()


def _corrupt(failures: Outcomes) -> list[int]:
    return [i for i, error in failures.items() if isinstance(error, CorruptBlockError)]


def _error_of(status: int, key: OffloadKey) -> TierError:
    if status == _NOT_FOUND:
        return BlockMissingError(f"{block_text(key)} is not stored")
    if status == _NO_HANDLE:
        return TierFullError("the store is full")
    return TierUnavailableError(f"mooncake: the store returned status {status}")
