"""The engine itself, and its search for a request's longest prefix.

The same core as behind the synchronous facade, on the caller's loop: no second thread decides
anything. A *step* of the core is one turn of the loop in which something happened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from kvoffload_async.abc.tier import Direction
from kvoffload_async.async_engine.lifecycle import EngineLifecycle
from kvoffload_async.async_engine.request import NO_BLOCKS, EngineRequest, Waiter
from kvoffload_async.errors import InvalidatedError, StateError
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.tables.keymap import require_keys
from kvoffload_async.types import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    as_block_ids,
)


class PrefixSearch:
    """Looks up every block once, and again only when something has happened to that block.

    A block that was readable in an earlier turn of the loop is looked up once more at the end: it
    may have been evicted, since nothing pins it before.
    """

    def __init__(
        self, manager: TieringOffloadingManager, request: EngineRequest, waiter: Waiter
    ) -> None:
        """Look up all blocks up to the first missing one, so that all promotions start at once."""
        self._manager = manager
        self._keys = request.keys
        self._ctx = request.ctx
        self._waiter = waiter
        self._end = len(self._keys)
        self._undecided: dict[OffloadKey, None] = {}
        self._current: set[OffloadKey] = set()
        """The keys that were looked up in this turn of the loop."""
        self._look_up(self._keys)

    def look_again(self, changed: Collection[OffloadKey]) -> None:
        """Look up those of the undecided blocks that have changed; all of them if none is named."""
        positions = self._ctx.key_positions
        self._current.clear()
        is_notified = self._is_notified
        named = (
            self._undecided.keys() & set(changed) if changed and is_notified else self._undecided
        )
        self._look_up(sorted(named, key=positions.__getitem__))
        rest = next((key for key in self._undecided if key not in self._current), None)
        if rest is not None:
            self._look_up([rest])  # the blocks found are retained while the request is deferred

    def settled(self) -> int | None:
        """Return the blocks of the prefix, all readable now; None while some are undecided."""
        if not self._undecided:
            stale = [key for key in self._keys[: self._end] if key not in self._current]
            self._look_up(stale)
        return None if self._undecided else self._end

    def readable(self) -> int:
        """Return how many blocks before the first undecided one are readable now."""
        count = min(map(self._ctx.key_positions.__getitem__, self._undecided)) - 1
        answers = self._manager.lookup_many(self._keys[:count], self._ctx, stop_at_miss=True)
        is_hit = [answer is LookupResult.HIT for answer in answers]
        return count if all(is_hit) else is_hit.index(False)

    @property
    def _is_notified(self) -> bool:
        """Whether every tier announces its answers; external ones do not, and may open late."""
        return all(tier.index.notifies for tier in self._manager.planner.tiers)

    def _look_up(self, keys: Sequence[OffloadKey]) -> None:
        """Look up keys, head to tail; those behind a miss are of no use."""
        if not keys:
            return
        undecided = self._undecided
        answers = self._manager.lookup_many(keys, self._ctx, stop_at_miss=True)
        is_notified = self._is_notified  # a tier may have opened at the call
        self._current.update(keys[: len(answers)])
        for key, answer in zip(keys, answers, strict=False):
            if answer is LookupResult.HIT:
                undecided.pop(key, None)
            elif answer is LookupResult.MISS:
                self._end_before(key)
            else:
                undecided[key] = None
                self._waiter.expect(key)
                if answer is LookupResult.RETRY and not is_notified:
                    self._waiter.expect_progress()

    def _end_before(self, key: OffloadKey) -> None:
        positions = self._ctx.key_positions
        self._end = end = self._keys.index(key)
        self._undecided = {key: None for key in self._undecided if positions[key] <= end}


class OffloadEngine(EngineLifecycle):
    """Moves the KV blocks of many concurrent requests, of one KV-cache group.

    Every call has a deadline. A call that is cancelled, or whose deadline passes, leaves nothing
    half-owned: a copy that has begun goes on without it, and what it holds is let go when the
    bytes have stopped moving. Until then the request's `occupied_blocks` names the device blocks
    that must not be given to anybody else.

    Thread: the loop's, for all of it but `stats`.
    """

    # -- requests -------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(
        self,
        req_id: str,
        block_hashes: Sequence[bytes],
        kv_transfer_params: dict[str, Any] | None = None,
        *,
        trace_context: object | None = None,
    ) -> AsyncIterator[EngineRequest]:
        """Begin a request; leaving the block ends it. Its copies may end later.

        Args:
            req_id: A name, for messages and for tiers; others may have the same.
            block_hashes: The chained hash of each of its full blocks, head to tail.
            kv_transfer_params: Passed through to the tiers.
            trace_context: What its spans are to belong to; see `ReqContext`.

        Raises:
            StateError: A hash is empty, or longer than 92 bytes (84 with a generation).
        """
        self._require_open()
        generation = self._manager.generation
        keys = tuple(generation.key(block_hash) for block_hash in block_hashes)
        require_keys(keys)
        positions: dict[OffloadKey, int] = {}
        for position, key in enumerate(keys, 1):
            positions.setdefault(key, position)  # of a hash that comes twice, the first
        ctx = ReqContext(req_id, kv_transfer_params, positions, trace_context=trace_context)
        self._manager.on_new_request(ctx)
        request = EngineRequest(ctx, keys, self._steps.waiters)
        self._requests[request] = None
        try:
            yield request
        finally:
            del self._requests[request]
            request.wake()
            if self._is_open:
                self._unpin(request)
                self._manager.on_request_finished(ctx)
                self._steps.note_progress()

    async def lookup(self, request: EngineRequest, timeout_s: float = 10.0) -> int:
        """Bring a request's longest prefix into the primary, and pin it there.

        Blocks in secondary tiers are promoted; the call waits for them. At the deadline the
        prefix that is readable by then is taken.

        Returns:
            The blocks of the prefix; they stay pinned until `load`, the next `lookup`, or the
            request's end.
        """
        self._require_open()
        self._unpin(request)
        deadline_s = self._loop.time() + timeout_s
        # The core's own limit on deferrals takes effect when it is asked.
        limit_s = self._loop.time() + self._config.deferral_timeout_s
        with request.call() as waiter:
            search = PrefixSearch(self._manager, request, waiter)
            while True:
                found = search.settled()
                if found is None and self._loop.time() >= deadline_s:
                    found = search.readable()
                self._steps.schedule()
                if found is not None:
                    return self._pin(request, found)
                try:
                    changed = await waiter.wait(min(deadline_s, limit_s))
                    self._steps.ensure_open()
                except BaseException:
                    self._stop_waiting(request)
                    raise
                if self._loop.time() >= limit_s:
                    limit_s, changed = limit_s + self._config.deferral_timeout_s, {}
                search.look_again(changed)

    async def load(
        self, request: EngineRequest, device_blocks: Sequence[int], timeout_s: float = 30.0
    ) -> int:
        """Copy the pinned prefix into device blocks, behind what has been computed so far.

        A call that is cancelled or raises TimeoutError may leave a copy that still writes: into
        `request.occupied_blocks`, until `request.released` returns. After any other end of the
        call none of the device blocks is written any more.

        Args:
            request: A request whose `lookup` has found something.
            device_blocks: `blocks_per_chunk` device blocks for each block of the prefix that is
                to be loaded, from its head; the rest of the prefix is let go.
            timeout_s: Seconds until the call gives up.

        Returns:
            The blocks that were loaded.

        Raises:
            StateError: The device blocks do not match the prefix, or it was let go while the call
                waited for a permit.
            InvalidatedError: A `reset` or `invalidate` came since the lookup: compute the blocks.
            BusyError: Too many loads are waiting.
            TimeoutError: The deadline passed; a copy that has begun goes on.
            TransportError: The copy failed; the device blocks' contents are undefined.
        """
        self._require_open()
        count = self._count(device_blocks)
        if count:
            self._require_valid(request)
        if count > request.prefix_blocks:
            raise StateError(f"{count} blocks are asked for, {request.prefix_blocks} are pinned")
        if not count:
            self._unpin(request)
            return 0
        claimed, generation = request.slots, request.primary_generation
        deadline_s = self._loop.time() + timeout_s
        with await self._transfers.permit(Direction.LOAD, deadline_s, request.ctx) as permit:
            await self._steps.ready(deadline_s)
            self._require_valid(request)
            if request.slots is not claimed:
                raise StateError("the prefix was let go while the load waited for a permit")
            keys, rest = request.keys[:count], request.keys[count : request.prefix_blocks]
            request.prefix_blocks, request.slots = 0, NO_BLOCKS  # the copy holds them from now on
            self._manager.complete_load(rest, request.ctx, generation)
            await self._transfers.run(
                Direction.LOAD,
                device_blocks,
                CPULoadStoreSpec(claimed[:count]),
                ctx=request.ctx,
                permit=permit,
                ended=partial(
                    self._load_ended, keys, request, generation, request.occupy(device_blocks)
                ),
                deadline_s=deadline_s,
            )
        if not self._manager.generation.has(keys[0]):
            raise _invalidated(request)
        return count

    async def store(
        self,
        request: EngineRequest,
        device_blocks: Sequence[int],
        first_block: int = 0,
        timeout_s: float = 30.0,
    ) -> int:
        """Copy blocks from the device, behind what has been computed so far; then they cascade.

        What there is room for is stored at once, head first, the rest as room comes, as long as it
        can come; `request.left_out` is what was not stored in the end.

        The device blocks must stay as they are until the call returns. A call that is cancelled or
        raises TimeoutError may leave a copy that still reads: `request.occupied_blocks`, until
        `request.released` returns.

        Args:
            request: The request.
            device_blocks: `blocks_per_chunk` device blocks for each block.
            first_block: Which block of the request the first ones belong to.
            timeout_s: Seconds until the call gives up, waiting for room included.

        Returns:
            The blocks that were not stored before, and are now.

        Raises:
            StateError: The request has no such blocks.
            BusyError: Too many stores are waiting, or there was no room until the deadline.
            TimeoutError: The deadline passed; a copy that has begun goes on.
            TransportError: A copy failed; those before it stay stored.
        """
        self._require_open()
        count = self._count(device_blocks)
        keys = request.keys[first_block : first_block + count]
        if first_block < 0 or len(keys) != count:
            raise StateError(f"the request has no {count} blocks from block {first_block} on")
        deadline_s = self._loop.time() + timeout_s
        return await self._stores.store(request, keys, device_blocks, deadline_s)

    async def quiesce(self, timeout_s: float = 30.0) -> bool:
        """Wait for the copies to or from the device that run now; False at the deadline.

        Those of other requests too, but none that begins later. `EngineRequest.released` waits
        for the copies of one request.
        """
        return await self._transfers.quiesce(timeout_s)

    # -- a new start ----------------------------------------------------------------------------

    async def reset(self, timeout_s: float | None = None) -> None:
        """Empty the primary; the secondary tiers keep their blocks.

        Loads, stores and promotions are held back until it is done. Waits for copies to and from
        the device, and for running jobs of the tiers; those jobs that have not ended at the
        deadline are given up. What requests had pinned is gone, and a `load` of it raises
        InvalidatedError.

        Args:
            timeout_s: Seconds, by default the configuration's `drain_timeout_s`.

        Raises:
            TimeoutError: A copy to or from the device still runs at the deadline, or another
                reset does; nothing was reset.
        """
        self._require_open()
        limit_s = self._config.drain_timeout_s if timeout_s is None else timeout_s
        deadline_s = self._loop.time() + limit_s
        await self._steps.ready(deadline_s)
        self._steps.resetting = ended = self._loop.create_future()
        planner = self._manager.planner
        planner.promotions_paused = True
        try:
            if not await self._transfers.quiesce(deadline_s - self._loop.time()):
                raise TimeoutError("a copy to or from the device still runs: nothing was reset")
            self._steps.schedule()
            while planner.jobs and self._loop.time() < deadline_s:
                await self._steps.next_progress(deadline_s)
            self._require_open()
            self._manager.reset_cache_now()
            for request in self._requests:
                request.invalidate()
        finally:
            self._steps.resetting = None
            ended.set_result(None)
            self._manager.on_reset_flushed()
            self._steps.note_progress()
            self._steps.waiters.wake_all()

    def invalidate(self, generation: int | str) -> None:
        """Begin another generation: the weights have changed. Waits for nothing.

        From now on no block of a former generation is served, from the primary or any tier,
        whatever of it is still on the way: later requests have other keys. Requests in flight find
        nothing, store nothing more, and a `load` of what they had found raises InvalidatedError.
        Start with the same `generation` in the configuration after a restart. One that comes again
        finds its blocks again: never use a label for other weights.

        Raises:
            ConfigError: It is neither an integer nor a label.
        """
        self._require_open()
        self._manager.invalidate(generation)
        for request in self._requests:
            self._unpin(request)
            request.invalidate()
        self._steps.waiters.wake_all()

    async def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until a tier or a copy has reported something; for drivers that watch the engine."""
        self._require_open()
        await self._steps.next_progress(self._loop.time() + timeout_s)

    def events(self) -> AsyncIterator[OffloadingEvent]:
        """Iterate over what appears in and disappears from the tiers, until close.

        From the first iteration on; a reader that is slower than the engine misses the oldest:
        their sequence numbers are left out, and `stats().missed_events` counts them.
        """
        return self._steps.events()

    # -- inside ---------------------------------------------------------------------------------

    def _require_valid(self, request: EngineRequest) -> None:
        if request.is_invalidated:
            raise _invalidated(request)

    def _count(self, device_blocks: Sequence[int]) -> int:
        per_chunk = self._config.blocks_per_chunk
        try:
            as_block_ids(device_blocks)
        except (TypeError, OverflowError) as error:
            raise StateError(f"device_blocks are numbers of device blocks: {error}") from None
        if len(device_blocks) % per_chunk:
            raise StateError(f"{len(device_blocks)} blocks: {per_chunk=} does not divide that")
        return len(device_blocks) // per_chunk

    def _pin(self, request: EngineRequest, count: int) -> int:
        self._unpin(request)  # what a lookup beside this one has pinned
        request.is_invalidated = False
        if count:
            spec = self._manager.prepare_load(request.keys[:count], request.ctx)
            request.slots, request.primary_generation = spec.block_ids, spec.generation
        request.prefix_blocks = count
        self._stop_waiting(request)
        return count

    def _stop_waiting(self, request: EngineRequest) -> None:
        if self._manager.on_request_scheduled(request.ctx):
            self._steps.note_progress()

    def _unpin(self, request: EngineRequest) -> None:
        count, request.prefix_blocks, request.slots = request.prefix_blocks, 0, NO_BLOCKS
        if count:
            self._manager.complete_load(
                request.keys[:count], request.ctx, request.primary_generation
            )
            self._steps.note_progress()

    def _load_ended(
        self,
        keys: Sequence[OffloadKey],
        request: EngineRequest,
        generation: int,
        release: Callable[[], None],
        _success: bool,
    ) -> None:
        release()
        self._manager.complete_load(keys, request.ctx, generation)
        self._steps.note_progress()


def _invalidated(request: EngineRequest) -> InvalidatedError:
    return InvalidatedError(
        f"the cache was reset or invalidated since the lookup of request {request.ctx.req_id!r}: "
        "compute its blocks"
    )
