"""A tier's environment, and the ordering of its announcements against job results.

A job reports its effect on blocks only at its end, while a tier announces an eviction at once. So a
job's result for a block is outdated if there was an announcement about the block since the job
began: a block written by a store may have been evicted before the store ended, and a block missed
by a load may have been stored since. Only the tier knows whether a block was evicted before or
after it was written: see `Reconciler`.

Not thread-safe; call only from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, ParamSpec, TypeVar

from kvoffload_async.abc.events import (
    AnnouncementRefused,
    BlockFailures,
    BlocksAppeared,
    BlocksEvicted,
    TierEvent,
)
from kvoffload_async.abc.tier import IoRunner, KVIdentity
from kvoffload_async.errors import JobCancelledError, TierError, TierUnavailableError, text_of
from kvoffload_async.tables.keymap import LEAST_KEY_BYTES, KeyMap
from kvoffload_async.types import JobId, OffloadKey

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def guarded(operation: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await a tier's operation; convert exceptions that would end the loop."""
    try:
        return await operation(*args, **kwargs)
    except (SystemExit, KeyboardInterrupt) as error:  # asyncio raises them out of the loop
        raise TierUnavailableError(f"a tier raised {text_of(error)}") from error


def log_trace(error: BaseException) -> None:
    """Log an error's traceback for debugging, before its frames are dropped.

    Formatted as text, because log records may be kept.
    """
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", "".join(traceback.format_exception(error)))


def error_of(task: asyncio.Task[Any]) -> TierError:
    """Return the error of a job's or probe's failed task as a `TierError`."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return JobCancelledError("its task was cancelled")
    if isinstance(error, TierError):
        return error
    failure = TierUnavailableError(text_of(error))
    failure.__cause__ = error
    return failure


def validate_result(failures: object, num_blocks: int) -> tuple[BlockFailures, TierError | None]:
    """Return a tier's result for a job, or an error if it violates the contract."""
    if isinstance(failures, Mapping) and (
        not failures
        or all(
            isinstance(i, int) and 0 <= i < num_blocks and isinstance(e, TierError)
            for i, e in failures.items()
        )
    ):
        return dict(failures), None
    return {}, TierUnavailableError(f"the tier broke its contract: it returned {failures!r}")


_BOUND: Final = 16_384


@dataclass(slots=True, eq=False)
class Watch:
    """Announcements about some blocks since a tier call on them began.

    Attributes:
        keys: The blocks.
        includes_stores: Whether results of stores count as announcements.
        begun_at: Number of the last announcement before the call.
        outdated: Blocks with a later announcement, as far as already evaluated.
    """

    keys: Sequence[OffloadKey]
    includes_stores: bool
    begun_at: int
    outdated: set[OffloadKey] = field(default_factory=set)


