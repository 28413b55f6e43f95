"""Copies between device and primary: a bounded line in each direction, and what is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies, Transport
from kvoffload_async.engine.flights import Flights
from kvoffload_async.engine.lines import EngineBounds, Line, Place
from kvoffload_async.errors import ClosedError, TransportError
from kvoffload_async.types import CPULoadStoreSpec, GPULoadStoreSpec, as_block_ids


class Copies:
    """Loads and stores have a line each, so that neither starves the other.

    Thread: the loop's.
    """

    def __init__(self, transport: Transport, bounds: EngineBounds) -> None:
        self._transport = transport
        self._flights = Flights(asyncio.get_running_loop())
        self._lines = {
            Direction.LOAD: Line("loads", bounds.concurrent_loads, bounds.waiting_calls),
            Direction.STORE: Line("stores", bounds.concurrent_stores, bounds.waiting_calls),
        }

    def place(self, direction: Direction, deadline_s: float) -> AbstractAsyncContextManager[Place]:
        """Wait in line for a place; see `Line.place`."""
        return self._lines[direction].place(deadline_s)

    async def fly(
        self,
        direction: Direction,
        device_blocks: Sequence[int],
        slots: Sequence[int],
        *,
        place: Place,
        ended: Callable[[bool], None],
        deadline_s: float,
    ) -> None:
        """Copy, and wait for the end. The place is taken until then, whoever still waits.

        Args:
            direction: Which way.
            device_blocks: Device blocks, those of whole chunks.
            slots: One a chunk.
            place: Held by the caller.
            ended: Called once, with whether it succeeded, when the bytes have stopped moving.
            deadline_s: When the caller stops waiting.

        Raises:
            TimeoutError: The deadline passed; the copy goes on.
            TransportError: It failed, or could not begin.
        """
        try:
            device = GPULoadStoreSpec(as_block_ids(device_blocks), (len(device_blocks),), (0,))
            copies = BlockCopies(direction, device, CPULoadStoreSpec(as_block_ids(slots)))
            transfer = self._transport.submit(copies, self._transport.record_compute())
        except Exception as error:
            ended(False)
            raise TransportError(f"the copy could not begin: {error}") from error
        release = place.keep()

        def landed(success: bool) -> None:
            release()
            ended(success)

        landing = self._flights.start(transfer, landed)
        async with asyncio.timeout_at(deadline_s):
            outcome = await asyncio.shield(landing)
        if outcome.error is not None:
            raise TransportError(str(outcome.error)) from outcome.error

    async def quiesce(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False at the deadline."""
        return await self._flights.quiesce(timeout_s)

    def stop(self) -> None:
        """Let everybody who waits in line look: the engine is being closed."""
        for line in self._lines.values():
            line.open()

    def abandon(self) -> None:
        """Give up what is still under way: who waits for it gets an error."""
        self._flights.abandon(ClosedError("the engine was closed before the copy had ended"))
