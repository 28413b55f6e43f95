"""The contract of a storage tier: five coroutines, and the guarantees they rely on.

A tier moves blocks between the primary tier's buffer and its own storage. It keeps no job state:
queues, deadlines, cancellation and results belong to its actor.
"""

from __future__ import annotations

import enum
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import stat_result
from typing import Any, ClassVar, Final, Protocol, Self, TypeVar

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.config import Options
from kvoffload_async.errors import ConfigError, Remedies
from kvoffload_async.types import JobId, JobMetadata, Locality, Medium, OffloadKey

T = TypeVar("T")

_DIGEST_DIGITS = 32
MOST_RENEWALS: Final = 16
"""Bound on a job's time if it makes progress, as a multiple of `io_timeout_s`."""


class Direction(enum.Enum):
    """Direction of a copy, seen from the primary tier."""

    LOAD = enum.auto()
    STORE = enum.auto()
    METADATA = enum.auto()
    """Operations without payload: existence probes, sweeps, journals."""


@dataclass(frozen=True, slots=True)
class TierCapabilities:
    """Properties of a tier.

    Attributes:
        exclusive: Its contents change only through this instance. Then its owner keeps an exact
            index and sends no probes; otherwise new keys are looked up by batched `contains`.
        persistent: Its contents survive a restart.
        request_level: It stores every block of a request, including prefix hits.
        medium: Storage medium of its blocks.
        locality: Distance of that medium.
        probes_prefixes: Probes call `longest_prefixes`, which may be far cheaper than `contains`.
        pins: `pin` keeps blocks from being removed by this process.
        discards: `discard` removes blocks.
        deletes: `delete` removes blocks and confirms it.
        lists: `list_keys` lists the blocks.
        ages: `list_older` lists blocks by their age.
        announces_removals: Every stored or announced block is eventually announced as evicted when
            it is removed, by whichever process. Consumers of events may then keep metadata of a
            block until its removal. Leave it False for an unbounded tier.
    """

    exclusive: bool
    persistent: bool = False
    request_level: bool = False
    medium: Medium = Medium.STORAGE
    locality: Locality = Locality.LOCAL
    announces_removals: bool = False
    probes_prefixes: bool = False
    pins: bool = False
    discards: bool = False
    deletes: bool = False
    lists: bool = False
    ages: bool = False


@dataclass(frozen=True, slots=True)
class TierBounds:
    """Limits of a tier's running and queued work.

    Attributes:
        concurrent_loads: Load jobs running at once.
        concurrent_stores: Store jobs running at once.
        concurrent_blocks: Further jobs of a direction may run at once while all running ones
            together have at most this many blocks: many small jobs, or few large ones.
        queued_jobs: Maximum number of queued jobs per direction; further jobs fail at once.
        concurrent_probes: Existence probes running at once; further probes wait for the next step.
    """

    concurrent_loads: int = 4
    concurrent_stores: int = 4
    concurrent_blocks: int = 0
    queued_jobs: int = 1024
    concurrent_probes: int = 2


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Model, owner and byte layout of a tier's KV blocks; see docs/kv-identity.md.

    A block may be loaded only under the identity under which it was stored.

    Attributes:
        model: Name of the model.
        fingerprint: Digest of the weights and of everything else that KV bytes depend on.
        namespace: User-defined separation of caches.
        block_bytes: Bytes stored per block: a row of the primary, with the cells of all workers,
            padded to whole pages. 0 if not known yet.
        rank: Rank of the engine, where engines store different bytes under the same keys.
        num_workers: Number of workers with a cell in each row.
        run_config: Everything that determines a block's byte layout, as a JSON object: the fields
            above except `rank`, and other known layout parameters.
        generation: Cache generation in which the tier is opened. Every key contains its generation,
            so blocks of several generations can coexist.
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
        """Digest of the identity, 32 hexadecimal digits, for folder names.

        Excludes the generation, which is part of the keys and may change while the tier is open.
        """
        distinguishing = asdict(replace(self, generation=None))
        text = json.dumps(distinguishing, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]

    def require_model(self) -> None:
        """Raise ConfigError if no model is named, for a tier whose blocks outlive the process."""
        if self.model is None:
            raise ConfigError(
                "model: missing; blocks on disk outlive the process, and without the name of their "
                "model those of another with equal sizes would be served as its own: "
                'add "model": "org/name" to the tier, or to the whole configuration, or '
                '"run_config": {"model_name": "org/name", ...} to the tier'
            )


