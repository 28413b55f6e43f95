"""The contract of a storage tier: five coroutines, and what they may rely on.

A tier moves blocks between the primary tier's buffer and a place of its own. It keeps no job
state: queues, deadlines, cancellation and results are the business of the actor that runs it.
"""

from __future__ import annotations

import enum
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.types import JobId, JobMetadata, Locality, Medium, OffloadKey

T = TypeVar("T")

_DIGEST_DIGITS = 32


class Direction(enum.Enum):
    """Which way bytes move, seen from the primary tier."""

    LOAD = enum.auto()
    STORE = enum.auto()
    METADATA = enum.auto()
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
        probes_prefixes: Its probes are answered by `longest_prefixes`, which may cost far less than
            `contains` does.
        keys_before: Where it probes prefixes: how many keys `longest_prefixes` is told, at most, of
            those that come right before each chain. 0: none.
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
    probes_prefixes: bool = False
    keys_before: int = 0


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
    """Whose KV blocks a tier keeps, and how their bytes are laid out; see docs/kv-identity.md.

    A block may be loaded only where all of it is the same as when the block was stored.

    Attributes:
        model: Name of the model.
        fingerprint: Content of its weights, and whatever else KV bytes depend on.
        namespace: Whatever else the user wants to keep apart.
        block_bytes: Bytes that a tier keeps of a block: a row of the primary, with the cells of
            all its workers and the padding to whole pages. 0 where it is not known yet.
        rank: Which engine's blocks these are, where several have other bytes under the same keys.
        num_workers: Workers that have a cell each in a row.
        run_config: Everything that the meaning of a block's bytes depends on, as a JSON object:
            what is above, but for `rank`, and what else is known of the layout.
        generation: The cache generation that the tier is opened in. Every key says which it is of,
            so blocks of several may lie beside each other.
    """

    model: str | None = None
    fingerprint: str | None = None
    namespace: str | None = None
    block_bytes: int = 0
    rank: int = 0
    num_workers: int = 1
    run_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    generation: str | None = None

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, others for every other identity: for the name of a folder.

        The generation is left out: it is in the keys, and may change while the tier is open.
        """
        told_apart = asdict(replace(self, generation=None))
        text = json.dumps(told_apart, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]


@dataclass(frozen=True, slots=True)
class TierPlace:
    """A place that a tier keeps its blocks in, compared with those of the engine's other tiers.

    Attributes:
        path: Absolute path of a directory, which need not exist yet; or the name of a place that
            is none, such as a URL, which is compared as it is.
        capacity_bytes: What the tier may come to occupy there; None: no bound.
        is_exclusive: Whether no other tier of the engine may use the place, or one above or below.
        key: The option that names the place, for messages.
    """

    path: str
    capacity_bytes: int | None = None
    is_exclusive: bool = True
    key: str = "root_dir"


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

    async def run(
        self,
        direction: Direction,
        call: Callable[[], T],
        *,
        helpers: int = 0,
        withdraw: Callable[[], object] | None = None,
    ) -> T:
        """Await `call()` on an I/O thread; calls that move no payload have threads of their own.

        Never returns, not even when cancelled, while the call is still touching memory; a
        cancellation is delivered when the call has ended.

        Args:
            direction: Which threads.
            call: What to run.
            helpers: Threads, at most, that make the same call beside the first one because they
                have nothing else to do: for a call that takes its work from a shared iterator.
                None joins once one has returned. An error of any is raised.
            withdraw: Called when the wait is cancelled. If it returns true, the cancellation is
                delivered at once, and the call, which may still be made, must touch nothing.
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

    def opening_s(self, block_bytes: int) -> float:
        """Return how much longer than any tier this one may take to open, as it may be large."""
        return 0.0

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

    async def longest_prefixes(
        self,
        chains: Sequence[Sequence[OffloadKey]],
        before: Sequence[Sequence[OffloadKey]] = (),
    ) -> Sequence[int]:
        """Return for each chain how many keys at its head can probably be loaded now.

        Keys of a chain are chained hashes, head to tail: a block is of use only with those before
        it. Asked instead of `contains` where `capabilities.probes_prefixes`; what it says may be
        wrong, as loads confirm it.

        Args:
            chains: What is asked for.
            before: For each chain, the keys of the same request and KV-cache group that come right
                before it, head to tail: at most `capabilities.keys_before`, as far as they are
                known, and none before the chains of a group that has several. Empty where none
                are told; where `keys_before` is 0, it is not passed at all.
        """
        present = await self.contains(list(dict.fromkeys(key for chain in chains for key in chain)))
        return [
            next((i for i, key in enumerate(chain) if key not in present), len(chain))
            for chain in chains
        ]

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
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> Iterable[TierPlace]:
        """Check the constructor's options before anything is made; return the places in use.

        Changes nothing, on disk neither. Runs whenever a configuration is checked, and before a
        tier is created. Names have been checked, and that what has no default is there; values are
        as they are given.

        Args:
            options: What the constructor would be called with.
            identity: What `open` would find in its environment.

        Raises:
            ConfigError: The options cannot work; the message names key, value and remedy.
        """
        return ()

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance] | None:
        """Return what looks after such tiers' stores; None: nothing does."""
        return None

    def gauges(self) -> Mapping[str, float]:
        """Return figures of the tier's own, for `stats()`: counters and levels by name.

        Of these `used_bytes` and `capacity_bytes` have a meaning for all tiers: what the tier
        occupies, in this process's view, and what it may.

        Must return at once, from memory. Thread: any, while owner and loop may run.
        """
        return {}

    def describe(self) -> str:
        """Return one line for people: what this tier is and where."""
        return type(self).__name__
