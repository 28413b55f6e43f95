"""The interface between a scheduler and a manager of offloaded blocks; cache generations.

The generation is part of each key, so blocks are found under the generation only under which they
were stored. After a change of weights, a new generation invalidates the blocks of all tiers,
persistent or not, without access to them. Old blocks are evicted like any others.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from kvoffload_async.config import parse_generation
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import StateError
from kvoffload_async.types import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    block_text,
    make_offload_key,
)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def primary_text(primary: Primary) -> str:
    """Return the usage of a primary as text."""
    return f"{primary.num_slots - primary.pool.unused.count:,} of {primary.num_slots:,} slots used"


def planner_text(planner: Planner) -> str:
    """Return a planner's state as text: primary usage, requests, jobs in flight, tiers."""
    counters = planner.counters
    jobs = counters.jobs_submitted - counters.job_results
    tiers = [
        tier.name
        if tier.health.loads.is_closed and tier.health.stores.is_closed
        else f"{tier.name} (suspended)"
        for tier in planner.tiers
    ]
    parts = [
        primary_text(planner.primary),
        counted(len(planner.requests), "request"),
        f"{counted(jobs, 'job')} in flight",
        tiers_text(tiers),
    ]
    return ", ".join(parts)


def tiers_text(names: Sequence[str]) -> str:
    """Return the tiers' names as text."""
    return f"tiers: {', '.join(names)}" if names else "no tiers"


_TAG_BYTES: Final = 8
_TAG: Final = slice(-5 - _TAG_BYTES, -5)  # before the last byte of the hash and the group


class Generation:
    """Creates and recognises the keys of one generation. Immutable.

    Attributes:
        label: The generation's label; None: keys have no generation, and every key is current.
        tag: Inserted before the last byte of each hash; empty without a label.
    """

    __slots__ = ("label", "tag")

    def __init__(self, label: int | str | None = None) -> None:
        """Check the label; raises ConfigError. An integer stands for the text of its digits."""
        self.label = None if label is None else parse_generation(label, "generation")
        text = b"" if self.label is None else self.label.encode()
        self.tag = hashlib.blake2b(text, digest_size=_TAG_BYTES).digest() if text else b""

    def key(self, block_hash: bytes, group_idx: int = 0) -> OffloadKey:
        """Return the key of a block, like `make_offload_key`, with the tag inserted in the hash.

        The hash's first and last bytes are unchanged, because key tables partition by them.
        """
        tagged = block_hash[:-1] + self.tag + block_hash[-1:] if self.tag else block_hash
        return make_offload_key(tagged, group_idx)

    def has(self, key: OffloadKey) -> bool:
        """Return whether a key belongs to this generation."""
        return not self.tag or key[_TAG] == self.tag

    def current(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that belong to this generation."""
        tag = self.tag
        return [key for key in keys if key[_TAG] == tag] if tag else keys

    def require(self, keys: Sequence[OffloadKey]) -> None:
        """Raise StateError for the first key of another generation."""
        for key in keys if self.tag else ():
            if not self.has(key):
                raise StateError(
                    f"{block_text(key)} is not of generation {self.label!r}: it was invalidated, "
                    "or its key was not made by the manager's `generation.key`"
                )


class OffloadingManager(ABC):
    """Tracks offloaded blocks on behalf of a scheduler.

    Only `reset_cache` and `shutdown` block. Misuse raises `StateError` at the call; a failed
    transfer never raises.

    Not thread-safe; call only from the owner's (the scheduler's) thread.

    Attributes:
        generation: Creates the blocks' keys. Read it once when a request begins, and use it for
            all keys of that request.
    """

    generation = Generation()

    @property
    @abstractmethod
    def room_made(self) -> int:
        """Number of times that a slot became free, evictable, or no longer withheld from stores.

        After a `prepare_store` that left blocks out, at most as many of them can be placed as this
        has grown since.
        """

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; call exactly once, before any other call for the request."""

    @abstractmethod
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool = False
    ) -> Sequence[LookupResult]:
        """Look blocks up; return the answers in key order. Pins nothing; may queue promotions.

        Args:
            keys: The keys. If there is room for some promotions only, the first ones get it.
            req_context: The request.
            stop_at_miss: Whether the answers end with the first MISS, as for a prefix: the keys
                behind it are not looked up.
        """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return the answer of `lookup_many` for one key."""
        return self.lookup_many((key,), req_context)[0]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> tuple[int, bool]:
        """Look a prompt's blocks up, first block first, up to the first one that is a MISS.

        Returns:
            How many blocks precede it, and whether to ask again in the next step, because some of
            them are on their way or undecided. If not, all of them are HIT.
        """
        # Most prompts are new: their first block alone decides.
        answers = [*self.lookup_many(keys[:1], req_context, stop_at_miss=True)]
        if answers and answers[0] is not LookupResult.MISS:
            answers += self.lookup_many(keys[1:], req_context, stop_at_miss=True)
        length = len(answers) - answers.count(LookupResult.MISS)
        return length, answers.count(LookupResult.HIT) < length

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin blocks that were HIT earlier in this step; return their slots, in key order."""

    @abstractmethod
    def complete_load(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        generation: int | None = None,
    ) -> None:
        """Release the pins of one `prepare_load`, whether or not the copy succeeded.

        Args:
            keys: The blocks.
            req_context: The request that called `prepare_load`.
            generation: `generation` of the spec returned by `prepare_load`; the call is ignored if
                a reset came in between. None: there was no reset, or the request has prepared no
                load of these blocks since.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the missing ones of `keys`; None if there is no room.

        With None, nothing is stored and nothing evicted. If only a prefix fits, it may be granted
        alone; offer the keys in `keys_left_out` again when `room_made` has grown. Never waits.

        Args:
            keys: Grouped by KV-cache group, in prompt order within each;
                `ReqContext.key_positions` relates the positions of the groups.
            req_context: The request. It is being computed, so it no longer waits for loads.
            is_last: Whether the request offers nothing again, as it has ended. Then blocks that
                tiers have still to store may be evicted for it; see `OffloadConfig.write_back`.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        generation: int | None = None,
    ) -> None:
        """Make stored blocks readable or, after a failed copy, drop them.

        Ready and unknown keys are ignored. For `generation` see `complete_load`.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Record a use of blocks, first block first; affects recency only."""

    @abstractmethod
    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request; call exactly once. Its transfers may end later."""

    @abstractmethod
    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a scheduler step; must be the step's last call. Submits deferred work."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Remove and return the events since the last call.

        Calling it is optional and has no effect on caching.
        """

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Return whether the scheduler must run steps even if it has no request to schedule."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Empty the primary, between steps; persistent tiers keep their blocks. May block."""

    @abstractmethod
    def on_reset_flushed(self) -> None:
        """Report that all copies that started before the reset have ended."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Shut everything down; idempotent. Blocks for about `timeout` seconds per tier at most."""