@dataclass(frozen=True, slots=True)
class TierLocation:
    """A storage location of a tier, for checking conflicts with the engine's other tiers.

    Attributes:
        path: Absolute path of a directory, which need not exist yet; or another identifier, such as
            a URL, which is compared verbatim.
        capacity_bytes: Maximum size of the tier there; None: unbounded.
        is_exclusive: Whether no other tier of the engine may use this directory, its parents or its
            children.
        key: The option that names the location, for messages.
        is_memory: Whether `capacity_bytes` is memory of this machine; known for a directory.
        check: Raises ConfigError if the blocks do not fit on a directory's filesystem; called with
            the status of the directory, or of its nearest parent that exists. Asking a filesystem
            may hang, so the framework does it, on a thread and with a deadline.
    """

    path: str
    capacity_bytes: int | None = None
    is_exclusive: bool = True
    key: str = "root_dir"
    is_memory: bool = False
    check: Callable[[stat_result], object] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CloseReport:
    """Result of closing a tier.

    Attributes:
        unfinished_jobs: Jobs whose copies still run; their memory must not be released.
        error: The error that closing failed with, if any.
    """

    unfinished_jobs: tuple[JobId, ...] = ()
    error: Exception | None = None

    @property
    def is_clean(self) -> bool:
        """Whether all jobs finished and closing succeeded."""
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
        """Await `call()` on an I/O thread of the direction; METADATA has threads of its own.

        Never returns while the call still touches memory, even when cancelled; a cancellation is
        delivered after the call has ended.

        Args:
            direction: Selects the thread pool.
            call: The blocking function.
            helpers: Maximum number of idle threads that run the same call in parallel; for a call
                that takes its work from a shared iterator. No thread joins after one has returned.
                An error of any thread is raised.
            withdraw: Called when the wait is cancelled. If it returns true, the cancellation is
                delivered at once, and the call, if still made, must not touch anything.
        """
        ...


class TierEnvironment(Protocol):
    """Resources that an open tier may use.

    Attributes:
        kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8, C-contiguous. A job's
            slots may be accessed only between the job's start and its end.
        io: Executor for blocking calls.
        identity: Identity of the blocks. A tier whose blocks are shared or outlive the process must
            keep blocks of different identities apart.
    """

    @property
    def kv_view(self) -> memoryview: ...

    @property
    def io(self) -> IoRunner: ...

    @property
    def identity(self) -> KVIdentity: ...

    def blocks_appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Announce blocks that can be loaded although this run did not store them.

        The owner indexes them incrementally. `open` completes only after all are indexed; a tier
        with millions of blocks should pass ownership of a `KeyMap`, which needs no indexing.
        """
        ...

    def blocks_evicted(self, keys: Iterable[OffloadKey]) -> None:
        """Announce promptly that blocks can no longer be loaded.

        Includes blocks of running jobs: the end of a job does not override announcements made since
        it began.
        """
        ...

    def renew_deadline(self, job_id: JobId, *, has_moved: bool) -> float:
        """Renew the deadline of a running job; return it, in loop time.

        It becomes `io_timeout_s` from now, but not more than `MOST_RENEWALS` times that after the
        job was accepted.

        Args:
            job_id: The job.
            has_moved: Whether it has moved blocks; otherwise the tier just begins it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TierSettings(Options):
    """Base of a class that declares the options of one kind of tier."""

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        """Return the settings of a tier; changes nothing, not even on disk.

        Args:
            options: All options of the tier as the user gave them, with those of `TierOptions`.
            identity: The identity that `AsyncTier.open` will receive.

        Raises:
            ConfigError: The options cannot work; the message names key, value and remedy.
        """
        return cls.take(options)

    def locations(self, identity: KVIdentity) -> Iterable[TierLocation]:
        """Return the storage locations; raises ConfigError if no block fits."""
        return ()


