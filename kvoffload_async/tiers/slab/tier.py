"""The `slab` tier: a bounded store of preallocated segments, owned by one process."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.tier import (
    AsyncTier,
    Direction,
    TierBounds,
    TierCapabilities,
    TierEnvironment,
)
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    TierBusyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    Trouble,
)
from kvoffload_async.policies.tenants import tenant_gauges
from kvoffload_async.tables.keymap import key_of_cursor
from kvoffload_async.tiers.files.identity import LostDirectoryError
from kvoffload_async.tiers.files.modes import warn_of_others
from kvoffload_async.tiers.files.ops import FileOps, mapped, unusable
from kvoffload_async.tiers.slab.addresses import SlotAddress
from kvoffload_async.tiers.slab.layout import Budget, StoreLayout
from kvoffload_async.tiers.slab.opening import OpenStore, SlabSettings
from kvoffload_async.tiers.slab.records import MAX_KEY_BYTES
from kvoffload_async.tiers.slab.transfers import (
    Blocks,
    LoadBatch,
    StoreBatch,
    Transfers,
    in_order_of_addresses,
)
from kvoffload_async.types import JobMetadata, OffloadKey, block_text

logger = logging.getLogger(__name__)

_REGROW_S = 60.0
"""Seconds until the store may grow again after the disk was full."""

_LEAST_SHARE = 16
"""A segment has at least a full one's slots divided by this, unless it is the only one."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Allocator:
    """Allocates the slots of one open store: growth up to the capacity, then eviction.

    If the disk is full below the capacity, the store stops growing, and tries again later.
    Thread: loop.
    """

    def __init__(self, store: OpenStore, env: TierEnvironment) -> None:
        self._store = store
        self._budget = store.budget
        self._env = env
        self._growing = asyncio.Lock()
        self._limit_slots: int | None = None
        self._limited_until_s = 0.0
        self._is_grown = False
        """Whether the capacity has no space for another segment."""
        self.why_limited = ""
        """Why the last segment was not created; empty if it was."""

    async def claim(self, keys: Sequence[OffloadKey]) -> list[SlotAddress]:
        """Return ascending addresses for absent keys; if too few are free, only for the first keys.

        Announces evicted blocks, and buffers their removals until the next append to the journal.
        """
        store, catalog = self._store, self._store.catalog
        while catalog.num_free < len(keys) and not self._is_grown and await self._grow(len(keys)):
            pass
        ahead = self._budget.slots_ahead if self._is_grown else 0
        addresses, victims, freed = catalog.claim(keys, ahead)
        if victims:
            store.journal.note_removed(freed)
            self._env.blocks_evicted(victims)
        return addresses

    async def _grow(self, wanted: int) -> bool:
        """Add segments; return False if no more can be added now."""
        async with self._growing:
            if self._store.catalog.num_free >= wanted:
                return True  # another task has grown it meanwhile
            for _ in range(self._budget.stripes):
                if not await self._add_segment():
                    return False
            return True

    async def _add_segment(self) -> bool:
        """Add a segment; return False if none can be added now."""
        slots, created = self._next_slots(), list[int]()
        while slots:
            try:
                create = partial(self._create, slots, created)
                await self._env.io.run(Direction.STORE, create)
            except LostDirectoryError as error:
                raise mapped(error) from error  # a fault, not a full disk
            except OSError as error:
                slots = self._smaller(slots, error)
            else:
                return True
            finally:  # also if cancelled: the segment exists
                for number in created:
                    self.why_limited = ""
                    self._store.table.add_segment(number, slots)
                    self._store.catalog.add_segment(number, slots)
        return False

    def _create(self, slots: int, created: list[int]) -> None:
        """Create a segment, after reserving journal space for it; append its number to `created`.

        Thread: an I/O thread.
        """
        store = self._store
        store.journal.reserve(slots + sum(store.table.slots().values()))
        created.append(store.segments.create(slots))
        store.journal.note_new_file()

    def _next_slots(self) -> int:
        present = self._store.catalog.segments.values()
        allowed = None
        if asyncio.get_running_loop().time() < self._limited_until_s:
            allowed = max(0, (self._limit_slots or 0) - sum(present))
        slots = self._budget.next_segment(present, allowed)
        self._is_grown = not slots and allowed is None
        return slots

    def _smaller(self, slots: int, error: OSError) -> int:
        """Return the number of slots to retry a failed creation with; 0: stop growing."""
        present = self._store.catalog.segments
        is_full = error.errno in _NO_SPACE
        if self._limit_slots is None or not is_full:
            logger.warning(
                "%s: growth stopped below the capacity: %s", self._store.folder, str(error)
            )
        least = self._budget.segment_slots // _LEAST_SHARE if present else 0
        slots = slots // 2 if is_full and slots // 2 > least else 0
        self._limit_slots = sum(present.values()) + slots
        self._limited_until_s = asyncio.get_running_loop().time() + _REGROW_S
        self.why_limited = str(error)
        return slots


