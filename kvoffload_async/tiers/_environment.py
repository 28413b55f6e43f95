"""What an actor gives its tier to work with, and what the tier tells its actor.

A job says only at its end what it did to its blocks, while a tier announces an eviction when it
happens. So what a job's end says of a block is out of date if something was said of the block since
the job began: a block that a store has written, and that made room for others before the store has
ended, is gone; and one that a load has missed may have been stored since. Whether a block was
evicted before or after it was written is known to the tier alone: see `Reconciler`.

Thread: the loop's.
"""

from __future__ import annotations

import asyncio
import logging
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
from kvoffload_async.types import OffloadKey

ENDS_LOOP = (SystemExit, KeyboardInterrupt)
"""What asyncio does not keep in the task that raises it."""
logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def guarded(operation: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await an operation of a tier; one that would end the loop only fails itself."""
    try:
        return await operation(*args, **kwargs)
    except ENDS_LOOP as error:
        raise as_guarded(error) from error


def as_guarded(error: BaseException) -> TierUnavailableError:
    """Return what stands in for an exit that a tier has asked for."""
    return TierUnavailableError(f"a tier raised {text_of(error)}")


def log_trace(error: BaseException) -> None:
    """Log where an error came from, for whoever looks for a defect: before its frames are dropped.

    As text, as logs may be kept.
    """
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", "".join(traceback.format_exception(error)))


def error_of(task: asyncio.Task[Any]) -> TierError:
    """Return why the task of a job or a probe has failed, in the vocabulary of its owner."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return JobCancelledError("its task was cancelled")
    if isinstance(error, TierError):
        return error
    failure = TierUnavailableError(text_of(error))
    failure.__cause__ = error
    return failure


def validate_result(failures: object, num_blocks: int) -> tuple[BlockFailures, TierError | None]:
    """Return what a tier has returned of a job, or that it has broken its contract."""
    if isinstance(failures, Mapping) and all(
        isinstance(i, int) and 0 <= i < num_blocks and isinstance(e, TierError)
        for i, e in failures.items()
    ):
        return dict(failures), None
    return {}, TierUnavailableError(f"the tier broke its contract: it returned {failures!r}")


_BOUND: Final = 16_384


@dataclass(slots=True, eq=False)
class Watch:
    """What has been said of some blocks since a call of the tier about them began.

    Attributes:
        keys: The blocks.
        heeds_stores: Whether the end of a store says something.
        begun_at: The number of the last thing said before.
        outdated: Blocks of which something was said since, as far as was looked.
    """

    keys: Sequence[OffloadKey]
    heeds_stores: bool
    begun_at: int
    outdated: set[OffloadKey] = field(default_factory=set)


class Announcements:
    """What was said since the oldest watch began.

    A watch costs nothing a block unless something was announced in the meantime. A bound on what is
    kept holds however long a call hangs: beyond it, each watch is given what concerns it.

    Attributes:
        refused_keys: How many keys were announced that are none.
    """

    def __init__(self, bound: int = _BOUND) -> None:
        """Keep what is said of about so many blocks, besides those that are watched."""
        self.refused_keys = 0
        self._bound = bound
        self._watches: dict[Watch, None] = {}
        self._heeding_stores = 0
        self._number = 0
        self._announced: dict[OffloadKey, int] = {}
        """Block -> the number of the last announcement about it."""
        self._stored: list[tuple[int, Sequence[OffloadKey]]] = []
        """What stores have ended with, numbered as announcements are."""
        self._stored_blocks = 0

    def begin(self, keys: Sequence[OffloadKey], *, heeds_stores: bool) -> Watch:
        """Watch blocks, which the tier is about to look at for the first time."""
        watch = Watch(keys, heeds_stores, self._number)
        self._watches[watch] = None
        self._heeding_stores += heeds_stores
        return watch

    def note(self, keys: Collection[OffloadKey]) -> None:
        """Note that a tier says something of its own accord; what it is does not matter."""
        if self._watches:
            self._number += 1
            self._announced.update(dict.fromkeys(keys, self._number))
            self._keep_bound()

    def note_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Note that a store has ended, and that these blocks are there."""
        if self._heeding_stores:
            self._number += 1
            self._stored.append((self._number, keys))
            self._stored_blocks += len(keys)
            self._keep_bound()

    def end(self, watch: Watch, *, looks: bool = True) -> frozenset[OffloadKey]:
        """Stop watching blocks; return those of which something was said since the beginning.

        Args:
            watch: What began.
            looks: Whether that is of interest; else nothing is returned.
        """
        del self._watches[watch]
        self._heeding_stores -= watch.heeds_stores
        if looks:
            self._look(watch)
        if not self._watches:
            self._forget()
        return frozenset(watch.outdated) if looks else frozenset()

    def _look(self, watch: Watch) -> None:
        """Take what was said of watched blocks over to their watch."""
        keys, begun_at, announced = watch.keys, watch.begun_at, self._announced
        if announced and not announced.keys().isdisjoint(keys):
            watch.outdated.update(key for key in keys if announced.get(key, 0) > begun_at)
        if watch.heeds_stores and self._stored and self._stored[-1][0] > begun_at:
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

    def blocks_appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Post the news to the owner: a `KeyMap`, which is the owner's from now on, as it is."""
        if isinstance(keys, KeyMap):
            self.announcements.note(keys)
            self.post(BlocksAppeared(keys))
            return
        for portion in self._portions(keys):
            self.post(BlocksAppeared(portion))

    def blocks_evicted(self, keys: Iterable[OffloadKey]) -> None:
        """Post the news to the owner."""
        for portion in self._portions(keys):
            self.post(BlocksEvicted(portion))

    def _portions(self, keys: Iterable[OffloadKey]) -> Iterator[tuple[OffloadKey, ...]]:
        """Yield the keys in portions, so that the owner can take them in step by step.

        What is no key is refused here: in the owner's tables it would raise.
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
        if not self.announcements.refused_keys:  # once: a tier may do so for every block
            logger.error(
                "a tier announced %r, which is no key: it needs a block hash and 4 bytes behind "
                "it; this and what else it announces so is ignored, and counted",
                keys[0],
            )
        self.announcements.refused_keys += len(keys)
        self.post(AnnouncementRefused(len(keys)))


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and len(key) >= LEAST_KEY_BYTES


def _are_keys(portion: tuple[OffloadKey, ...]) -> bool:
    """Tell whether all of them certainly are keys; faster than to look at each."""
    return set(map(type, portion)) == {bytes} and min(map(len, portion)) >= LEAST_KEY_BYTES
