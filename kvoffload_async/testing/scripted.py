"""Fakes that park every call: the test decides in which order calls end, and how.

A parked call is like a copy in flight: cancelling its task does not end it. What a test does not
settle hangs, and may still be settled much later.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import (
    AsyncTier,
    Direction,
    TierBounds,
    TierCapabilities,
    TierEnvironment,
)
from kvoffload_async.errors import BlockMissingError, StateError, TierClosedError, TierError
from kvoffload_async.types import JobMetadata, OffloadKey
from kvoffload_async.waiting import until_done

T = TypeVar("T")


class InlineIo:
    """An `IoRunner` that runs every call at once, on the loop's thread."""

    async def run(self, direction: Direction, call: Callable[[], T], **_options: object) -> T:
        """See `IoRunner.run`; nobody helps."""
        await asyncio.sleep(0)
        return call()


@dataclass(slots=True, eq=False)
class ParkedCall:
    """A blocking call that waits for the test."""

    direction: Direction
    call: Callable[[], Any]
    future: asyncio.Future[Any] = field(repr=False)


class ScriptedIo:
    """An `IoRunner` that parks every call until the test settles it.

    Attributes:
        parked: The calls that wait, oldest first.
    """

    def __init__(self) -> None:
        """Start with nothing parked."""
        self.parked: list[ParkedCall] = []

    async def run(self, direction: Direction, call: Callable[[], T], **_options: object) -> T:
        """See `IoRunner.run`; nobody helps."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.parked.append(ParkedCall(direction, call, future))
        return await until_done(future)

    def settle(
        self, parked: ParkedCall, error: Exception | None = None, *, after_run: bool = False
    ) -> None:
        """End a parked call; its memory is touched now, or never.

        Args:
            parked: One of `self.parked`.
            error: Raise this instead of running the call.
            after_run: With `error`: run the call all the same, and raise then.
        """
        self.parked.remove(parked)
        if error is None or after_run:
            try:
                result = parked.call()
            except Exception as raised:  # noqa: BLE001 - it is the call's own outcome
                error = error or raised
        parked.call = _settled  # what it captured is let go of
        if error is None:
            parked.future.set_result(result)
        else:
            parked.future.set_exception(error)


def _settled() -> None:
    """Stands where a call was that has been settled."""


class Operation(enum.Enum):
    """What a scripted tier was asked to do."""

    STORE = enum.auto()
    LOAD = enum.auto()
    CONTAINS = enum.auto()
    CLOSE = enum.auto()


@dataclass(slots=True, eq=False)
class ParkedOperation:
    """An operation of a tier that waits for the test.

    Attributes:
        kind: Which one.
        keys: Its blocks.
        job: Its job, for a store or load.
        task: The task that performs it, for a test to cancel.
        landed: Indices of the blocks whose bytes have moved already; see `ScriptedTier.land`.
    """

    kind: Operation
    keys: tuple[OffloadKey, ...]
    job: JobMetadata | None
    task: asyncio.Task[Any] = field(repr=False)
    future: asyncio.Future[Mapping[int, TierError]] = field(repr=False)
    landed: set[int] = field(default_factory=set)


class ScriptedTier(AsyncTier):
    """A tier with real bytes whose every operation parks until the test settles it.

    Bytes move when an operation is settled, and not before: a slot that was given away too early
    shows up as wrong bytes.

    Attributes:
        blocks: The contents.
        parked: The operations that wait, oldest first.
        is_open: Between `open` and `close`.
        close_count: How often `close` was called.
        touched: What `touch` was told.
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
        """Start empty.

        Args:
            capabilities: By default those of an exclusive tier.
            bounds: By default those of any tier.
            open_error: `open` raises this.
            close_error: `close` raises this.
            parks_close: Whether `close` parks, too.
        """
        self.capabilities = capabilities or TierCapabilities(exclusive=True)
        self.bounds = bounds or TierBounds()
        self.blocks: dict[OffloadKey, npt.NDArray[np.uint8]] = {}
        self.parked: list[ParkedOperation] = []
        self.is_open = False
        self.close_count = 0
        self.touched: list[OffloadKey] = []
        self._open_error = open_error
        self._close_error = close_error
        self._parks_close = parks_close
        self._env: TierEnvironment | None = None

    @property
    def env(self) -> TierEnvironment:
        """What the tier was given at its opening."""
        if self._env is None:
            raise TierClosedError("the scripted tier is not open")
        return self._env

    async def open(self, env: TierEnvironment) -> None:
        """Open at once."""
        if self._open_error is not None:
            raise self._open_error
        self._env = env
        self.is_open = True

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Park; then tell the truth."""
        await self._park(Operation.CONTAINS, tuple(keys), None)
        return frozenset(key for key in keys if key in self.blocks)

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Park; then the settled outcome. Blocks that are there although it fails are announced."""
        try:
            return await self._park(Operation.STORE, job.keys, job)
        except BaseException:
            self.env.blocks_appeared([key for key in job.keys if key in self.blocks])
            raise

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Park; then the settled outcome."""
        return await self._park(Operation.LOAD, job.keys, job)

    async def close(self) -> None:
        """Close at once, unless `parks_close`."""
        self.close_count += 1
        if self._parks_close:
            await self._park(Operation.CLOSE, (), None)
        self._env = None
        self.is_open = False
        if self._close_error is not None:
            raise self._close_error

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note it."""
        self.touched.extend(keys)

    def settle(
        self,
        parked: ParkedOperation,
        failures: Mapping[int, TierError] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """End a parked operation.

        Args:
            parked: One of `self.parked`.
            failures: Blocks that fail, by index in the job; the bytes of the others move.
            error: Raise this; no bytes move. A CancelledError cancels the operation's task.
        """
        self.parked.remove(parked)
        if isinstance(error, asyncio.CancelledError):
            parked.task.cancel()
            parked.future.set_result({})
        elif error is not None:
            parked.future.set_exception(error)
        elif parked.job is None:
            parked.future.set_result({})
        else:
            parked.future.set_result(self._move(parked, parked.job, dict(failures or {})))

    def land(self, parked: ParkedOperation, index: int) -> None:
        """Move one block of a parked store now, before the others."""
        if parked.job is None or parked.kind is not Operation.STORE:
            raise StateError(f"{parked.kind.name} has no block to land")
        parked.landed.add(index)
        row = np.asarray(self.env.kv_view)[parked.job.block_ids[index]]
        self.blocks.setdefault(parked.keys[index], row.copy())

    def evict(self, keys: Sequence[OffloadKey]) -> None:
        """Drop blocks, and announce that."""
        for key in keys:
            del self.blocks[key]
        self.env.blocks_evicted(keys)

    def settle_all(self) -> None:
        """End everything that is parked now, well, oldest first."""
        for parked in list(self.parked):
            self.settle(parked)

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
                failures[index] = BlockMissingError(f"block {key.hex()} is not here")
        return failures

    async def _park(
        self, kind: Operation, keys: tuple[OffloadKey, ...], job: JobMetadata | None
    ) -> Mapping[int, TierError]:
        if kind is not Operation.CLOSE and not self.is_open:
            raise StateError(f"{kind.name} came while the tier was not open")
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        future = asyncio.get_running_loop().create_future()
        self.parked.append(ParkedOperation(kind, keys, job, task, future))
        return await until_done(future)