class Announcements:
    """Records which blocks a tier has announced since the oldest watch began.

    A watch has no cost per block unless there are announcements meanwhile. Memory is limited even
    if a call hangs: at the limit, the announcements are evaluated for each watch and dropped.

    Attributes:
        refused_keys: Number of malformed keys announced.
    """

    def __init__(self, bound: int = _BOUND) -> None:
        """Keep announcements for about `bound` blocks."""
        self.refused_keys = 0
        self._bound = bound
        self._watches: dict[Watch, None] = {}
        self._including_stores = 0
        self._number = 0
        self._announced: dict[OffloadKey, int] = {}
        """Block -> number of the last announcement about it."""
        self._stored: list[tuple[int, Sequence[OffloadKey]]] = []
        """Results of stores, numbered like announcements."""
        self._stored_blocks = 0

    def begin(self, keys: Sequence[OffloadKey], *, includes_stores: bool) -> Watch:
        """Start watching blocks for announcements, before the tier is called."""
        watch = Watch(keys, includes_stores, self._number)
        self._watches[watch] = None
        self._including_stores += includes_stores
        return watch

    def note(self, keys: Collection[OffloadKey]) -> None:
        """Record that the tier has announced blocks, whether as stored or as evicted."""
        if self._watches:
            self._number += 1
            self._announced.update(dict.fromkeys(keys, self._number))
            self._keep_bound()

    def note_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Record that a store has ended and these blocks are stored."""
        if self._including_stores:
            self._number += 1
            self._stored.append((self._number, keys))
            self._stored_blocks += len(keys)
            self._keep_bound()

    def end(self, watch: Watch, *, looks: bool = True) -> frozenset[OffloadKey]:
        """Stop watching blocks; return those announced since the watch began.

        Args:
            watch: The watch to end.
            looks: Whether the result is needed; else it is empty.
        """
        del self._watches[watch]
        self._including_stores -= watch.includes_stores
        if self._announced or self._stored:
            if looks:
                self._look(watch)
            if not self._watches:
                self._forget()
        return frozenset(watch.outdated) if looks else frozenset()

    def _look(self, watch: Watch) -> None:
        """Evaluate the announcements for a watch."""
        keys, begun_at, announced = watch.keys, watch.begun_at, self._announced
        if announced and not announced.keys().isdisjoint(keys):
            watch.outdated.update(key for key in keys if announced.get(key, 0) > begun_at)
        if watch.includes_stores and self._stored and self._stored[-1][0] > begun_at:
            own = set(keys)
            for number, stored in self._stored:
                if number > begun_at:
                    watch.outdated |= own.intersection(stored)

    def _keep_bound(self) -> None:
        if len(self._announced) + self._stored_blocks > self._bound:
            for watch in self._watches:
                self._look(watch)
            self._forget()

    def _forget(self) -> None:
        self._announced.clear()
        self._stored.clear()
        self._stored_blocks = 0


Post = Callable[[TierEvent], None]

_PORTION_KEYS: Final = 1024


@dataclass(frozen=True, slots=True)
class ActorEnvironment:
    """The `TierEnvironment` that an actor gives its tier."""

    kv_view: memoryview
    io: IoRunner
    post: Post
    identity: KVIdentity = field(default_factory=KVIdentity)
    announcements: Announcements = field(default_factory=Announcements)
    renew: Callable[[JobId, bool], float] = lambda _job_id, _has_moved: math.inf
    """Renews a job's deadline, and returns it; without an actor there is none."""

    def renew_deadline(self, job_id: JobId, *, has_moved: bool) -> float:
        """Renew the deadline of a running job; return it, in loop time."""
        return self.renew(job_id, has_moved)

    def blocks_appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Report blocks that appeared; ownership of a `KeyMap` passes to the tier's owner."""
        if isinstance(keys, KeyMap):
            self.announcements.note(keys)
            self.post(BlocksAppeared(keys))
            return
        for portion in self._portions(keys):
            self.post(BlocksAppeared(portion))

    def blocks_evicted(self, keys: Iterable[OffloadKey]) -> None:
        """Report evicted blocks to the tier's owner."""
        for portion in self._portions(keys):
            self.post(BlocksEvicted(portion))

    def _portions(self, keys: Iterable[OffloadKey]) -> Iterator[tuple[OffloadKey, ...]]:
        """Yield the keys in portions, which the owner processes step by step.

        Malformed keys are filtered out here, because they would raise in the owner's tables.
        """
        rest = iter(keys)
        while portion := tuple(islice(rest, _PORTION_KEYS)):
            usable = portion if _are_keys(portion) else tuple(filter(_is_key, portion))
            if len(usable) < len(portion):
                self._refuse([key for key in portion if not _is_key(key)])
            if usable:
                self.announcements.note(usable)
                yield usable

    def _refuse(self, keys: list[OffloadKey]) -> None:
        if not self.announcements.refused_keys:  # once, because a tier may do it for every block
            logger.error(
                "a tier announced the malformed key %r: a key is a block hash followed by 4 bytes; "
                "this and further malformed keys are ignored and counted",
                keys[0],
            )
        self.announcements.refused_keys += len(keys)
        self.post(AnnouncementRefused(len(keys)))


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and len(key) >= LEAST_KEY_BYTES


def _are_keys(portion: tuple[OffloadKey, ...]) -> bool:
    """Return whether all elements are certainly keys; faster than checking each."""
    return set(map(type, portion)) == {bytes} and min(map(len, portion)) >= LEAST_KEY_BYTES