_SMALL_JOBS_BYTES = 64 << 20
"""Limit on the bytes of concurrent small jobs per direction."""

_OPENING_S = 1e-5
"""Opening time per block in the store, in seconds; about ten times the measured cost."""


class SlabTier(AsyncTier):
    """A store of fixed capacity in preallocated files, for a local disk and one process.

    Only the loop accesses the index. `BlockIo` copies a job's blocks and computes their checksums;
    I/O threads manage the files and write the journal.
    """

    declares = SlabSettings
    remedies: ClassVar = {
        CorruptBlockError: "not served; if this recurs, check the disk: kvoffload store verify",
        TierFullError: "no blocks are stored until there is space: free some on the disk, or raise "
        "capacity_bytes",
        TierTimeoutError: "check the disk; if it is only slow, raise io_timeout_s",
        Trouble.TOO_SLOW: "raise cpu_bytes_to_use, set write_back to wait, or make the tier "
        "faster: raise io_threads, or use a faster disk",
    }
    capabilities = TierCapabilities(
        exclusive=True,
        persistent=True,
        announces_removals=True,
        pins=True,
        discards=True,
        deletes=True,
        lists=True,
    )

    def __init__(
        self,
        settings: SlabSettings,
        create_policy: Callable[[int], CachePolicy] | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """Configure the tier; nothing is accessed before `open`.

        Args:
            settings: See `SlabSettings`.
            create_policy: Creates the eviction policy, given the maximum number of blocks; by
                default that of the settings.
            ops: System calls, by default those of the settings; tests inject faults here.
        """
        self.capabilities = replace(self.capabilities, locality=settings.locality)
        self.bounds = TierBounds()
        self.io_threads = settings.io_threads
        self._settings = settings
        self._create_policy = create_policy or settings.create_policy
        self._ops = ops or settings.ops or FileOps()
        self._store: OpenStore | None = None
        self._writing: dict[OffloadKey, asyncio.Future[None]] = {}
        self._pinned: dict[OffloadKey, list[SlotAddress]] = {}
        """Pinned key -> an address for each pin."""

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Imported on demand, because it loads anyio.
        from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance  # noqa: PLC0415

        return SlabMaintenance

    def opening_s(self, block_bytes: int) -> float:
        """Return an upper bound of the time to read a full journal, in seconds."""
        return _OPENING_S * (self._settings.capacity_bytes // block_bytes)

    async def open(self, env: TierEnvironment) -> None:
        """Lock the store, read its journal, and announce its blocks.

        Raises:
            ConfigError: The directory is unusable, the store in it is open elsewhere or of another
                layout, or the capacity cannot hold one block.
            TierUnavailableError: Descriptors, memory or threads are exhausted.
        """
        settings = self._settings
        self._env = env
        self._loop = asyncio.get_running_loop()
        block_bytes = env.kv_view.nbytes // len(env.kv_view)
        budget = settings.budget(block_bytes)
        key_id = None if (key := settings.integrity_key) is None else key.id.hex()
        identity = settings.run_config, settings.rank, block_bytes, key_id
        layout = StoreLayout(settings.root_dir, *identity, is_encrypted=settings.is_encrypted)
        opened: list[OpenStore] = []
        is_given_up = threading.Event()
        construct = partial(self._open_store, layout, budget, opened, is_given_up)
        try:
            await env.io.run(Direction.METADATA, construct, withdraw=is_given_up.set)
        except BaseException as error:
            is_given_up.set()
            if opened:  # cancelled as the call ended; the I/O threads may be gone
                close = partial(self._close_given_up, opened)
                threading.Thread(target=close, name="kvoffload-close", daemon=True).start()
            if isinstance(error, OSError):
                raise unusable(settings.root_dir, error) from error
            raise
        store = opened.pop()
        try:
            self._transfers = Transfers(env, self._ops, store)
        except BaseException:
            await self._env.io.run(Direction.METADATA, partial(self._close_store, store))
            raise
        self._store = store
        self._allocator = Allocator(store, env)
        small = min(_SMALL_JOBS_BYTES, settings.capacity_bytes // 8) // budget.slot_bytes
        self.bounds = TierBounds(concurrent_blocks=small)
        env.blocks_appeared(store.found_keys)

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that are stored."""
        return frozenset(self._opened().catalog.present(keys))

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Write the blocks that are not stored yet."""
        store = self._opened()
        while busy := self._written_by_others(job.keys):
            await asyncio.wait(busy)  # ends, because each job that writes them ends
        found = store.catalog.find(job.keys)
        absent = [index for index, address in enumerate(found) if address is None]
        missing: Sequence[OffloadKey] = job.keys
        present: list[SlotAddress] = []
        if len(absent) < len(found):
            missing = [job.keys[index] for index in absent]
            present = [address for address in found if address is not None]
            store.catalog.pin(present)
        done = self._loop.create_future()
        self._writing.update(dict.fromkeys(missing, done))
        try:
            if present:
                store.catalog.used(job.keys)
            return await self._store_absent(store, job, absent)
        except BaseException:
            # The job fails as a whole, but journalled blocks are in the store.
            self._env.blocks_appeared(list(store.catalog.present(missing)))
            raise
        finally:
            for key in missing:
                del self._writing[key]
            done.set_result(None)
            if present:
                store.catalog.unpin(present)

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Read blocks directly into the job's slots, and verify them there."""
        store = self._opened()
        found = store.catalog.find(job.keys)
        failures: dict[int, TierError] = {
            index: BlockMissingError(f"{block_text(job.keys[index])} is not stored")
            for index, address in enumerate(found)
            if address is None
        }
        blocks, order = in_order_of_addresses(job, found)
        if not order:
            return failures
        batch = LoadBatch(store, blocks)
        store.catalog.pin(blocks.addresses)
        try:
            await self._transfers.load(batch)
            failures |= {order[index]: error for index, error in batch.failures.items()}
            used = job.keys
            if failures:
                used = tuple(key for i, key in enumerate(job.keys) if i not in failures)
            store.catalog.used(used)
        finally:
            for index in batch.dropped:  # also if cancelled: their records are gone
                store.catalog.drop(blocks.keys[index], blocks.addresses[index])
            store.catalog.unpin(blocks.addresses)
        return failures

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of blocks, ordered head to tail."""
        if self._store is not None:
            self._store.catalog.used(keys)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep blocks from being evicted."""
        if self._store is None:
            return
        present = self._store.catalog.present(keys)
        self._store.catalog.pin(present.values())
        for key, address in present.items():
            self._pinned.setdefault(key, []).append(address)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Remove one pin from each block."""
        addresses = []
        for key in keys:
            if pins := self._pinned.get(key):
                addresses.append(pins.pop())
                if not pins:
                    del self._pinned[key]
        if self._store is not None:
            self._store.catalog.unpin(addresses)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks; on disk, they are removed with the next append to the journal."""
        if self._store is None:
            return
        gone = self._store.catalog.remove_unpinned(keys)
        if gone:
            self._store.journal.note_removed(list(gone.values()))
            self._env.blocks_evicted(gone)

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Remove blocks, and write their removals to the journal; their bytes are not erased.

        Raises:
            TierError: The journal cannot be written; the blocks are gone until the next start.
        """
        store = self._opened()
        gone = store.catalog.remove_unpinned(keys)
        store.journal.note_removed(list(gone.values()))
        await self._transfers.flush()
        if not self._pinned:
            return {}
        pinned = TierBusyError(f"pinned in {self._settings.root_dir}")
        return {i: pinned for i, key in enumerate(keys) if key in self._pinned}

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Return keys in the order of the index; a cursor is a key in hexadecimal digits."""
        after = key_of_cursor(cursor)
        keys = self._opened().catalog.following(after, count)
        return keys, keys[-1].hex() if len(keys) == count else None

    async def close(self) -> None:
        """Flush the journal, close all files, release the lock; idempotent."""
        store, self._store = self._store, None
        if store is not None:
            await self._transfers.close()
            await self._env.io.run(Direction.METADATA, partial(self._close_store, store))

    def gauges(self) -> Mapping[str, float]:
        """Return the numbers of blocks, free slots and bytes."""
        if (store := self._store) is None:
            return {}
        return {
            "blocks": len(store.catalog),
            "free_slots": store.catalog.num_free,
            "used_bytes": len(store.catalog) * store.manifest.slot_bytes,
            "capacity_bytes": store.budget.capacity_bytes,
            **tenant_gauges(store.catalog.policy, store.manifest.slot_bytes),
        }

    def describe(self) -> str:
        """Return the store's location."""
        return f"slabs below {self._settings.root_dir}"

    # -- storing --------------------------------------------------------------------------------

    def _written_by_others(self, keys: Sequence[OffloadKey]) -> Collection[asyncio.Future[None]]:
        """Return futures of other jobs that write these keys, to avoid writing a key twice."""
        if self._writing.keys().isdisjoint(keys):
            return ()
        return {self._writing[key] for key in keys if key in self._writing}

    async def _store_absent(
        self, store: OpenStore, job: JobMetadata, indices: Sequence[int]
    ) -> BlockFailures:
        """Write as many absent blocks of each tenant as there are addresses for it."""
        quotas, failures = self._settings.quotas, dict[int, TierError]()
        for group in [indices] if quotas is None else quotas.grouped(job.keys, indices):
            failures |= await self._store_tenants(store, job, group)
        return failures

    async def _store_tenants(
        self, store: OpenStore, job: JobMetadata, indices: Sequence[int]
    ) -> BlockFailures:
        """Write as many absent blocks as there are free addresses, head first."""
        keys = job.keys
        failures: dict[int, TierError] = {
            index: TierUnavailableError(
                f"the key has {len(keys[index])} bytes; at most {MAX_KEY_BYTES} are supported"
            )
            for index in indices
            if len(keys[index]) > MAX_KEY_BYTES
        }
        if failures:
            indices = [index for index in indices if index not in failures]
        if not indices:
            return failures
        wanted: Sequence[OffloadKey] = keys
        rows = job.block_ids.tolist()
        if len(indices) < len(keys):
            wanted, rows = [keys[index] for index in indices], [rows[index] for index in indices]
        addresses = await self._allocator.claim(wanted)
        why = self._allocator.why_limited or "nothing to evict"
        unplaced = TierFullError(f"no free slot in {self._settings.root_dir}: {why}")
        failures |= dict.fromkeys(indices[len(addresses) :], unplaced)
        if not addresses:
            return failures
        count = len(addresses)
        batch = StoreBatch(store, Blocks(wanted[:count], addresses, rows[:count]))
        try:
            await self._transfers.store(batch)
        finally:  # also if cancelled: journalled blocks are in the store
            self._take_in(store, batch)
        failures |= {indices[index]: error for index, error in batch.failures.items()}
        return failures

    def _take_in(self, store: OpenStore, batch: StoreBatch) -> None:
        """Add the written blocks of a batch to the catalog."""
        keys, addresses, _ = batch.blocks
        bad: Collection[int] = batch.failures if batch.is_journalled else batch.indices
        if bad:
            store.catalog.release([addresses[index] for index in bad])
            good = [index for index in batch.indices if index not in bad]
            keys, addresses = [keys[i] for i in good], [addresses[i] for i in good]
        store.catalog.admit(keys, addresses)

    # -- opening and closing ----------------------------------------------------------------------

    def _open_store(
        self,
        layout: StoreLayout,
        budget: Budget,
        opened: list[OpenStore],
        is_given_up: threading.Event,
    ) -> None:
        """Open the root directory, creating it if missing, and the store in it.

        The store is appended to `opened`. If the opening was given up meanwhile, it is closed, so
        that it can be opened again. Thread: an I/O thread.
        """
        settings, root_dir = self._settings, self._settings.root_dir
        self._ops.enter(root_dir, settings.modes, sync=settings.fsync)
        try:
            warn_of_others(root_dir, self._ops.stat(root_dir))
            opened.append(OpenStore(self._ops, layout, settings, budget, self._create_policy))
        except BaseException:
            self._ops.leave(root_dir)
            raise
        if is_given_up.is_set():
            self._close_given_up(opened)

    def _close_given_up(self, opened: list[OpenStore]) -> None:
        """Close a store that is not awaited, unless another thread has. Thread: not the loop's."""
        try:
            store = opened.pop()
        except IndexError:
            return
        self._close_store(store)

    def _close_store(self, store: OpenStore) -> None:
        """Close the store and the root directory. Thread: an I/O thread."""
        try:
            store.close()
        finally:
            self._ops.leave(self._settings.root_dir)

    def _opened(self) -> OpenStore:
        if self._store is None:
            raise TierClosedError("the slab tier is not open")
        return self._store
