"""The contract of a storage tier: five coroutines, and what they may rely on.

A tier moves blocks between the primary tier's buffer and a place of its own. It keeps no job
state: queues, deadlines, cancellation and results are the business of the actor that runs it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.types import JobId, JobMetadata, Locality, Medium, OffloadKey

T = TypeVar("T")


class Direction(enum.Enum):
    """Which way bytes move, seen from the primary tier."""

    LOAD = enum.auto()
    STORE = enum.auto()
    NONE = enum.auto()
    """No payload moves: existence probes, sweeps, journals."""


@dataclass(frozen=True, slots=True)
class TierCapabilities:
    """What a tier is.

    Attributes:
        exclusive: Its contents change only through this instance. Then its owner keeps an exact
            index and probes nothing; otherwise every new key costs one batched `contains`.
        persistent: Its contents survive a restart.
        request_level: It wants every block of a request, prefix hits included.
        medium: Where its blocks lie.
        locality: How far away that is.
        announces_removals: Every block that it stored or announced is announced as evicted when
            it goes, whoever removed it, sooner or later. Consumers of events may then keep
            metadata of a block until its removal. Leave it False for a tier without a bound.
    """

    exclusive: bool
    persistent: bool = False
    request_level: bool = False
    medium: Medium = Medium.STORAGE
    locality: Locality = Locality.LOCAL
    announces_removals: bool = False


@dataclass(frozen=True, slots=True)
class TierBounds:
    """How much work a tier takes; what is over a bound is refused, never piled up.

    Attributes:
        concurrent_loads: Load jobs running at once.
        concurrent_stores: Store jobs running at once.
        concurrent_blocks: More jobs than that run at once in a direction as long as all of them
            together have no more blocks than this: many small ones, few large ones.
        queued_jobs: Jobs waiting in each direction; one more is refused with a failed result.
        concurrent_probes: Existence probes running at once; more wait for the next step.
    """

    concurrent_loads: int = 4
    concurrent_stores: int = 4
    concurrent_blocks: int = 0
    queued_jobs: int = 1024
    concurrent_probes: int = 2


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Whose KV blocks a tier keeps, as its configuration says; docs/kv-identity.md says more.

    A block may be loaded only where all of it is the same as when the block was stored.

    Attributes:
        model: Name of the model.
        fingerprint: Content of its weights, and whatever else KV bytes depend on.
        namespace: Whatever else the user wants to keep apart.
    """

    model: str | None = None
    fingerprint: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What closing a tier left behind.

    Attributes:
        unfinished_jobs: Jobs whose copies still run; their memory must not be released.
        error: Why closing failed, if it did.
    """

    unfinished_jobs: tuple[JobId, ...] = ()
    error: Exception | None = None

    @property
    def is_clean(self) -> bool:
        """Whether nothing was left behind."""
        return not self.unfinished_jobs and self.error is None


class IoRunner(Protocol):
    """Runs blocking calls off the loop thread."""

    async def run(self, direction: Direction, call: Callable[[], T], *, helpers: int = 0) -> T:
        """Await `call()` on an I/O thread; calls that move no payload have threads of their own.

        Never returns, not even when cancelled, while the call is still touching memory; a
        cancellation is delivered when the call has ended.

        Args:
            direction: Which threads.
            call: What to run.
            helpers: Threads, at most, that make the same call beside the first one because they
                have nothing else to do: for a call that takes its work from a shared iterator.
                None joins once one has returned. An error of any is raised.
        """
        ...


class TierEnvironment(Protocol):
    """What an open tier may use.

    Attributes:
        kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8, C-contiguous. Slot s
            of a job may be touched only between the job's start and its end.
        io: Where blocking calls go.
        identity: Whose blocks these are. A tier whose blocks outlive the process, or that shares
            them with others, must keep those of different identities apart.
    """

    @property
    def kv_view(self) -> memoryview: ...

    @property
    def io(self) -> IoRunner: ...

    @property
    def identity(self) -> KVIdentity: ...

    def blocks_appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Announce blocks that can be loaded though this run did not store them.

        The owner takes them in step by step. While the tier opens it waits for all of them; a tier
        with millions then gives a `KeyMap` of its own making away, which needs no taking in.
        """
        ...

    def blocks_evicted(self, keys: Iterable[OffloadKey]) -> None:
        """Announce blocks that can no longer be loaded, as soon as that is so.

        Also those of a job that has not ended: what was announced since it began is not undone by
        its end.
        """
        ...


class AsyncTier(ABC):
    """A place where blocks are kept, as five coroutines.

    Guaranteed by the framework: `open` ends before anything else starts and `close` starts after
    everything else has ended; all coroutines run on one event loop; the slots of a job belong to
    it until its coroutine ends; a job's keys are unique; at most `bounds` jobs run at once.

    The implementation is responsible for: never blocking the loop (use `env.io`); ending only
    when no byte of the job moves any more, also when it raises; judging every block on its own;
    never reporting a loaded block whose bytes it did not verify as far as it can.

    Raising out of `store` or `load` fails every block of the job. Errors of third-party libraries
    are mapped onto `TierError` here, at the edge.

    Thread: loop.
    """

    capabilities: TierCapabilities
    bounds: TierBounds = TierBounds()
    """May depend on the primary's geometry, and so be set in `open`."""

    @abstractmethod
    async def open(self, env: TierEnvironment) -> None:
        """Make ready.

        Raises:
            ConfigError: The configuration cannot work here; the message names key and remedy.
            TierUnavailableError: The place cannot be reached.
        """

    @abstractmethod
    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return those of `keys` that can probably be loaded now.

        Of an exclusive tier it is asked only where what the tier has said does not tell: about
        blocks that it announced while a job of theirs ran. Without an answer, what was announced
        last stands.
        """

    @abstractmethod
    async def store(self, job: JobMetadata) -> BlockFailures:
        """Copy the job's slots into the tier; return the blocks that failed.

        A block that is already present succeeds without being written again. A tier that keeps
        blocks of a store that fails as a whole announces them.
        """

    @abstractmethod
    async def load(self, job: JobMetadata) -> BlockFailures:
        """Copy blocks into the job's slots; return the blocks that failed.

        A missing block is a `BlockMissingError`, bytes that do not verify a `CorruptBlockError`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Called once, also after a failed `open`."""

    def touch(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """Note that these blocks were used, head to tail. Must return at once."""

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance] | None:
        """Return what looks after such tiers' stores; None: nothing does."""
        return None

    def describe(self) -> str:
        """Return one line for people: what this tier is and where."""
        return type(self).__name__
