"""The engine itself.

The same core as behind the synchronous facade, on the caller's loop: no second thread decides
anything. A *step* of the core is one turn of the loop in which something happened.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import Transport
from kvoffload_async.async_engine.limiter import EngineBounds
from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.steps import Steps
from kvoffload_async.async_engine.to_thread import to_thread
from kvoffload_async.async_engine.transfers import Transfers
from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import BusyError, ClosedError, ConfigError, StateError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.loop import SameLoopRunner, until_done
from kvoffload_async.statistics import EngineStatistics
from kvoffload_async.types import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    make_offload_key,
)

if TYPE_CHECKING:  # torch is loaded with the first tensors, not before
    import torch

CreateTransport = Callable[[memoryview], Transport]
_UNDECIDED = frozenset({LookupResult.HIT_PENDING, LookupResult.RETRY})
_NO_MODEL = 'model: missing; add "model": "org/name", the model whose KV blocks the engine keeps'


class OffloadEngine:
    """Moves the KV blocks of many concurrent requests, of one KV-cache group.

    Every call has a deadline. A call that is cancelled, or whose deadline passes, leaves nothing
    half-owned: a copy that has begun goes on without it, and what it holds is let go when the
    bytes have stopped moving.

    Thread: the loop's, for all of it.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | OffloadConfig,
        create_transport: CreateTransport | None = None,
        bounds: EngineBounds | None = None,
        *,
        kv_caches: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Check the configuration; nothing is started before `async with`.

        Args:
            config: See `OffloadConfig`; `model` is required here.
            create_transport: Makes the transport over the device's tensors, given the primary's
                buffer; called on a helper thread. The transport is owned by the engine.
            bounds: See `EngineBounds`.
            kv_caches: Instead of `create_transport`: layer name -> tensor, the first dimension of
                which counts device blocks.

        Raises:
            ConfigError: A key or a value is unusable, or the tensors cannot be addressed by block.
        """
        self._config = config if isinstance(config, OffloadConfig) else OffloadConfig.parse(config)
        if self._config.model is None:
            raise ConfigError(_NO_MODEL)
        spec = TieringOffloadingSpec(self._config)
        if create_transport is None and kv_caches is not None:
            create_transport = spec.transport_maker(kv_caches)
        elif create_transport is None or kv_caches is not None:
            raise ConfigError("give either create_transport or kv_caches")
        self._create_transport = create_transport
        self._bounds = bounds or EngineBounds()
        self._has_transport = False
        self._is_open = False
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Map the memory, open the tiers and the transport.

        Raises:
            ConfigError: A tier or the transport cannot work here; what had been started is closed.
            StateError: The engine has been opened before.
        """
        if hasattr(self, "_loop"):
            raise StateError("an engine is opened once; make another one")
        self._loop = asyncio.get_running_loop()
        self._steps = Steps(self._bounds.unread_events)
        runner = SameLoopRunner(self._loop, self._steps.note_progress)
        self._spec = TieringOffloadingSpec(self._config, Bridge(runner))
        try:
            # On a helper thread, which waits for coroutines on this loop; nobody else is here yet.
            await to_thread(self._start)
        except BaseException:
            await to_thread(self._end, self._config.shutdown_timeout_s)
            raise
        self._transfers = Transfers(self._transport, self._bounds)
        self._is_open = True
        self._steps.begin(self._manager)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    @property
    def manager(self) -> TieringOffloadingManager:
        """The decisions behind this surface. For invariants and inspection."""
        return self._manager

    def stats(self) -> EngineStatistics:
        """Return what was done so far, and how it is now; also when the engine is closed."""
        if not hasattr(self, "_transfers"):
            raise ClosedError("the engine is not open")
        return self._transfers.stats(self._manager.stats())

    # -- requests -------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(
        self,
        req_id: str,
        block_hashes: Sequence[bytes],
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> AsyncIterator[EngineRequest]:
        """Begin a request; leaving the block ends it. Its copies may end later.

        Args:
            req_id: Unique among the requests in flight, their copies included.
            block_hashes: The chained hash of each of its full blocks, head to tail.
            kv_transfer_params: Passed through to the tiers.

        Raises:
            StateError: A request with this id is in flight.
        """
        self._require_open()
        keys = tuple(make_offload_key(block_hash) for block_hash in block_hashes)
        positions = {key: position for position, key in enumerate(keys, 1)}
        ctx = ReqContext(req_id, kv_transfer_params, positions)
        self._manager.on_new_request(ctx)
        request = EngineRequest(ctx, keys)
        try:
            yield request
        finally:
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
        while True:
            answers = self._ask(request)
            self._steps.schedule()
            late = self._loop.time() >= deadline_s
            if late or not _UNDECIDED.intersection(answers):
                hits = itertools.takewhile(lambda answer: answer is LookupResult.HIT, answers)
                return self._pin(request, len(list(hits)))
            # The core's own limit on deferrals takes effect when it is asked.
            limit_s = self._loop.time() + self._config.deferral_timeout_s
            await self._steps.next_progress(min(deadline_s, limit_s))

    async def load(
        self, request: EngineRequest, device_blocks: Sequence[int], timeout_s: float = 30.0
    ) -> int:
        """Copy the pinned prefix into device blocks, behind what has been computed so far.

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
            BusyError: Too many loads are waiting.
            TimeoutError: The deadline passed; a copy that has begun goes on.
            TransportError: The copy failed; the device blocks' contents are undefined.
        """
        self._require_open()
        count = self._count(device_blocks)
        if count > request.prefix_blocks:
            raise StateError(f"{count} blocks are asked for, {request.prefix_blocks} are pinned")
        if not count:
            self._unpin(request)
            return 0
        claimed = request.slots
        deadline_s = self._loop.time() + timeout_s
        async with self._transfers.permit(Direction.LOAD, deadline_s) as permit:
            self._require_open()
            if request.slots is not claimed:
                raise StateError("the prefix was let go while the load waited for a permit")
            keys, rest = request.keys[:count], request.keys[count : request.prefix_blocks]
            request.prefix_blocks, request.slots = 0, ()  # the copy holds them from now on
            self._manager.complete_load(rest, request.ctx)
            await self._transfers.run(
                Direction.LOAD,
                device_blocks,
                claimed[:count],
                permit=permit,
                ended=partial(self._load_ended, keys, request.ctx),
                deadline_s=deadline_s,
            )
        return count

    async def store(
        self,
        request: EngineRequest,
        device_blocks: Sequence[int],
        first_block: int = 0,
        timeout_s: float = 30.0,
    ) -> int:
        """Copy blocks from the device, behind what has been computed so far; then they cascade.

        The device blocks must stay as they are until the call returns, or, if it was cancelled or
        gave up, until `quiesce` has returned.

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
            TransportError: The copy failed; nothing was stored.
        """
        self._require_open()
        count = self._count(device_blocks)
        keys = request.keys[first_block : first_block + count]
        if first_block < 0 or len(keys) != count:
            raise StateError(f"the request has no {count} blocks from block {first_block} on")
        deadline_s = self._loop.time() + timeout_s
        async with self._transfers.permit(Direction.STORE, deadline_s) as permit:
            granted = await self._reserve(request, keys, deadline_s)
            new = granted.keys_to_store
            if new:
                per_chunk = self._config.blocks_per_chunk
                first = {key: index * per_chunk for index, key in enumerate(keys)}
                blocks = [block for key in new for block in device_blocks[first[key] :][:per_chunk]]
                slots = granted.store_spec.block_ids.tolist()
                await self._transfers.run(
                    Direction.STORE,
                    blocks,
                    slots,
                    permit=permit,
                    ended=partial(self._store_ended, new, request.ctx),
                    deadline_s=deadline_s,
                )
        return len(new)

    async def quiesce(self, timeout_s: float = 30.0) -> bool:
        """Wait until no copy to or from the device runs; False at the deadline."""
        return await self._transfers.quiesce(timeout_s)

    async def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until a tier or a copy has reported something; for drivers that watch the engine."""
        self._require_open()
        await self._steps.next_progress(self._loop.time() + timeout_s)

    def events(self) -> AsyncIterator[OffloadingEvent]:
        """Iterate over what appears in and disappears from the tiers, until close.

        From the first iteration on; a reader that is slower than the engine misses the oldest.
        """
        return self._steps.events()

    async def close(self, timeout_s: float | None = None) -> None:
        """Stop the intake, let copies end, close transport and tiers; idempotent.

        Calls under way end with what they have, or with an error. A copy that has not ended by
        half of `timeout_s` (by default the configuration's `shutdown_timeout_s`) is given up: then
        the primary's memory stays mapped. Cancelling the call does not stop the closing.

        Raises:
            OffloadError: A tier failed to close; everything else is closed all the same.
        """
        if self._is_open:
            self._is_open = False
            limit_s = self._config.shutdown_timeout_s if timeout_s is None else timeout_s
            self._closing = self._loop.create_task(self._close(limit_s), name="kvoffload:close")
        elif self._closing is None or self._closing.done():
            return
        await until_done(self._closing)

    # -- opening and closing --------------------------------------------------------------------

    def _start(self) -> None:
        """Thread: a helper's, while the loop's awaits it."""
        self._manager = self._spec.get_manager()
        self._transport = self._create_transport(self._manager.get_primary_kv_view())
        self._has_transport = True

    def _end(self, timeout_s: float) -> None:
        """Thread: a helper's, while the loop's awaits it."""
        try:
            if self._has_transport and not self._transport.close(timeout_s):
                # Keeps the memory mapped: a copy still runs.
                self._kept_view = memoryview(self._manager.get_primary_kv_view())
        finally:
            self._spec.shutdown(timeout_s)

    async def _close(self, timeout_s: float) -> None:
        deadline_s = self._loop.time() + timeout_s
        self._steps.stop()
        self._transfers.stop()
        has_landed = await self._transfers.quiesce(timeout_s / 2)
        self._transfers.abandon()
        try:
            self._steps.end(self._manager)
        finally:
            left_s = max(0.0, deadline_s - self._loop.time())
            await to_thread(self._end, left_s if has_landed else left_s / 2)

    # -- inside ---------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the engine is not open")
        self._steps.ensure_open()

    def _count(self, device_blocks: Sequence[int]) -> int:
        per_chunk = self._config.blocks_per_chunk
        if len(device_blocks) % per_chunk:
            raise StateError(f"{len(device_blocks)} blocks: {per_chunk=} does not divide that")
        return len(device_blocks) // per_chunk

    def _ask(self, request: EngineRequest) -> list[LookupResult]:
        """Look the prefix up; only a miss ends it, so that all its promotions start at once."""
        answers = (self._manager.lookup(key, request.ctx) for key in request.keys)
        return list(itertools.takewhile(lambda answer: answer is not LookupResult.MISS, answers))

    def _pin(self, request: EngineRequest, count: int) -> int:
        self._unpin(request)  # what a lookup beside this one has pinned
        if count:
            spec = self._manager.prepare_load(request.keys[:count], request.ctx)
            request.slots = spec.block_ids.tolist()
        request.prefix_blocks = count
        return count

    def _unpin(self, request: EngineRequest) -> None:
        count, request.prefix_blocks, request.slots = request.prefix_blocks, 0, ()
        if count:
            self._manager.complete_load(request.keys[:count], request.ctx)
            self._steps.note_progress()

    async def _reserve(
        self, request: EngineRequest, keys: Sequence[OffloadKey], deadline_s: float
    ) -> PrepareStoreOutput:
        """Wait for room; what is granted belongs to the caller, who must not await before using."""
        self._require_open()
        while (granted := self._manager.prepare_store(keys, request.ctx)) is None:
            self._steps.schedule()
            if self._loop.time() >= deadline_s:
                raise BusyError("no room in the primary: everything in it is in use")
            await self._steps.next_progress(deadline_s)
        self._steps.schedule()
        return granted

    def _load_ended(self, keys: Sequence[OffloadKey], ctx: ReqContext, _success: bool) -> None:
        self._manager.complete_load(keys, ctx)
        self._steps.note_progress()

    def _store_ended(self, keys: Sequence[OffloadKey], ctx: ReqContext, success: bool) -> None:
        self._manager.complete_store(keys, ctx, success)
        self._steps.note_progress()
