"""What an actor gives its tier to work with, and where that says what it has and has not.

Thread: loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvoffload_async.abc.events import (
    AnnouncementRefused,
    BlocksAppeared,
    BlocksEvicted,
    TierEvent,
)
from kvoffload_async.abc.tier import IoRunner, KVIdentity
from kvoffload_async.tables.keymap import LEAST_KEY_BYTES, KeyMap
from kvoffload_async.tiers._announcements import Announcements
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

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
