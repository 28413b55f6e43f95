"""A tier with real bytes, whose operations the test finishes one by one.

A parked operation behaves like a copy in flight: cancelling its task does not end it.
"""

import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import AsyncTier, TierBounds, TierCapabilities, TierEnvironment
from kvoffload_async.errors import BlockMissingError, StateError, TierClosedError, TierError
from kvoffload_async.types import JobMetadata, OffloadKey, block_text
from kvoffload_async.waiting import until_done


class Operation(enum.Enum):
    """Operations of a scripted tier."""

    STORE = enum.auto()
    LOAD = enum.auto()
    CONTAINS = enum.auto()
    DELETE = enum.auto()
    LIST = enum.auto()
    CLOSE = enum.auto()


@dataclass(slots=True, eq=False)
class ParkedOperation:
    """An operation of a tier that waits to be finished by the test.

    Attributes:
        kind: The operation.
        keys: Its blocks.
        job: Its job, for a store or load.
        task: The task that runs it, so that a test can cancel it.
        landed: Indices of the blocks already moved; see `ScriptedTier.land`.
    """

    kind: Operation
    keys: tuple[OffloadKey, ...]
    job: JobMetadata | None
    task: asyncio.Task[Any] = field(repr=False)
    future: asyncio.Future[Mapping[int, TierError]] = field(repr=False)
    landed: set[int] = field(default_factory=set)


class ScriptedTier(AsyncTier):
    """A tier with real bytes that parks every operation until the test finishes it.

    Bytes move only when an operation is finished, so a slot that was reused too early shows up as
    wrong bytes.

    Attributes:
        blocks: The stored content.
        parked: Parked operations, oldest first.
        is_open: True between `open` and `close`.
        close_count: Number of calls of `close`.
        touched: Keys passed to `touch`.
        page: Maximum number of keys of a listing's page.
    """

    def __init__(
        self,
        capabilities: TierCapabilities | None = None,
        bounds: TierBounds | None = None,
        *,
        open_error: Exception | None = None,
        close_error: Exception | None = None,
        parks_close: bool = False,
    ) -> None:
        """Create an empty tier.

        Args:
            capabilities: Default: an exclusive tier's.
            bounds: Default: `TierBounds()`.
            open_error: Raised by `open`.
            close_error: Raised by `close`.
            parks_close: Whether `close` parks, too.
        """
        self.capabilities = capabilities or TierCapabilities(exclusive=True)
        self.bounds = bounds or TierBounds()
        self.blocks: dict[OffloadKey, npt.NDArray[np.uint8]] = {}
        self.parked: list[ParkedOperation] = []
        self.is_open = False
        self.close_count = 0
        self.page = 2
        self.touched: list[OffloadKey] = []
        self._open_error = open_error
        self._close_error = close_error
        self._parks_close = parks_close
        self._env: TierEnvironment | None = None

    @property
    def env(self) -> TierEnvironment:
        """The environment passed to `open`."""
        if self._env is None:
            raise TierClosedError("the scripted tier is not open")
        return self._env

    async def open(self, env: TierEnvironment) -> None:
        """Open without parking."""
        if self._open_error is not None:
            raise self._open_error
        self._env = env
        self.is_open = True

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Park; then return the keys that are stored."""
        await self._park(Operation.CONTAINS, tuple(keys), None)
        return frozenset(key for key in keys if key in self.blocks)

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Park; then return the outcome. Blocks stored despite a failure are announced."""
        try:
            return await self._park(Operation.STORE, job.keys, job)
        except BaseException:
            self.env.blocks_appeared([key for key in job.keys if key in self.blocks])
            raise

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Park; then return the outcome."""
        return await self._park(Operation.LOAD, job.keys, job)

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Park; then return the outcome. The other blocks are removed."""
        failures = await self._park(Operation.DELETE, tuple(keys), None)
        for index, key in enumerate(keys):
            if index not in failures:
                self.blocks.pop(key, None)
        return failures

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Park; then return the next keys, at most `page`."""
        await self._park(Operation.LIST, (), None)
        after = bytes.fromhex(cursor or "")
        keys = sorted(key for key in self.blocks if key > after)
        page = min(count, self.page)
        return keys[:page], keys[page - 1].hex() if len(keys) > page else None

    async def close(self) -> None:
        """Close without parking, unless `parks_close`."""
        self.close_count += 1
        if self._parks_close:
            await self._park(Operation.CLOSE, (), None)
        self._env = None
        self.is_open = False
        if self._close_error is not None:
            raise self._close_error

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record the keys."""
        self.touched.extend(keys)

    def finish(
        self,
        parked: ParkedOperation,
        failures: Mapping[int, TierError] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Finish a parked operation.

        Args:
            parked: An element of `self.parked`.
            failures: Errors by block index; the other blocks' bytes move.
            error: Raise this, and move no bytes. A CancelledError cancels the operation's task.
        """
        self.parked.remove(parked)
        if isinstance(error, asyncio.CancelledError):
            parked.task.cancel()
            parked.future.set_result({})
        elif error is not None:
            parked.future.set_exception(error)
        elif parked.job is None:
            parked.future.set_result(dict(failures or {}))
        else:
            parked.future.set_result(self._move(parked, parked.job, dict(failures or {})))

    def land(self, parked: ParkedOperation, index: int) -> None:
        """Move one block of a parked store now, before it is finished."""
        if parked.job is None or parked.kind is not Operation.STORE:
            raise StateError(f"{parked.kind.name} has no block to land")
        parked.landed.add(index)
        row = np.asarray(self.env.kv_view)[parked.job.block_ids[index]]
        self.blocks.setdefault(parked.keys[index], row.copy())

    def evict(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks and announce their eviction."""
        for key in keys:
            del self.blocks[key]
        self.env.blocks_evicted(keys)

    def finish_all(self) -> None:
        """Finish all parked operations successfully, oldest first."""
        for parked in list(self.parked):
            self.finish(parked)

    def _move(
        self, parked: ParkedOperation, job: JobMetadata, failures: dict[int, TierError]
    ) -> dict[int, TierError]:
        rows = np.asarray(self.env.kv_view)
        for index, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            if index in failures or index in parked.landed:
                continue
            if parked.kind is Operation.STORE:
                self.blocks.setdefault(key, rows[slot].copy())
            elif key in self.blocks:
                rows[slot] = self.blocks[key]
            else:
                failures[index] = BlockMissingError(f"{block_text(key)} is not here")
        return failures

    async def _park(
        self, kind: Operation, keys: tuple[OffloadKey, ...], job: JobMetadata | None
    ) -> Mapping[int, TierError]:
        if kind is not Operation.CLOSE and not self.is_open:
            raise StateError(f"{kind.name} was called while the tier was not open")
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        future = asyncio.get_running_loop().create_future()
        self.parked.append(ParkedOperation(kind, keys, job, task, future))
        return await until_done(future)
