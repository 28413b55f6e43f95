"""Management of the cached blocks of an `OffloadEngine` at run time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from kvoffload_async.async_engine.steps import Steps
from kvoffload_async.errors import StateError
from kvoffload_async.facade.cache import CacheOperation, CacheReport
from kvoffload_async.facade.driver import PlannerDriver
from kvoffload_async.types import OffloadKey
from kvoffload_async.waiting import seconds


class EngineCache:
    """Deletes, counts and pins blocks of an engine's primary and tiers, by their block hashes.

    `places` are names of tiers as in `stats()`, and `"primary"`; None: all places. `tenant` is the
    name of the tenant whose blocks are meant; None: the default one, or there are no tenants.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(self, driver: PlannerDriver, steps: Steps) -> None:
        """Manage the blocks of a driver, in the steps of an engine."""
        self._driver = driver
        self._steps = steps

    async def delete(
        self,
        block_hashes: Sequence[bytes] | None = None,
        places: Collection[str] | None = None,
        timeout_s: float = 30.0,
        *,
        tenant: str | None = None,
    ) -> CacheReport:
        """Delete blocks; see `CacheManager.delete` for the guarantees.

        No lookup finds them from the next step on, also if the call is cancelled or its time ends:
        the deletion goes on, and stores leave the blocks out until it is complete.

        Args:
            block_hashes: The blocks' hashes; None: all blocks of the tenant, of every generation,
                which is then named. End its requests first: what they store meanwhile may stay.
            places: Where to delete them.
            timeout_s: Seconds to wait.
            tenant: The blocks' tenant.

        Returns:
            What is deleted and left; nothing is left unless the time has ended.

        Raises:
            StateError: A hash, a place or the tenant is not valid, or a tier cannot delete, or for
                all blocks of a tenant cannot list.
            BusyError: Too many operations or blocks.
        """
        self._steps.ensure_open()
        deadline_s, cache = self._deadline(timeout_s), self._driver.cache
        if block_hashes is None:
            if tenant is None:
                raise StateError("tenant: missing; name the tenant to delete all blocks of")
            operation = cache.delete_all(self._driver.owner_test(tenant), places)
        else:
            operation = cache.delete(self._keys(block_hashes, tenant), places)
        return await self.finish(operation, deadline_s)

    async def count(
        self,
        block_hashes: Sequence[bytes],
        places: Collection[str] | None = None,
        timeout_s: float = 30.0,
        *,
        tenant: str | None = None,
    ) -> CacheReport:
        """Count how many of the blocks each place has; errors as for `delete`."""
        deadline_s, keys = self._deadline(timeout_s), self._keys(block_hashes, tenant)
        return await self.finish(self._driver.cache.count(keys, places), deadline_s)

    async def copy(
        self,
        block_hashes: Sequence[bytes],
        tier: str,
        *,
        source: str | None = None,
        timeout_s: float = 30.0,
        tenant: str | None = None,
    ) -> CacheReport:
        """Store blocks in a tier, or move them there; see `CacheManager.copy`."""
        deadline_s, keys = self._deadline(timeout_s), self._keys(block_hashes, tenant)
        operation = self._driver.cache.copy(keys, tier, source=source)
        return await self.finish(operation, deadline_s)

    async def list_keys(
        self,
        place: str,
        cursor: str | None = None,
        timeout_s: float = 30.0,
        *,
        older_than_s: float | None = None,
        tenant: str | None = None,
    ) -> CacheReport:
        """List some keys of the blocks at one place; see `CacheManager.list_keys`.

        With a tenant, only its keys are listed.
        """
        self._steps.ensure_open()
        deadline_s = self._deadline(timeout_s)
        selects = None if tenant is None else self._driver.owner_test(tenant)
        operation = self._driver.cache.list_keys(place, cursor, older_than_s, selects)
        return await self.finish(operation, deadline_s)

    async def clear(self, tiers: Collection[str], timeout_s: float = 30.0) -> CacheReport:
        """Delete all blocks of tiers; see `CacheManager.clear`. Goes on after the time's end."""
        self._steps.ensure_open()
        deadline_s = self._deadline(timeout_s)
        return await self.finish(self._driver.cache.clear(tiers), deadline_s)

    def pin(
        self, block_hashes: Sequence[bytes], duration_s: float, *, tenant: str | None = None
    ) -> int:
        """Keep readable blocks in the primary for a time; see `CacheManager.pin`."""
        count = self._driver.cache.pin(self._keys(block_hashes, tenant), duration_s)
        self._steps.schedule()  # sets the timer for the end of the pins
        return count

    def unpin(self, block_hashes: Sequence[bytes], *, tenant: str | None = None) -> int:
        """End the pins of blocks; return how many there were."""
        count = self._driver.cache.unpin(self._keys(block_hashes, tenant))
        self._steps.note_progress()
        return count

    def _keys(self, block_hashes: Sequence[bytes], tenant: str | None) -> list[OffloadKey]:
        self._steps.ensure_open()
        return self._driver.make_keys(block_hashes, self._driver.named_tenant(tenant))

    def _deadline(self, timeout_s: float) -> float:
        return asyncio.get_running_loop().time() + seconds(timeout_s)

    async def finish(self, operation: CacheOperation, deadline_s: float) -> CacheReport:
        """Wait until an operation has ended, or for the deadline; return its report."""
        loop = asyncio.get_running_loop()
        self._steps.schedule()
        while not operation.is_done and loop.time() < deadline_s:
            await self._steps.next_progress(deadline_s)
        return operation.report
