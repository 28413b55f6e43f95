"""The contract between a scheduler and whatever manages its offloaded blocks; cache generations.

The generation is part of each key, so a change of weights needs no tier to be reopened, emptied or
even reached, and it holds for tiers that outlive the process: what was kept under a generation is
found again under that one alone. Blocks of former generations are evicted like any other block.
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
    make_offload_key,
)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def primary_text(primary: Primary) -> str:
    """Return how full a primary is."""
    return f"{primary.num_slots - primary.pool.free_count:,} of {primary.num_slots:,} slots used"


def planner_text(planner: Planner) -> str:
    """Return how full the primary is, what is under way, and which tiers are suspended."""
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
    """Return the names of the tiers."""
    return f"tiers: {', '.join(names)}" if names else "no tiers"


_TAG_BYTES: Final = 8
_TAG: Final = slice(-5 - _TAG_BYTES, -5)  # before the last byte of the hash and the group


class Generation:
    """Makes the keys of one generation, and tells them from others. Immutable.

    Attributes:
        label: Its label; None: blocks have no generation, and any key is taken for current.
        tag: What every key of it has before the last byte of the hash; empty without a label.
    """

    __slots__ = ("label", "tag")

    def __init__(self, label: int | str | None = None) -> None:
        """Raise ConfigError for what is no label; an integer is the label of its digits."""
        self.label = None if label is None else parse_generation(label, "generation")
        text = b"" if self.label is None else self.label.encode()
        self.tag = hashlib.blake2b(text, digest_size=_TAG_BYTES).digest() if text else b""

    def key(self, block_hash: bytes, group_idx: int = 0) -> OffloadKey:
        """Return the key of a block, as `make_offload_key` does; the hash has the tag in it.

        It keeps both its ends, by which tables of keys divide them.
        """
        tagged = block_hash[:-1] + self.tag + block_hash[-1:] if self.tag else block_hash
        return make_offload_key(tagged, group_idx)

    def has(self, key: OffloadKey) -> bool:
        """Tell whether a key is of this generation."""
        return not self.tag or key[_TAG] == self.tag

    def current(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of the keys that are of this generation."""
        tag = self.tag
        return [key for key in keys if key[_TAG] == tag] if tag else keys

    def require(self, keys: Sequence[OffloadKey]) -> None:
        """Raise StateError for the first key of another generation."""
        for key in keys if self.tag else ():
            if not self.has(key):
                raise StateError(
                    f"block {key.hex()} is not of generation {self.label!r}: it was invalidated, "
                    "or its key was not made by the manager's `generation.key`"
                )


class OffloadingManager(ABC):
    """Accounts for offloaded blocks on behalf of a scheduler.

    No method blocks but `reset_cache` and `shutdown`. Misuse raises `StateError` at the call; a
    failed transfer never raises.

    Thread: owner, the scheduler's, for all of it.

    Attributes:
        generation: Makes the keys of blocks; one that is read at a request's begin makes all its.
    """

    generation = Generation()

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; once, before anything else is said of it."""

    @abstractmethod
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool = False
    ) -> Sequence[LookupResult]:
        """Return what is known of blocks, in key order; pins nothing, may queue promotions.

        Args:
            keys: The keys; where there is room for a part of the promotions, the first ones get it.
            req_context: The request.
            stop_at_miss: Whether the answers end with the first MISS, as for a prefix: the keys
                behind it are not looked up.
        """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return the answer of `lookup_many` for one key."""
        return self.lookup_many((key,), req_context)[0]

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
        """Undo one `prepare_load`, whether or not the copy succeeded.

        Args:
            keys: The blocks.
            req_context: The request that prepared it.
            generation: That of the grant: nothing happens if a reset came in between. None: it did
                not, or the request has prepared no load of these blocks since.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the missing ones of `keys`; None if there is no room.

        With None nothing is stored and nothing evicted. If there is room for a head only, that may
        be granted: what `keys_left_out` names is to be offered again.

        Args:
            keys: Grouped by KV-cache group, head to tail in each; `ReqContext.key_positions` tells
                where those of several groups lie.
            req_context: The request, which is computed now: it waits for no loads any more.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        generation: int | None = None,
    ) -> None:
        """Make stored blocks readable or, after a failed copy, forget them.

        Keys that are ready already or unknown are ignored. For the generation see
        `complete_load`.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Note a use, head to tail: recency only."""

    @abstractmethod
    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request; once. Its transfers may still end afterwards."""

    @abstractmethod
    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a scheduler step: the last call of a step, which hands over deferred work."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Detach and return what appeared and disappeared since the last call.

        Purely an observation: never calling it changes nothing else.
        """

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Tell whether steps are needed although no request is scheduled."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Empty the primary, between steps; persistent tiers keep their blocks. May wait."""

    @abstractmethod
    def on_reset_flushed(self) -> None:
        """Learn that no copy from before the reset touches the primary any more."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End everything; idempotent. Waits at most about `timeout` seconds a tier."""