class AsyncTier(ABC):
    """Block storage with five coroutines.

    Guaranteed by the framework: `open` ends before anything else starts and `close` starts after
    everything else has ended; all coroutines run on one event loop; the slots of a job belong to it
    until its coroutine ends; a job's keys are unique; at most `bounds` jobs run at once.

    The implementation is responsible for: never blocking the loop (use `env.io`); returning or
    raising only when no byte of the job moves any more; reporting a result per block; never
    reporting a loaded block as successful without verifying its bytes as far as possible.

    An exception from `store` or `load` fails every block of the job. Errors of third-party
    libraries are mapped onto `TierError` here.

    The class is what is registered, so it also declares the tier's options, required libraries,
    remedies and maintenance. A tier needs none of them, only `capabilities` and the coroutines.

    Thread: loop; class methods: any.
    """

    declares: ClassVar[type[TierSettings] | None] = None
    """Class that declares the tier's options; the constructor takes an instance. None: the
    constructor's parameters are the options."""
    requires: ClassVar[Mapping[str, str]] = {}
    """Library that must be installed -> how to install it; import it in `open` or later."""
    remedies: ClassVar[Remedies] = {}
    """Remedies if this tier fails, for log lines. Texts for any tier are the fallback."""
    capabilities: TierCapabilities
    bounds: TierBounds = TierBounds()
    """Limits of the tier's work; as they may depend on the primary, `open` may set them."""
    waits_for_device: bool = False
    """Whether I/O threads often wait for a device, so that the tier has more threads than CPUs."""
    io_threads: int | None = None
    """Number of I/O threads that the tier's own options set, all but one of which prefer loads;
    None: `n_read_threads` and `n_write_threads` set it."""

    def opening_s(self, block_bytes: int) -> float:
        """Return the seconds by which opening a large store may exceed the usual limit."""
        return 0.0

    @abstractmethod
    async def open(self, env: TierEnvironment) -> None:
        """Open the tier.

        Raises:
            ConfigError: The configuration cannot work here; the message names key and remedy.
            TierUnavailableError: The storage cannot be reached.
        """

    @abstractmethod
    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return those of `keys` that can probably be loaded now.

        For an exclusive tier it is called only for blocks with an announcement during a job on
        them, since their order is unknown. If it fails, the last announcement holds.
        """

    async def longest_prefixes(self, chains: Sequence[Sequence[OffloadKey]]) -> Sequence[int]:
        """Return for each chain how many keys at its head can probably be loaded now.

        A chain is a sequence of chained hashes, head to tail: a block is usable only with all
        blocks before it. Called instead of `contains` if `capabilities.probes_prefixes`. The answer
        may be wrong, because loads confirm it.
        """
        present = await self.contains(list(dict.fromkeys(key for chain in chains for key in chain)))
        return [
            next((i for i, key in enumerate(chain) if key not in present), len(chain))
            for chain in chains
        ]

    @abstractmethod
    async def store(self, job: JobMetadata) -> BlockFailures:
        """Copy the job's slots into the tier; return the blocks that failed.

        A block that is already present succeeds without being written again. If a store fails as a
        whole, the tier announces the blocks that it keeps nevertheless.
        """

    @abstractmethod
    async def load(self, job: JobMetadata) -> BlockFailures:
        """Copy blocks into the job's slots; return the blocks that failed.

        A missing block is a `BlockMissingError`, a failed verification a `CorruptBlockError`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources. Called once, also after a failed `open`."""

    def touch(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """Record uses of these blocks, ordered head to tail. Must return at once."""

    def pin(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """Keep those of these distinct blocks that are present until `unpin`. Must return at once.

        Pins are counted. Called only if `capabilities.pins`.
        """

    def unpin(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """Remove one pin from each of these distinct blocks that has one. Must return at once."""

    def discard(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """Remove blocks, except pinned ones, and announce the removals when they are done.

        Must return at once. A block of a running job may stay. Called only if
        `capabilities.discards`.
        """

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Remove distinct blocks for good; return those that may still be there.

        When it returns, the other blocks are absent, whether or not they were before: neither
        `contains`, `load` nor a later `open` finds them, and no cached answer and no renewal of
        this instance brings them back. A block that `pin` keeps is a `TierBusyError`. Need not be
        announced. An exception means that any of the blocks may still be there.

        Guaranteed by the framework: no job on these blocks runs meanwhile, and their absence is
        recorded. May be cancelled at its deadline. Called only if `capabilities.deletes`.
        """
        raise NotImplementedError

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Return some keys of present blocks, and where to continue; None at the end.

        A block that is present throughout a listing is listed. Called only if `capabilities.lists`.

        Args:
            cursor: None to begin, or what an earlier call has returned; of any age, also by another
                instance.
            count: Maximum number of keys.

        Raises:
            TierError: The storage cannot be read, or `cursor` is not valid.
        """
        raise NotImplementedError

    async def list_older(
        self, cursor: str | None, count: int, age_s: float
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """As `list_keys`, only of blocks stored or renewed `age_s` seconds ago, or earlier.

        By the clock of the storage. Called only if `capabilities.ages`.
        """
        raise NotImplementedError

    @classmethod
    def from_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        """Create the tier; changes nothing yet. Arguments and errors as for `check_options`."""
        create: Callable[..., Self] = cls
        declares = cls.declares
        return create(**options) if declares is None else create(declares.of(options, identity))

    @classmethod
    def check_options(
        cls, options: Mapping[str, Any], identity: KVIdentity
    ) -> Iterable[TierLocation]:
        """Check the options before any side effect; return the storage locations.

        Changes nothing, not even on disk. Called whenever a configuration is checked, and before a
        tier is created. Option names and required options have been checked; values have not. A
        class that `declares` its options leaves this to `TierSettings`.

        Args:
            options: The arguments of the constructor, or the options for `TierSettings.of`.
            identity: The identity that `open` will receive.

        Raises:
            ConfigError: The options cannot work; the message names key, value and remedy.
        """
        if cls.declares is None:
            return ()
        return cls.declares.of(options, identity).locations(identity)

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance] | None:
        """Return the maintenance class for this tier's stores, or None; import its module here."""
        return None

    def gauges(self) -> Mapping[str, float]:
        """Return the tier's own metrics for `stats()`: counters and levels by name.

        `used_bytes` and `capacity_bytes` are common to all tiers: space occupied, as seen by this
        process, and its limit; `bytes_in_flight` and `bytes_in_flight_limit` to remote ones.

        Must return at once, from memory. Thread-safe against owner and loop.
        """
        return {}

    def describe(self) -> str:
        """Return one line describing this tier and its location, for people.

        In events, REMOTE tiers with equal texts and identities are one store that engines share,
        unless they are exclusive.
        """
        return type(self).__name__
