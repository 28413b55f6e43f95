"""The common implementation of the network tiers, on top of a `RemoteClient`.

Blocks in use are renewed in batches, so that the most used blocks do not expire first.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import ClassVar, Final, TypeVar

import numpy as np

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import (
    AsyncTier,
    Direction,
    TierBounds,
    TierCapabilities,
    TierEnvironment,
)
from kvoffload_async.error_log import LogRate
from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    CorruptBlockError,
    JobNotStartedError,
    TierClosedError,
    TierError,
    TierTimeoutError,
    drop_tracebacks,
)
from kvoffload_async.tiers.remote.calls import Calls, InFlight, Together, run_few, run_together
from kvoffload_async.tiers.remote.client import (
    Envelopes,
    Parts,
    RefusedError,
    RemoteClient,
    Server,
    Target,
    Value,
    ValueExistsError,
)
from kvoffload_async.tiers.remote.existence import ExistenceCache, ExistenceProber, ExpiringKeys
from kvoffload_async.tiers.remote.settings import (
    MAX_CONNECTIONS,
    RemoteCounters,
    RemoteSettings,
)
from kvoffload_async.tiers.remote.window import FIRST_BYTES, Window
from kvoffload_async.types import JobMetadata, Locality, OffloadKey, block_text
from kvoffload_async.waiting import Permit

_BLOCKS_A_CALL: Final = 1024
_CALLS_AT_ONCE: Final = 8
"""Concurrent renewal calls if each call renews one block."""
_MOST_WAITING: Final = 1 << 16
_LONGEST_PAUSE_S: Final = 10.0


class Renewal:
    """Records uses of blocks, and renews each used block once per quarter of its lifetime.

    Thread: loop.

    Attributes:
        renewed: Number of renewed blocks.
        dropped: Number of uses dropped: the queue was full, the call failed, or the tier was
            closed.
    """

    def __init__(
        self,
        ttl_s: float,
        renew: Callable[[Sequence[OffloadKey]], Awaitable[bool]],
        *,
        renews_many: bool,
    ) -> None:
        """Create the object without recorded uses.

        Args:
            ttl_s: Lifetime of a block without renewal, in seconds.
            renew: Renews blocks in one call, and returns whether that succeeded; does not raise.
            renews_many: Whether one call can renew many blocks; otherwise each needs a call.
        """
        self._renew = renew
        self._blocks_a_call = _BLOCKS_A_CALL if renews_many else 1
        self._calls_at_once = 1 if renews_many else _CALLS_AT_ONCE
        self._failed_in_a_row = 0
        self._pause_s = min(ttl_s / 16, _LONGEST_PAUSE_S)
        self._fresh = ExpiringKeys(ttl_s / 4)
        self._waiting: dict[OffloadKey, None] = {}
        self._renewing: dict[asyncio.Future[None], Sequence[OffloadKey]] = {}
        """The end of each call under way -> the blocks that it renews."""
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.renewed = self.dropped = 0

    def written(self, keys: Iterable[OffloadKey]) -> None:
        """Record blocks that were just written or renewed."""
        self._fresh.add(keys, asyncio.get_running_loop().time())

    def used(self, keys: Iterable[OffloadKey]) -> None:
        """Record uses of blocks; blocks that are due for renewal are renewed soon."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for key in keys:
            if self._fresh.has(key, now_s) or key in self._waiting:
                continue
            if len(self._waiting) >= _MOST_WAITING:
                self.dropped += 1
            else:
                self._waiting[key] = None
        if self._waiting and self._task is None:
            self._task = loop.create_task(self._run(), name="remote:renewal")

    async def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Cancel the renewals of blocks that are to be deleted, and wait for those under way."""
        unwanted = frozenset(keys)
        for key in unwanted & self._waiting.keys():
            del self._waiting[key]
        self._fresh.discard(unwanted)
        while running := {
            end for end, some in self._renewing.items() if not unwanted.isdisjoint(some)
        }:
            await asyncio.wait(running)

    async def close(self) -> None:
        """Stop renewing blocks; pending renewals are dropped."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self.dropped += len(self._waiting)
        self._waiting.clear()

    async def _run(self) -> None:
        try:
            while self._waiting:  # also for those that came while the last workers ended
                self._failed_in_a_row = 0
                await asyncio.sleep(self._pause_s)
                workers = (self._work() for _ in range(self._calls_at_once))
                await run_together(workers, "remote:renewal")
        finally:
            self._task = None

    async def _work(self) -> None:
        """Renew pending blocks in successive calls; stop after too many consecutive failures."""
        while self._waiting:
            keys = tuple(islice(self._waiting, self._blocks_a_call))
            for key in keys:
                del self._waiting[key]
            try:
                is_renewed = await self._call(keys)
            except asyncio.CancelledError:
                self.dropped += len(keys)
                raise
            if is_renewed:
                self._failed_in_a_row = 0
                self.renewed += len(keys)
                self.written(keys)
                continue
            self._failed_in_a_row += 1
            self.dropped += len(keys)
            if self._failed_in_a_row >= self._calls_at_once:
                self.dropped += len(self._waiting)
                self._waiting.clear()

    async def _call(self, keys: Sequence[OffloadKey]) -> bool:
        end = asyncio.get_running_loop().create_future()
        self._renewing[end] = keys
        try:
            return await self._renew(keys)
        finally:
            del self._renewing[end]
            end.set_result(None)


