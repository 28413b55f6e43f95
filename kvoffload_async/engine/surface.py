"""The engine itself.

The same core as behind the synchronous facade, on the caller's loop: no second thread decides
anything. A *step* of the core is one turn of the loop in which something happened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio.to_thread

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies, TransferOutcome, Transport
from kvoffload_async.config import OffloadConfig
from kvoffload_async.engine.lines import EngineBounds, Line
from kvoffload_async.engine.request import EngineRequest
from kvoffload_async.errors import BusyError, ClosedError, StateError, TransportError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.threadsafe import SameLoopRunner
from kvoffload_async.types import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    as_block_ids,
    make_offload_key,
)

CreateTransport = Callable[[memoryview], Transport]
_UNDECIDED = frozenset({LookupResult.HIT_PENDING, LookupResult.RETRY})


class OffloadEngine:
    """Moves the KV blocks of many concurrent requests.

    Every call has a deadline. A call that is cancelled, or whose deadline passes, leaves nothing
    half-owned: a copy that has begun goes on without it, and what it holds is let go when the
    bytes have stopped moving.

    Thread: the loop's, for all of it.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | OffloadConfig,
        create_transport: CreateTransport,
        bounds: EngineBounds | None = None,
    ) -> None:
        """Check the configuration; nothing is started before `async with`.

        Args:
            config: See `OffloadConfig`.
            create_transport: Makes the transport over the device's tensors, given the primary's
                buffer; owned by the engine.
            bounds: See `EngineBounds`.

        Raises:
            ConfigError: A key or a value is unusable.
        """
        self._config = config if isinstance(config, OffloadConfig) else OffloadConfig.parse(config)
        TieringOffloadingSpec(self._config)
        self._create_transport = create_transport
        self._bounds = bounds or EngineBounds()
        self._flights: set[asyncio.Task[TransferOutcome]] = set()
        self._readers: list[deque[OffloadingEvent]] = []
        self._step_is_due = False
        self._is_open = False

    async def __aenter__(self) -> Self:
        """Map the memory, open the tiers and the transport.

        Raises:
            ConfigError: A tier cannot work here; what had been started is closed again.
        """
        self._loop = asyncio.get_running_loop()
        self._progress: asyncio.Future[None] = self._loop.create_future()
        runner = SameLoopRunner(self._loop, self._schedule_step)
        self._spec = TieringOffloadingSpec(self._config, Bridge(runner))
        # On a helper thread, which waits for coroutines on this loop; nobody else is here yet.
        self._manager = await anyio.to_thread.run_sync(self._spec.get_manager)
        try:
            self._transport = self._create_transport(self._manager.get_primary_kv_view())
        except BaseException:
            await anyio.to_thread.run_sync(self._spec.shutdown)
            raise
        bounds = self._bounds
        self._lines = {
            Direction.LOAD: Line("loads", bounds.concurrent_loads, bounds.waiting_calls),
            Direction.STORE: Line("stores", bounds.concurrent_stores, bounds.waiting_calls),
        }
        self._is_open = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def manager(self) -> TieringOffloadingManager:
        """The decisions behind this surface. For laws and inspection."""
        return self._manager

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
            req_id: Unique among the requests in flight.
            block_hashes: The chained hash of each of its full blocks, head to tail.
            kv_transfer_params: Passed through to the tiers.

        Raises:
            StateError: A request with this id is in flight.
        """
        self._ensure_open()
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
                self._schedule_step()

    async def lookup(self, request: EngineRequest, timeout_s: float = 10.0) -> int:
        """Bring a request's longest prefix into the primary, and pin it there.

        Blocks in secondary tiers are promoted; the call waits for them. At the deadline the
        prefix that is readable by then is taken.

        Returns:
            The blocks of the prefix; they stay pinned until `load`, the next `lookup`, or the
            request's end.
        """
        self._ensure_open()
        self._unpin(request)
        deadline_s = self._loop.time() + timeout_s
        while True:
            answers = self._ask(request)
            self._schedule_step()
            late = self._loop.time() >= deadline_s
            if late or not _UNDECIDED.intersection(answers):
                hits = next(
                    (i for i, a in enumerate(answers) if a is not LookupResult.HIT), len(answers)
                )
                return self._pin(request, hits)
            await self._next_progress(deadline_s)
            self._ensure_open()

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
            StateError: The device blocks do not match the prefix.
            BusyError: Too many loads are waiting.
            TimeoutError: The deadline passed; a copy that has begun goes on.
            TransportError: The copy failed; the device blocks' contents are undefined.
        """
        self._ensure_open()
        count = self._count(device_blocks)
        if count > request.prefix_blocks:
            raise StateError(
                f"{count} blocks are to be loaded, but the prefix has {request.prefix_blocks}"
            )
        deadline_s = self._loop.time() + timeout_s
        async with self._lines[Direction.LOAD].place(deadline_s):
            keys, slots = request.keys[:count], request.slots[:count]
            self._manager.complete_load(request.keys[count : request.prefix_blocks], request.ctx)
            request.prefix_blocks, request.slots = 0, ()
            ended = partial(self._load_ended, keys, request.ctx)
            await self._fly(Direction.LOAD, device_blocks, slots, ended, deadline_s)
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
        self._ensure_open()
        count = self._count(device_blocks)
        keys = request.keys[first_block : first_block + count]
        if len(keys) != count:
            raise StateError(f"the request has no {count} blocks from block {first_block} on")
        deadline_s = self._loop.time() + timeout_s
        async with self._lines[Direction.STORE].place(deadline_s):
            while (granted := self._manager.prepare_store(keys, request.ctx)) is None:
                self._schedule_step()
                if self._loop.time() >= deadline_s:
                    raise BusyError("no room in the primary: everything in it is in use")
                await self._next_progress(deadline_s)
                self._ensure_open()
            self._schedule_step()
            new = granted.keys_to_store
            if new:
                per_chunk = self._config.blocks_per_chunk
                place = {key: index for index, key in enumerate(keys)}
                blocks = [
                    block
                    for key in new
                    for block in device_blocks[
                        place[key] * per_chunk : (place[key] + 1) * per_chunk
                    ]
                ]
                slots = granted.store_spec.block_ids.tolist()
                ended = partial(self._store_ended, new, request.ctx)
                await self._fly(Direction.STORE, blocks, slots, ended, deadline_s)
        return len(new)

    async def quiesce(self, timeout_s: float = 30.0) -> bool:
        """Wait until no copy to or from the device runs; False at the deadline."""
        if self._flights:
            await asyncio.wait(self._flights, timeout=timeout_s)
        return not self._flights

    async def events(self) -> AsyncIterator[OffloadingEvent]:
        """Iterate over what appears in and disappears from the tiers from now on, until close."""
        self._ensure_open()
        unread: deque[OffloadingEvent] = deque(maxlen=self._bounds.unread_events)
        self._readers.append(unread)
        try:
            while self._is_open:
                while unread:
                    yield unread.popleft()
                await asyncio.shield(self._progress)
        finally:
            self._readers.remove(unread)

    async def close(self, timeout_s: float | None = None) -> None:
        """Stop the intake, let copies end, close transport and tiers; idempotent.

        Raises:
            OffloadError: A tier failed to close; everything else is closed all the same.
        """
        if not self._is_open:
            return
        self._is_open = False
        limit_s = self._config.shutdown_timeout_s if timeout_s is None else timeout_s
        deadline_s = self._loop.time() + limit_s
        self._wake()
        try:
            await self.quiesce(limit_s)
            left_s = max(0.0, deadline_s - self._loop.time())
            await anyio.to_thread.run_sync(self._transport.close, left_s)
        finally:
            left_s = max(0.0, deadline_s - self._loop.time())
            await anyio.to_thread.run_sync(self._spec.shutdown, left_s)

    # -- steps ----------------------------------------------------------------------------------

    def _schedule_step(self) -> None:
        """End the core's step at the end of this turn of the loop; once, however often asked."""
        if not self._step_is_due and self._is_open:
            self._step_is_due = True
            self._loop.call_soon(self._end_step)

    def _end_step(self) -> None:
        self._step_is_due = False
        if not self._is_open:
            return
        self._manager.on_schedule_end()
        events = list(self._manager.take_events())
        for unread in self._readers:
            unread.extend(events)
        self._wake()

    def _wake(self) -> None:
        """Let everybody who waits look again."""
        progress, self._progress = self._progress, self._loop.create_future()
        progress.set_result(None)

    async def _next_progress(self, deadline_s: float) -> None:
        """Wait until a step has ended, or until the deadline."""
        delay_s = max(0.0, deadline_s - self._loop.time())
        await asyncio.wait({self._progress}, timeout=delay_s)

    # -- inside ---------------------------------------------------------------------------------

    def _ensure_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the engine is not open")

    def _count(self, device_blocks: Sequence[int]) -> int:
        count, rest = divmod(len(device_blocks), self._config.blocks_per_chunk)
        if rest:
            raise StateError(
                f"{len(device_blocks)} device blocks are no multiple of "
                f"blocks_per_chunk={self._config.blocks_per_chunk}"
            )
        return count

    def _ask(self, request: EngineRequest) -> list[LookupResult]:
        """Look the prefix up; only a miss ends it, so that all its promotions start at once."""
        answers: list[LookupResult] = []
        for key in request.keys:
            answer = self._manager.lookup(key, request.ctx)
            if answer is LookupResult.MISS:
                break
            answers.append(answer)
        return answers

    def _pin(self, request: EngineRequest, count: int) -> int:
        if count:
            spec = self._manager.prepare_load(request.keys[:count], request.ctx)
            request.slots = spec.block_ids.tolist()
        request.prefix_blocks = count
        return count

    def _unpin(self, request: EngineRequest) -> None:
        count, request.prefix_blocks, request.slots = request.prefix_blocks, 0, ()
        if count:
            self._manager.complete_load(request.keys[:count], request.ctx)

    async def _fly(
        self,
        direction: Direction,
        device_blocks: Sequence[int],
        slots: Sequence[int],
        ended: Callable[[asyncio.Task[TransferOutcome]], None],
        deadline_s: float,
    ) -> None:
        """Copy; `ended` is called when the bytes have stopped moving, whoever still waits."""
        device = GPULoadStoreSpec(as_block_ids(device_blocks), (len(device_blocks),), (0,))
        copies = BlockCopies(direction, device, CPULoadStoreSpec(as_block_ids(slots)))
        transfer = self._transport.submit(copies, self._transport.record_compute())
        flight = self._loop.create_task(transfer.outcome(), name=f"copy:{direction.name.lower()}")
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)
        flight.add_done_callback(ended)
        async with asyncio.timeout_at(deadline_s):
            outcome = await asyncio.shield(flight)
        if outcome.error is not None:
            raise TransportError(str(outcome.error)) from outcome.error

    def _load_ended(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, _flight: asyncio.Task[TransferOutcome]
    ) -> None:
        self._manager.complete_load(keys, ctx)
        self._schedule_step()

    def _store_ended(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, flight: asyncio.Task[TransferOutcome]
    ) -> None:
        done = not flight.cancelled() and flight.exception() is None
        self._manager.complete_store(keys, ctx, done and flight.result().error is None)
        self._schedule_step()
