"""The asynchronous engine, and its search for a request's longest cached prefix.

It runs the planner and the tiers on the caller's event loop, without a second thread. A *step* of
the planner is one iteration of the loop with calls or progress.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import Transport, hold_pages
from kvoffload_async.async_engine.cache import EngineCache
from kvoffload_async.async_engine.request import EngineRequest, Waiter
from kvoffload_async.async_engine.steps import Steps, Stores
from kvoffload_async.async_engine.transfers import EngineBounds, Transfers
from kvoffload_async.config import OffloadConfig, at_least
from kvoffload_async.core.tier_state import TURN_S
from kvoffload_async.errors import (
    ClosedError,
    ConfigError,
    InvalidatedError,
    StateError,
    naming_shortage,
)
from kvoffload_async.facade.cache import CacheReport
from kvoffload_async.facade.driver import PlannerDriver, planner_text
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.hints import parse_hints, parse_tiers
from kvoffload_async.runtime.bridge import SameLoopBridge
from kvoffload_async.runtime.helper_thread import HelperThread
from kvoffload_async.runtime.lifetime import guard_forks, warn_unclosed
from kvoffload_async.runtime.loop import SameLoopRunner
from kvoffload_async.statistics import EngineStatistics
from kvoffload_async.timeline import RequestTimeline
from kvoffload_async.types import (
    ALL_TIERS,
    CPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    TierMatcher,
    as_block_ids,
)
from kvoffload_async.waiting import seconds, until_done

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


async def on_helper(helper: HelperThread, call: Callable[[], T]) -> T:
    """Run a call on a helper thread and await it.

    A cancellation is raised only after the call has ended, so its result is never lost.
    """
    return await until_done(asyncio.wrap_future(helper.call(call)))


CreateTransport = Callable[[memoryview], Transport]
_END_THREAD_S = 1.0
_NO_MODEL = 'model: missing; add "model": "org/name", the model whose KV blocks the engine keeps'


class PrefixSearch:
    """Looks up each block of a request once, and again only when its state may have changed.

    A block found readable in an earlier iteration of the loop is looked up again at the end: it is
    not pinned and may have been evicted.
    """

    def __init__(self, driver: PlannerDriver, request: EngineRequest, waiter: Waiter) -> None:
        """Look up all blocks up to the first missing one, so that all promotions start at once."""
        self._driver = driver
        self._keys = request.keys
        self._ctx = request.ctx
        self._waiter = waiter
        self._end = len(self._keys)
        self._undecided: dict[OffloadKey, None] = {}
        self._current: set[OffloadKey] = set()
        """The keys that were looked up in this iteration of the loop."""
        self._look_up(self._keys)

    def look_again(self, changed: Collection[OffloadKey]) -> None:
        """Look up the undecided blocks in `changed`, or all undecided blocks if it is empty."""
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

    def decided_length(self) -> int | None:
        """Return the number of blocks of the readable prefix; None while some are undecided."""
        if not self._undecided:
            stale = [key for key in self._keys[: self._end] if key not in self._current]
            self._look_up(stale)
        return None if self._undecided else self._end

    def readable(self) -> int:
        """Return the number of readable blocks before the first undecided block."""
        count = min(map(self._ctx.key_positions.__getitem__, self._undecided)) - 1
        is_hit = [answer is LookupResult.HIT for answer in self._ask(self._keys[:count])]
        return count if all(is_hit) else is_hit.index(False)

    @property
    def _is_notified(self) -> bool:
        """Whether every tier announces lookup answers; external tiers do not, and may open late."""
        return all(tier.index.notifies for tier in self._driver.planner.tiers)

    def _look_up(self, keys: Sequence[OffloadKey]) -> None:
        """Look up keys, head to tail, up to the first miss; blocks behind it are useless."""
        if not keys:
            return
        undecided = self._undecided
        answers = self._ask(keys)
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

    def _ask(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Return the planner's answers up to the first miss; other generations' keys all miss."""
        self._driver.begin_step()
        if keys and not self._driver.generation.has(keys[0]):
            return [LookupResult.MISS]
        return self._driver.planner.lookup_many(keys, self._ctx, stop_at_miss=True)

    def _end_before(self, key: OffloadKey) -> None:
        positions = self._ctx.key_positions
        self._end = end = self._keys.index(key)
        self._undecided = {key: None for key in self._undecided if positions[key] <= end}