logger = logging.getLogger(__name__)

T = TypeVar("T")

_RESERVED_PART: Final = 0.1
"""Part of `io_timeout_s` before a job's deadline in which no further call with payload begins:
calls that began before end in time, so that their blocks have results of their own."""
_QUEUE_PART: Final = 1 / 4
"""Longest tolerated queue of payload, as a part of `probe_timeout_s`: a third of the deadline of a
check, which queues behind it; see `HangDetector`."""
_MOST_STAGED_BYTES: Final = 64 << 20
_MEMORY_PART: Final = 1 / 8
"""Maximum payload in flight in each direction, as a part of the primary's memory."""

Portion = Sequence[int]
"""Indices of blocks of a job, all on one server."""

MovePortion = Callable[[JobMetadata, Portion, float], Awaitable[dict[int, TierError]]]
"""Copies some blocks of a job until a deadline (loop time); returns the failed ones."""


@dataclass(slots=True)
class _Run:
    """A running job, with the loop times of its start and of its deadline."""

    job: JobMetadata
    in_flight: InFlight
    began_s: float
    due_s: float
    failures: dict[int, TierError] = field(default_factory=dict)


class RemoteTier(AsyncTier):
    """Stores each block as one value of a remote store.

    A job is divided into portions of one call each; they run concurrently within the limits. Every
    block has its own result.
    """

    capabilities = TierCapabilities(
        exclusive=False, persistent=True, locality=Locality.REMOTE, deletes=True, lists=True
    )
    bounds = TierBounds(concurrent_blocks=MAX_CONNECTIONS)
    first_bytes: ClassVar[int] = FIRST_BYTES
    """Payload in flight in each direction before anything is measured."""

    def __init__(self, settings: RemoteSettings, location: str) -> None:
        """Configure the tier; nothing is connected before `open`.

        Args:
            settings: See `RemoteSettings`.
            location: Location of the store for messages, without secrets.
        """
        self._settings = settings
        self._location = location
        self._counters = RemoteCounters()
        self._env: TierEnvironment | None = None
        self._on_close = AsyncExitStack()
        self._client: RemoteClient
        self._calls: Calls
        self._memory: ExistenceCache
        self._questions: ExistenceProber
        self._renewal: Renewal | None = None
        self._loads, self._stores = self._limited(self.first_bytes)
        self._unremoved, self._unrenewed = LogRate(), LogRate()
        self._staged: deque[memoryview] = deque()
        """Memory in which blocks were encrypted, for the next ones: fresh pages cost as much as
        the encryption."""

    async def open(self, env: TierEnvironment) -> None:
        """Connect to the store.

        Raises:
            ConfigError: The server rejects the credentials, or the store does not exist.
            TierUnavailableError: The server cannot be reached.
        """
        settings = self._settings
        row_bytes = env.kv_view.nbytes // len(env.kv_view)
        self._envelopes = Envelopes(
            env.identity.digest, row_bytes, settings.integrity_key, settings.encryption_keys
        )
        self._staged = deque(maxlen=max(1, _MOST_STAGED_BYTES // row_bytes))
        self._client = self._create_client(self._envelopes.namespace)
        self._on_close.push_async_callback(self._client.close)
        self._loads, self._stores = self._limited(int(_MEMORY_PART * env.kv_view.nbytes))
        self._calls = Calls(self._client, settings, self._counters, self._back_off)
        self._on_close.push_async_callback(self._calls.close)
        loop = asyncio.get_running_loop()
        self._memory = ExistenceCache(
            settings.positive_cache_ttl_s, settings.negative_cache_ttl_s, loop.time
        )
        self._questions = ExistenceProber(self._client, self._calls, self._memory)
        try:
            deadline_s = self._deadline(settings.job_timeout_s)
            await self._calls.run(self._client.connect, deadline_s, may_hang=False)
        except RefusedError as error:
            raise ConfigError(
                f"url: {self._location}: {error}; correct url or credentials"
            ) from None
        if settings.ttl_s is not None:
            self._renewal = Renewal(
                settings.ttl_s, self._renew, renews_many=self._client.answers_many
            )
            self._on_close.push_async_callback(self._renewal.close)
        self._env = env

    @abstractmethod
    def _create_client(self, namespace: str) -> RemoteClient:
        """Create the client of a namespace without connecting."""

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a value; recent answers come from the cache."""
        self._opened()
        deadline_s = self._deadline(self._settings.probe_timeout_s)
        return frozenset(await self._questions.ask(keys, deadline_s))

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Store the blocks that have no value yet.

        Raises:
            TierUnavailableError: The server failed recently, and still does not respond.
        """
        return await self._run_job(job, self._stores, self._store_portion)

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Read blocks, verify them, and copy them into the job's slots.

        Raises:
            TierUnavailableError: The server failed recently, and still does not respond.
        """
        failures = await self._run_job(job, self._loads, self._load_portion)
        self.touch([key for i, key in enumerate(job.keys) if i not in failures])
        return failures

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of blocks, ordered head to tail."""
        if self._renewal is not None:
            self._renewal.used(keys)

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Remove the values of blocks, whoever has stored them.

        Another host that stores or renews one at the same time may bring it back.
        """
        self._opened()
        deadline_s = self._deadline(self._settings.job_timeout_s)
        if self._renewal is not None:
            await self._renewal.forget(keys)
        failures: dict[int, TierError] = {}

        async def remove(portion: Portion) -> None:
            some = [keys[i] for i in portion]
            server = self._client.server_of(some[0])
            try:
                call = partial(self._client.remove, some)
                await self._calls.run(call, deadline_s, server=server)
            except TierError as error:
                failures.update(dict.fromkeys(portion, self._calls.fault_of(server, error)))
            else:
                self._questions.deleted(some)

        step = _BLOCKS_A_CALL if self._client.answers_many else 1
        portions = self._client.portions(keys, step)
        await run_few(map(remove, portions), min(_CALLS_AT_ONCE, len(portions)), "remote:delete")
        return failures

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Return some keys, in the store's order; a page may have fewer than `count`."""
        self._opened()
        return await self._run_long(partial(self._client.list_keys, cursor, count))

    async def close(self) -> None:
        """Close all connections; idempotent."""
        self._env = None
        await self._on_close.aclose()
        self._staged.clear()

    def describe(self) -> str:
        """Return the store's location, without secrets."""
        return self._location

    def gauges(self) -> Mapping[str, float]:
        """Return counters of calls, probes and renewals, and the bytes in flight and allowed."""
        figures = asdict(self._counters)
        if (renewal := self._renewal) is not None:
            figures |= {"renewed": renewal.renewed, "dropped_renewals": renewal.dropped}
        limiters = self._loads.limiter, self._stores.limiter
        return figures | {
            "staging_bytes": sum(map(len, tuple(self._staged))),
            "bytes_in_flight": sum(limiter.bytes_in_flight for limiter in limiters),
            "bytes_in_flight_limit": sum(limiter.max_bytes for limiter in limiters),
        }

    # -- jobs -----------------------------------------------------------------------------------

    async def _run_job(
        self, job: JobMetadata, in_flight: InFlight, move: MovePortion
    ) -> BlockFailures:
        """Move a job's blocks, as many portions at once as are admitted."""
        now_s = asyncio.get_running_loop().time()
        run = _Run(job, in_flight, now_s, self._renewed_deadline(job, has_moved=False))
        indices = await self._indices_to_move(run)
        client, block_bytes = self._client, self._envelopes.block_bytes
        step = client.portion_blocks(block_bytes)
        async with Together(f"remote:{job.job_id}") as together:
            for positions in client.portions([job.keys[i] for i in indices], step):
                portion = [indices[position] for position in positions]
                permit = await self._admitted(run, len(portion) * block_bytes)
                if permit is None:
                    self._fail(run, portion, self._unstarted(run, len(portion)))
                    continue
                task = together.start(self._run_portion(run, portion, move))
                task.add_done_callback(partial(_release, permit.keep()))
                del task  # avoid a reference cycle of task, exception and frame
        return run.failures

    async def _indices_to_move(self, run: _Run) -> Portion:
        """Return the blocks whose servers respond; of a store, those that may have no value."""
        job, client = run.job, self._client
        down = await self._calls.check({client.server_of(key) for key in job.keys}, run.due_s)
        indices: list[int] = []
        for i, key in enumerate(job.keys):
            if (server := client.server_of(key)) in down:
                run.failures[i] = down[server]
            else:
                indices.append(i)
        keys = [job.keys[i] for i in indices]
        unconfirmed = [key for key in keys if self._memory.get(key) is not False]
        if job.is_promotion or not unconfirmed:
            return indices
        try:
            present = await self._questions.ask_anew(unconfirmed, run.due_s)
        except TierError as error:
            drop_tracebacks(error)
            run.failures.update(dict.fromkeys(indices, error))
            return ()
        self._counters.present_blocks += len(present)
        return [i for i in indices if job.keys[i] not in present]

    async def _admitted(self, run: _Run, num_bytes: int) -> Permit | None:
        """Return a permit; None if no call may begin any more. Progress renews the wait."""
        loop, reserved_s = asyncio.get_running_loop(), _RESERVED_PART * self._settings.job_timeout_s
        while (until_s := run.due_s - reserved_s) > loop.time():
            try:
                async with asyncio.timeout_at(until_s):
                    return await run.in_flight.limiter.acquire(num_bytes)
            except TimeoutError:
                continue
        return None

    async def _run_portion(self, run: _Run, portion: Portion, move: MovePortion) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            self._calls.require(self._server_of(run, portion), run.began_s)
            run.failures.update(await move(run.job, portion, run.due_s))
            run.in_flight.alive_s = asyncio.get_running_loop().time()
            run.due_s = self._renewed_deadline(run.job, has_moved=True)
        except TierError as error:
            drop_tracebacks(error)  # their frames hold the rows
            if isinstance(error, TierTimeoutError):
                run.in_flight.back_off(began_s)
            self._fail(run, portion, error)

    def _fail(self, run: _Run, portion: Portion, error: TierError) -> None:
        fault = self._calls.fault_of(self._server_of(run, portion), error)
        run.failures.update(dict.fromkeys(portion, fault))

    def _server_of(self, run: _Run, portion: Portion) -> Server:
        return self._client.server_of(run.job.keys[portion[0]])

    def _renewed_deadline(self, job: JobMetadata, *, has_moved: bool) -> float:
        due_s = self._opened().renew_deadline(job.job_id, has_moved=has_moved)
        return min(due_s, self._deadline(self._settings.job_timeout_s))

    def _unstarted(self, run: _Run, num_blocks: int) -> TierError:
        """Return the error of blocks that were not admitted in time."""
        location = self._client.location
        if run.in_flight.alive_s < run.began_s:
            return TierTimeoutError(f"{location}: the job's deadline passed")
        self._counters.unstarted_blocks += num_blocks
        return JobNotStartedError(
            f"{location}: not started in time, as it queued behind other blocks"
        )

    async def _store_portion(
        self, job: JobMetadata, portion: Portion, deadline_s: float
    ) -> dict[int, TierError]:
        keys, slots = job.keys, job.block_ids

        def wrap() -> list[Parts]:
            rows = np.asarray(self._opened().kv_view)
            if self._client.is_in_place:
                return [
                    self._envelopes.parts(keys[i], rows[slots[i]], self._staging()) for i in portion
                ]
            return [(self._envelopes.wrap(keys[i], rows[slots[i]]).data,) for i in portion]

        values = await self._in_thread(Direction.STORE, wrap)
        missing = [keys[i] for i in portion]
        put = partial(self._client.put, missing, values)
        departure = self._stores.departs(len(portion) * self._envelopes.block_bytes)
        server = self._client.server_of(missing[0])
        try:
            outcomes = await self._calls.run(put, deadline_s, server=server)
        finally:
            if self._client.is_in_place:
                for _, body in values:
                    if self._envelopes.is_sealed:
                        self._staged.append(body)
                    else:
                        body.release()
        exist = [isinstance(error, ValueExistsError) for error in outcomes]
        self._counters.present_blocks += sum(exist)
        sizes = map(self._envelopes.value_bytes, missing)
        sent = (size for size, exists in zip(sizes, exist, strict=True) if not exists)
        self._stores.arrives(departure, sum(sent))
        failures = {
            i: self._redacted(keys[i], error)
            for i, error, exists in zip(portion, outcomes, exist, strict=True)
            if error is not None and not exists
        }
        stored = [keys[i] for i in portion if i not in failures]
        self._memory.appeared(stored)
        if self._renewal is not None:
            self._renewal.written(stored)
        return failures

    async def _load_portion(
        self, job: JobMetadata, portion: Portion, deadline_s: float
    ) -> dict[int, TierError]:
        keys = job.keys
        failures, corrupt = await self._read(job, portion, deadline_s)
        if corrupt:  # perhaps damaged in transit: remove only what fails twice
            self._counters.read_again += len(corrupt)
            for i in corrupt:
                del failures[i]
            again = await self._read(job, list(corrupt), deadline_s, keeps_values=True)
            failures_again, corrupt = again
            failures |= failures_again
        for i, value in corrupt.items():
            self._counters.corrupt += 1
            await self._remove(keys[i], value, deadline_s)
        self._memory.vanished(
            keys[i]
            for i, error in failures.items()
            if isinstance(error, BlockMissingError | CorruptBlockError)
        )
        self._memory.appeared(keys[i] for i in portion if i not in failures)
        return failures

    async def _read(
        self,
        job: JobMetadata,
        indices: Portion,
        deadline_s: float,
        *,
        keeps_values: bool = False,
    ) -> tuple[dict[int, TierError], dict[int, Value]]:
        """Read blocks into their slots; return all failures, and the values of corrupt blocks.

        Values in rows, where they may be decrypted, are copied first if `keeps_values`.
        """
        keys, slots = job.keys, job.block_ids
        rows = np.asarray(self._opened().kv_view)
        targets = {i: self._envelopes.target(keys[i], rows[slots[i]]) for i in indices}
        del rows
        try:
            return await self._read_into(targets, keys, deadline_s, keeps_values=keeps_values)
        finally:
            for target in targets.values():
                target.release()

    async def _read_into(
        self,
        targets: Mapping[int, Target],
        keys: Sequence[OffloadKey],
        deadline_s: float,
        *,
        keeps_values: bool,
    ) -> tuple[dict[int, TierError], dict[int, Value]]:
        wanted = [keys[i] for i in targets]
        get = partial(self._client.get, wanted, list(targets.values()))
        departure = self._loads.departs(len(targets) * self._envelopes.block_bytes)
        server = self._client.server_of(wanted[0])
        found = await self._calls.run(get, deadline_s, server=server)
        failures: dict[int, TierError] = {}
        values: dict[int, Value] = {}
        for (i, target), value in zip(targets.items(), found, strict=True):
            if isinstance(value, Value):
                values[i] = value
                if value.data is not None:
                    target.num_bytes = len(value.data)
            elif value is None:
                failures[i] = BlockMissingError(f"{block_text(keys[i])} is not stored")
            else:
                failures[i] = self._redacted(keys[i], value)
        del found, value
        self._loads.arrives(departure, sum(targets[i].num_bytes for i in values))

        def verify() -> None:
            for i, value in tuple(values.items()):
                if keeps_values and value.data is None:
                    values[i] = replace(value, data=targets[i].copy())
                error = self._envelopes.verify(keys[i], targets[i], value.data)
                if not isinstance(error, CorruptBlockError):
                    del values[i]  # now: the longer it lives, the more fresh pages others need
                if error is not None:
                    failures[i] = error

        await self._in_thread(Direction.LOAD, verify)
        return failures, values

    async def _remove(self, key: OffloadKey, value: Value, deadline_s: float) -> None:
        """Remove a corrupt block if unchanged; a present block would never be overwritten."""
        sha1 = await self._in_thread(Direction.METADATA, value.sha1)
        try:
            call = partial(self._client.remove_if, key, value, sha1)
            server = self._client.server_of(key)
            was_there = await self._calls.run(call, deadline_s, server=server)
            self._counters.removed += was_there  # read the counter only after the await
        except TierError as error:
            self._counters.unremoved += 1
            self._warn(self._unremoved, f"corrupt {block_text(key)} was not removed: {error}")

    def _staging(self) -> memoryview | None:
        """Return memory to encrypt a block in; None if blocks are sent from their rows."""
        if not self._envelopes.is_sealed:
            return None
        try:
            return self._staged.pop()
        except IndexError:
            return np.empty(self._envelopes.block_bytes, dtype=np.uint8).data

    # -- helpers ----------------------------------------------------------------------------------

    def _limited(self, most_bytes: int) -> tuple[InFlight, InFlight]:
        """Return the limits of loads and stores, whose windows grow up to `most_bytes`."""
        first_bytes, settings = self.first_bytes, self._settings
        most_bytes, queue_s = max(most_bytes, first_bytes), _QUEUE_PART * settings.probe_timeout_s
        loads, stores = (
            InFlight(settings.connections, Window(most_bytes, queue_s, first_bytes))
            for _ in range(2)
        )
        return loads, stores

    def _back_off(self, began_s: float) -> None:
        """Reduce what is in flight, after a call or check that found too many calls."""
        for in_flight in (self._loads, self._stores):
            in_flight.alive_s = asyncio.get_running_loop().time()
            in_flight.back_off(began_s)

    async def _renew(self, keys: Sequence[OffloadKey]) -> bool:
        deadline_s = self._deadline(self._settings.job_timeout_s)
        try:
            await self._calls.run(partial(self._client.renew, keys), deadline_s)
        except TierError as error:
            self._warn(self._unrenewed, f"{len(keys)} blocks were not renewed: {error}")
            return False
        return True

    def _warn(self, rate: LogRate, text: str) -> None:
        """Log a server's failure, at most once a minute."""
        more = rate.note(asyncio.get_running_loop().time())
        if more is not None:
            logger.warning("%s: %s%s", self._location, text, more)

    def _emptied(self) -> None:
        """Handle the loss of the server's contents by a restart or flush."""
        self._counters.emptied += 1
        self._memory.emptied()
        logger.warning("%s: the server has lost its contents", self._location)

    def _redacted(self, key: OffloadKey, error: TierError) -> TierError:
        """Redact the error of a block; blame its server alone if other servers work."""
        shown = type(error)(f"{self._client.location}: {self._settings.redact(error)}")
        return self._calls.fault_of(self._client.server_of(key), shown)

    async def _run_long(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run a call that may take as long as a job, such as a list request."""
        timeout_s = self._settings.job_timeout_s
        return await self._calls.run(call, self._deadline(timeout_s), timeout_s=timeout_s)

    def _deadline(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds

    async def _in_thread(self, direction: Direction, call: Callable[[], T]) -> T:
        return await self._opened().io.run(direction, call)

    def _opened(self) -> TierEnvironment:
        """Return the environment of the open tier.

        Keep neither it nor its rows across awaits of the library: its errors may hold the callers'
        frames, which must not refer to the primary.
        """
        if self._env is None:
            raise TierClosedError(f"{self._location} is not open")
        return self._env


def _release(release: Callable[[], None], _task: asyncio.Task[None]) -> None:
    release()