class OffloadEngine:
    """Offloads and loads the KV blocks of many concurrent requests, of one KV-cache group.

    Every call has a deadline. If a call is cancelled or times out, its running copy continues and
    releases its resources at its end. Until then the request's `occupied_blocks` lists the device
    blocks that must not be reused.

    Not thread-safe; call only from the event loop's thread, except `stats`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | OffloadConfig,
        create_transport: CreateTransport | None = None,
        bounds: EngineBounds | None = None,
        *,
        kv_caches: Mapping[str, torch.Tensor] | None = None,
        block_dim: int | None = None,
    ) -> None:
        """Validate the configuration; `async with` starts the engine.

        Args:
            config: See `OffloadConfig`; `model` is required here. `block_bytes` is optional with
                `kv_caches`: it defaults to the bytes of one chunk of them.
            create_transport: Creates the transport to the device's tensors, given the primary's
                buffer; called on a helper thread. The engine owns the transport.
            bounds: See `EngineBounds`.
            kv_caches: Instead of `create_transport`: layer name -> tensor.
            block_dim: Dimension of the `kv_caches` that indexes device blocks; see
                `register_kv_caches`.

        Raises:
            ConfigError: A key or a value is invalid, or the tensors cannot be addressed by block.
        """
        if (create_transport is None) is (kv_caches is None):
            raise ConfigError("give either create_transport or kv_caches")
        self._config = _parsed(config, kv_caches, block_dim)
        if self._config.model is None:
            raise ConfigError(_NO_MODEL)
        spec = TieringOffloadingSpec(self._config)
        if create_transport is not None:
            self._create_transport = create_transport
        elif kv_caches is not None:
            self._create_transport = spec.transport_maker(kv_caches, block_dim=block_dim)
        self._bounds = EngineBounds() if bounds is None else bounds
        if not isinstance(self._bounds, EngineBounds):
            raise ConfigError(f"bounds: {bounds!r} is not valid; give an EngineBounds(...)")
        self._is_open = False
        self._is_closed = True
        """Whether all components of the engine are closed."""
        self._closing: asyncio.Task[None] | None = None
        """The latest attempt to close."""
        self._requests: dict[EngineRequest, None] = {}
        """Requests that have begun and not ended."""

    async def __aenter__(self) -> Self:
        """Map the memory, open the tiers and the transport.

        Raises:
            ConfigError: A tier or the transport failed to start; started components are closed.
            TierUnavailableError: Likewise, or threads, descriptors or memory are exhausted.
            StateError: The engine has been opened before.
        """
        if hasattr(self, "_loop"):
            raise StateError("an engine can be opened only once; create a new one")
        self._loop = asyncio.get_running_loop()
        self._steps = Steps(self._bounds.unread_events)
        runner = SameLoopRunner(self._loop, self._steps.note_report)
        bridge = SameLoopBridge(runner)
        bridge.lag = self._steps.lag
        self._spec = TieringOffloadingSpec(self._config, bridge, self.stats)
        with naming_shortage("the engine cannot be started"):
            # It waits for coroutines on this loop, and stays: closing may find no further thread.
            self._helper = HelperThread("kvoffload-engine")
            try:
                await on_helper(self._helper, self._start)
            except BaseException:
                try:
                    await self._end(self._config.shutdown_timeout_s)
                finally:  # after another cancellation, too
                    self._helper.end(_END_THREAD_S)
                raise
        self._transfers = Transfers(
            self._transport,
            self._bounds,
            recorder=self._driver.recorder,
            block_bytes=self._config.block_bytes,
        )
        self._stores = Stores(self._driver, self._steps, self._transfers)
        self._cache = EngineCache(self._driver, self._steps)
        self._is_open = True
        self._is_closed = False
        self._steps.begin(self._driver)
        guard_forks(self, _is_open=False, _is_closed=True)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and self._closing is None:
            warn_unclosed(self, "close()")

    def __repr__(self) -> str:
        state = planner_text(self._driver.planner) if self._is_open else "not open"
        return f"<{type(self).__name__} of {self._config.model}: {state}>"

    @property
    def driver(self) -> PlannerDriver:
        """The driver of the planner and the tiers, for invariant checks and inspection."""
        return self._driver

    @property
    def cache(self) -> EngineCache:
        """Deletes, counts and pins cached blocks.

        Raises:
            ClosedError: The engine has not been opened.
        """
        self._require_started()
        return self._cache

    def stats(self) -> EngineStatistics:
        """Return counters and gauges; works on a closed engine too.

        Thread-safe; see `PlannerDriver.stats`.
        """
        driver = self._require_started()
        return self._transfers.stats(driver.stats(), self._steps.missed_events)

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return the timeline of a request; see `PlannerDriver.explain`."""
        return self._require_started().explain(req_id)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return all kept request timelines, in the order in which the requests began."""
        return self._require_started().timelines()

    async def close(self, timeout_s: float | None = None) -> None:
        """Reject new calls, wait for copies, close transport and tiers; idempotent.

        Calls under way return a partial result or raise. A copy still running after half of
        `timeout_s` seconds (by default the configuration's `shutdown_timeout_s`) is given up; then
        the primary's memory stays mapped. Cancelling the call does not stop the shutdown, for which
        further calls wait. Starts no thread.

        Raises:
            OffloadError: A tier failed to close; all other components are closed. After any error,
                another call closes what is left.
            StateError: Called on another event loop than the engine's.
        """
        limit_s = self._config.shutdown_timeout_s if timeout_s is None else seconds(timeout_s)
        if self._is_closed:
            return
        if asyncio.get_running_loop() is not self._loop:
            raise StateError("close() was called on another event loop than the engine's")
        if self._closing is None or self._closing.done():  # the first attempt, or the last failed
            self._is_open = False
            self._closing = self._loop.create_task(self._close(limit_s), name="kvoffload:close")
        await until_done(self._closing)

    # -- requests -------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(
        self,
        req_id: str,
        block_hashes: Sequence[bytes],
        kv_transfer_params: dict[str, Any] | None = None,
        *,
        prefetch: bool = False,
        trace_context: object | None = None,
        hints: Mapping[str, Any] | None = None,
        tokens_per_block: int | None = None,
        load_tier_filter: Collection[TierMatcher] = ALL_TIERS,
        tenant: str | None = None,
    ) -> AsyncIterator[EngineRequest]:
        """Begin a request; leaving the `async with` block ends it. Its copies may end later.

        Args:
            req_id: Name for messages and tiers; need not be unique.
            block_hashes: The chained hash of each of its full blocks, head to tail.
            kv_transfer_params: Passed through to the tiers, and searched for hints of the client.
            prefetch: Whether to call `prefetch` at once.
            trace_context: Parent of the request's spans; see `ReqContext`.
            hints: Hints by name; see `kvoffload_async.hints`. They take precedence over those in
                `kv_transfer_params`.
            tokens_per_block: Tokens per hash, for `max_offload_tokens`: without it, a client's
                limit stores nothing.
            load_tier_filter: Secondary tiers that the request may load from; none if it is empty.
            tenant: Name of the request's tenant, from a source that its client does not control.
                Unknown names are treated as the option `unknown_tenant` says.

        Raises:
            ConfigError: A hint, `tokens_per_block` or `load_tier_filter` is invalid, or a tenant is
                named without the option `tenants`.
            StateError: A hash is not bytes, is empty, or is longer than 92 bytes, less 8 with a
                generation, and 8 with tenants.
        """
        self._begin_call()
        given, tiers = parse_hints(hints), parse_tiers(load_tier_filter)
        if tokens_per_block is not None:
            at_least(1)(tokens_per_block, "tokens_per_block")
        elif given.max_offload_tokens:
            raise ConfigError("tokens_per_block: missing; give it with max_offload_tokens")
        driver = self._driver
        index = driver.tenant_index(tenant)
        keys = tuple(driver.make_keys(block_hashes, index or 0))
        if index is None:
            driver.planner.primary.counters.unknown_tenant_blocks += len(keys)
            keys = ()
        positions: dict[OffloadKey, int] = {}
        for position, key in enumerate(keys, 1):
            positions.setdefault(key, position)  # the first position of a repeated hash
        ctx = ReqContext(
            req_id,
            kv_transfer_params,
            positions,
            tiers,
            trace_context=trace_context,
            hints=given,
            tokens_per_position=sys.maxsize if tokens_per_block is None else tokens_per_block,
            tenant=None if index is None or not driver.tenants else driver.tenants.names[index],
        )
        driver.begin_request(ctx)
        request = EngineRequest(ctx, keys, self._steps.waiters, is_cached=index is not None)
        self._requests[request] = None
        if prefetch:
            self.prefetch(request)
        try:
            yield request
        finally:
            del self._requests[request]
            request.end()
            if self._is_open:
                self._unpin(request)
                if ctx.hints.retention_s:  # it begins now, not at the last step
                    self._driver.planner.begin_step(self._steps.clock())
                self._driver.planner.on_request_finished(ctx)
                self._steps.note_progress()

    def prefetch(self, request: EngineRequest) -> None:
        """Have a request's blocks promoted while it waits for its `lookup`. Never waits.

        A hint, served in the order of the calls while no other request waits for room, for a
        quarter of the primary at most. The blocks stay until the request's first `lookup`, unless
        others need their room.

        Raises:
            StateError: The request has ended.
        """
        self._begin_call()
        if self._driver.generation.current(request.keys):
            self._driver.planner.prefetch(request.keys, request.ctx)
        self._steps.schedule()

    async def lookup(self, request: EngineRequest, timeout_s: float = 10.0) -> int:
        """Promote a request's longest cached prefix into the primary, and pin it there.

        Waits for promotions from secondary tiers. At the deadline, pins the prefix that is readable
        by then, or returns 0 if the pin would have to wait for room behind other requests.

        Returns:
            The number of blocks of the prefix; they stay pinned until the next `load`, `store` or
            `lookup`, or the request's end. While others wait for room, only for a second: then
            `load` loads those that are still resident.

        Raises:
            StateError: The request has ended, or `timeout_s` is negative or not finite.
        """
        deadline_s = self._begin_call(timeout_s)
        self._unpin(request)
        # The core applies its deferral limit only during a lookup.
        limit_s = self._loop.time() + self._config.deferral_timeout_s
        with request.call() as waiter:
            search = PrefixSearch(self._driver, request, waiter)
            while True:
                found = search.decided_length()
                is_late = self._loop.time() >= deadline_s
                if found is None and is_late:
                    found = search.readable()
                count = None if found is None else self._pin(request, found)
                if found is not None and count is None:
                    for key in request.keys[:found]:  # reported when the wait for room ends
                        waiter.expect(key)
                self._steps.schedule()
                if count is not None:
                    return count
                if is_late:
                    self._unpin(request)
                    return 0
                asks_again_s = self._loop.time() + TURN_S / 2  # else its place in the queue ends
                try:
                    changed = await waiter.wait(min(deadline_s, limit_s, asks_again_s))
                    self._steps.ensure_open()
                except BaseException:
                    self._unpin(request)
                    raise
                if self._loop.time() >= limit_s:
                    limit_s, changed = limit_s + self._config.deferral_timeout_s, {}
                search.look_again(changed)

    async def load(
        self, request: EngineRequest, device_blocks: Sequence[int], timeout_s: float = 30.0
    ) -> int:
        """Copy the pinned prefix into device blocks, ordered after compute submitted so far.

        If the call is cancelled or raises TimeoutError, its copy may still write to
        `request.occupied_blocks` until `request.released` returns. In all other cases the writes
        have ended when the call ends.

        Args:
            request: A request whose `lookup` has found blocks.
            device_blocks: `blocks_per_chunk` device blocks for each block to load, from the head
                of the prefix; the rest of the prefix is unpinned.
            timeout_s: Seconds until the call raises TimeoutError.

        Returns:
            The number of blocks loaded: fewer than asked for if the prefix was pinned no longer, as
            others waited for room for over a second.

        Raises:
            StateError: The device blocks do not match the prefix, a block is given twice,
                `timeout_s` is negative or not finite, or the prefix was unpinned while the call
                waited for a permit.
            InvalidatedError: A `reset` or `invalidate` came since the lookup: compute the blocks.
            BusyError: Too many loads are waiting.
            TimeoutError: The deadline passed; a running copy continues.
            TransportError: The copy failed; the device blocks' contents are undefined.
        """
        deadline_s = self._begin_call(timeout_s)
        blocks, count = self._blocks(device_blocks)
        if count:
            self._require_valid(request)
        if count > request.prefix_blocks:
            raise StateError(f"{count} blocks are asked for, {request.prefix_blocks} are pinned")
        if not count:
            self._unpin(request)
            return 0
        with await self._transfers.permit(Direction.LOAD, deadline_s, request.ctx) as permit:
            await self._steps.ready(deadline_s)
            self._require_valid(request)
            if request.prefix_blocks < count:
                raise StateError("the prefix was let go while the load waited for a permit")
            count = self._resident(request.keys[:count])
            request.prefix_blocks = 0  # now owned by the copy
            if not count:
                self._unpin(request)
                return 0
            keys, blocks = request.keys[:count], blocks[: count * self._config.blocks_per_chunk]
            planner = self._driver.planner
            slots = planner.prepare_load(keys, request.ctx)
            spec = CPULoadStoreSpec(as_block_ids(slots), planner.primary.generation)
            self._steps.schedule()
            release = request.occupy(blocks)
            await self._transfers.run(
                Direction.LOAD,
                blocks,
                spec,
                ctx=request.ctx,
                permit=permit,
                ended=partial(self._load_ended, keys, request, spec.generation, release),
                deadline_s=deadline_s,
            )
        if not self._driver.generation.has(keys[0]):
            raise _invalidated(request)
        return count

    async def store(
        self,
        request: EngineRequest,
        device_blocks: Sequence[int],
        first_block: int = 0,
        timeout_s: float = 30.0,
    ) -> int:
        """Copy blocks from the device, ordered after compute submitted so far; then cascade them.

        Stores the longest prefix that fits at once, and the rest while room can become available.
        `request.left_out` lists the keys that were not stored.

        Do not modify the device blocks until the call returns. If it is cancelled or raises
        TimeoutError, its copy may still read `request.occupied_blocks` until `request.released`
        returns.

        Args:
            request: The request.
            device_blocks: `blocks_per_chunk` device blocks for each block.
            first_block: Index in the request of the first block to store.
            timeout_s: Seconds until the call fails, waiting for room included.

        Returns:
            The number of newly stored blocks.

        Raises:
            StateError: The request has no such blocks, a device block is given twice, or
                `timeout_s` is negative or not finite.
            BusyError: Too many stores are waiting, or there was no room until the deadline.
            TimeoutError: The deadline passed; a running copy continues.
            TransportError: A copy failed; those before it stay stored.
        """
        deadline_s = self._begin_call(timeout_s)
        blocks, count = self._blocks(device_blocks)
        if not request.is_cached:
            return 0
        try:
            keys = request.keys[first_block : first_block + count]
        except TypeError:
            raise StateError(f"first_block: {first_block!r} is not valid; give an index") from None
        if first_block < 0 or len(keys) != count:
            raise StateError(f"the request has no {count} blocks from block {first_block} on")
        return await self._stores.store(request, keys, blocks, deadline_s)

    async def quiesce(self, timeout_s: float = 30.0) -> bool:
        """Wait for all running copies to or from the device; return False at the deadline.

        Copies started later are not awaited. `EngineRequest.released` waits for one request.
        """
        return await self._transfers.running.quiesce(seconds(timeout_s))

    # -- reset and invalidation -----------------------------------------------------------------

    async def reset(
        self, timeout_s: float | None = None, tiers: Collection[str] = ()
    ) -> CacheReport | None:
        """Empty the primary; the secondary tiers keep their blocks, unless they are named.

        Loads, stores and promotions wait until the reset is done. Waits for copies to and from the
        device, and for running jobs of the tiers; jobs still running at the deadline are given up.
        Pinned prefixes are dropped, and a `load` of one raises InvalidatedError.

        Args:
            timeout_s: Seconds, by default the configuration's `drain_timeout_s`.
            tiers: Names of the tiers to clear too; see `EngineCache.clear`.

        Returns:
            The report on the tiers, if any are named; they may not be empty yet at the deadline.

        Raises:
            StateError: A name is unknown, or a tier cannot be cleared; nothing was reset.
            TimeoutError: A copy to or from the device, or another reset, still runs at the
                deadline; the primary was not reset.
        """
        self._require_open()
        limit_s = self._config.drain_timeout_s if timeout_s is None else seconds(timeout_s)
        deadline_s = self._loop.time() + limit_s
        await self._steps.ready(deadline_s)
        clearing = self._driver.cache.clear(tiers) if tiers else None
        self._steps.resetting = ended = self._loop.create_future()
        planner = self._driver.planner
        planner.promotions_paused = True
        try:
            if not await self._transfers.running.quiesce(deadline_s - self._loop.time()):
                raise TimeoutError(
                    "a copy to or from the device still runs: the primary was not reset"
                )
            self._steps.schedule()
            while planner.jobs and self._loop.time() < deadline_s:
                await self._steps.next_progress(deadline_s)
            self._require_open()
            self._driver.reset_cache_now()
            for request in self._requests:
                request.invalidate()
        finally:
            self._steps.resetting = None
            ended.set_result(None)
            planner.reset_flushed()
            self._steps.note_progress()
            self._steps.waiters.wake_all()
        return None if clearing is None else await self._cache.finish(clearing, deadline_s)

    def invalidate(self, generation: int | str) -> None:
        """Start a new key generation after a change of the weights; does not wait.

        No block of an earlier generation is served from now on, by the primary or any tier: later
        requests use other keys. Requests in flight get no hits and store no blocks, and a `load` of
        an earlier lookup raises InvalidatedError. After a restart, configure the same `generation`.
        Reusing a generation makes its blocks available again: never reuse a label for other
        weights.

        Raises:
            ConfigError: `generation` is neither an integer nor a label.
        """
        self._require_open()
        self._driver.invalidate(generation)
        for request in self._requests:
            self._unpin(request)
            request.invalidate()
        self._steps.waiters.wake_all()

    async def wait_for_progress(self, timeout_s: float) -> None:
        """Wait for any progress of a tier or copy; for drivers that monitor the engine."""
        self._require_open()
        await self._steps.next_progress(self._loop.time() + seconds(timeout_s))

    def events(self) -> AsyncIterator[OffloadingEvent]:
        """Iterate over events of blocks added to and removed from the tiers, until close.

        Begins with the contents at the first iteration: for the primary and each tier with events
        an event that `restarts`. A slow reader misses events, which `stats().missed_events` counts;
        then it gets the contents again.
        """
        return self._steps.events()

    # -- internal -------------------------------------------------------------------------------

    def _require_started(self) -> PlannerDriver:
        if not hasattr(self, "_transfers"):
            raise ClosedError("the engine is not open")
        return self._driver

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the engine is not open")
        self._steps.ensure_open()

    def _start(self) -> None:
        """Create driver and transport; runs on a helper thread that the loop awaits."""
        self._driver = self._spec.get_driver(PlannerDriver)
        self._transport = self._create_transport(self._driver.get_primary_kv_view())

    async def _end(self, timeout_s: float) -> None:
        """Close transport and tiers, then end the helper thread."""
        await on_helper(self._helper, partial(self._close_parts, timeout_s))
        self._is_closed = True
        self._helper.end(_END_THREAD_S)  # it has nothing left to do

    def _close_parts(self, timeout_s: float) -> None:
        """Close transport and tiers; runs on a helper thread that the loop awaits."""
        try:
            if hasattr(self, "_transport") and not self._transport.close(timeout_s):
                hold_pages(self._driver.get_primary_kv_view(), "a copy that has not ended")
        finally:
            self._spec.shutdown(timeout_s)

    async def _close(self, timeout_s: float) -> None:
        deadline_s = self._loop.time() + timeout_s
        self._steps.stop()
        self._transfers.stop()
        has_landed = await self._transfers.running.quiesce(timeout_s / 2)
        self._transfers.running.abandon()
        self._steps.waiters.give_up()
        try:
            self._steps.end(self._driver)
        finally:
            left_s = max(0.0, deadline_s - self._loop.time())
            await self._end(left_s if has_landed else left_s / 2)

    def _begin_call(self, timeout_s: float = 0.0) -> float:
        """Begin a call; return its deadline on the loop's clock."""
        self._require_open()
        deadline_s = self._loop.time() + seconds(timeout_s)
        self._steps.begin_call()
        return deadline_s

    def _require_valid(self, request: EngineRequest) -> None:
        if request.is_invalidated:
            raise _invalidated(request)

    def _blocks(self, device_blocks: Sequence[int]) -> tuple[list[int], int]:
        """Return the device blocks' numbers, and how many blocks of the request they hold."""
        per_chunk = self._config.blocks_per_chunk
        try:
            blocks = as_block_ids(device_blocks).tolist()
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(f"device_blocks are numbers of device blocks: {error}") from None
        if len(blocks) % per_chunk:
            raise StateError(f"{len(blocks)} blocks: {per_chunk=} does not divide that")
        if len(set(blocks)) < len(blocks):
            (twice, _), *_ = Counter(blocks).most_common(1)
            raise StateError(f"device_blocks: {twice} is given twice; give each block once")
        return blocks, len(blocks) // per_chunk

    def _pin(self, request: EngineRequest, found: int) -> int | None:
        """Pin the prefix found by a lookup; return its length, or None to wait for room first."""
        request.is_invalidated = False
        if not found:
            self._unpin(request)
            return 0
        request.prefix_blocks = 0
        count = self._driver.planner.hold(request.keys[:found], request.ctx)
        request.prefix_blocks = count or 0
        return count

    def _resident(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading keys whose blocks are readable in the primary."""
        answers = self._driver.planner.primary.lookup_many(keys)
        hits = takewhile(lambda answer: answer is LookupResult.HIT, answers)
        return sum(1 for _ in hits)

    def _unpin(self, request: EngineRequest) -> None:
        """Release a request's pins, or end its wait for room; the shutdown does so for all."""
        request.prefix_blocks = 0
        if self._is_open and self._driver.planner.on_request_scheduled(request.ctx):
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
        self._driver.planner.complete_load(keys, request.ctx, generation)
        self._steps.note_progress()


def _parsed(
    config: Mapping[str, Any] | OffloadConfig,
    kv_caches: Mapping[str, torch.Tensor] | None,
    block_dim: int | None,
) -> OffloadConfig:
    """Return the parsed configuration; derive a missing `block_bytes` from the tensors."""
    if isinstance(config, OffloadConfig):
        return config
    given: Any = config  # unchecked input; `parse` validates it
    if kv_caches is None or not isinstance(given, Mapping) or "block_bytes" in given:
        return OffloadConfig.parse(given)
    parsed = OffloadConfig.parse({**given, "block_bytes": 1})
    from kvoffload_async.transport.layout import register_kv_caches  # noqa: PLC0415 - torch

    layout = register_kv_caches(kv_caches, None, parsed.blocks_per_chunk, block_dim)
    return replace(parsed, block_bytes=layout.chunk_bytes)


def _invalidated(request: EngineRequest) -> InvalidatedError:
    return InvalidatedError(
        f"the cache was reset or invalidated since the lookup of request {request.ctx.req_id!r}: "
        "compute its blocks"
    )
