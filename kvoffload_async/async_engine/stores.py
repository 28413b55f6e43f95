"""Stores: the head that there is room for, and the rest as room comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvoffload_async.abc.tier import Direction
from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.steps import Steps
from kvoffload_async.async_engine.transfers import Transfers
from kvoffload_async.core.primary import BlockState, Primary
from kvoffload_async.errors import BusyError
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.types import OffloadKey, PrepareStoreOutput

_IN_USE = frozenset({BlockState.PINNED, BlockState.WRITING})


class Stores:
    """Reserves room and copies into it.

    Thread: the loop's.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        steps: Steps,
        transfers: Transfers,
        ready: Callable[[float], Awaitable[None]],
    ) -> None:
        """Take calls; `ready` waits for the end of a reset, and raises if the engine is closed."""
        self._manager = manager
        self._ready = ready
        self._primary = manager.planner.primary
        self._steps = steps
        self._transfers = transfers

    async def store(
        self,
        request: EngineRequest,
        keys: Sequence[OffloadKey],
        device_blocks: Sequence[int],
        deadline_s: float,
    ) -> int:
        """Store what there is room for, and more as room comes, as long as it can come.

        Args:
            request: Who stores; its `left_out` is set.
            keys: What is to be stored, head to tail.
            device_blocks: Where it lies, the same number for each key.
            deadline_s: Until when to wait, in the loop's time.

        Returns:
            How many blocks were copied.

        Raises:
            BusyError: There was no room for any until the deadline, or too many wait for a permit.
            TimeoutError: The deadline passed; a copy that has begun goes on.
            TransportError: A copy failed; those before it stay stored.
        """
        request.left_out = left = keys
        stored = 0
        per_key = len(device_blocks) // max(1, len(keys))
        first = {key: index * per_key for index, key in enumerate(keys)}
        while left:
            async with self._transfers.permit(Direction.STORE, deadline_s, request.ctx) as permit:
                granted = await self._reserve(request, left, deadline_s, is_rest=stored > 0)
                if granted is None:
                    break
                if new := granted.keys_to_store:
                    blocks = [b for key in new for b in device_blocks[first[key] :][:per_key]]
                    await self._transfers.run(
                        Direction.STORE,
                        blocks,
                        granted.store_spec.block_ids.tolist(),
                        ctx=request.ctx,
                        permit=permit,
                        ended=partial(self._ended, granted, request, request.occupy(blocks)),
                        deadline_s=deadline_s,
                    )
                stored += len(new)
                request.left_out = left = granted.keys_left_out
        return stored

    async def _reserve(
        self,
        request: EngineRequest,
        keys: Sequence[OffloadKey],
        deadline_s: float,
        *,
        is_rest: bool,
    ) -> PrepareStoreOutput | None:
        """Wait for room; None if there will be none for the rest of what is stored by now.

        What is granted belongs to the caller, who must not await before using it.
        """
        loop = asyncio.get_running_loop()
        with request.call() as waiter:
            while True:
                await self._ready(deadline_s)
                granted = self._manager.prepare_store(keys, request.ctx)
                self._steps.schedule()
                if granted is not None:
                    return granted
                is_late = loop.time() >= deadline_s
                if is_rest and (is_late or not _may_have_room(self._primary, request)):
                    return None
                if is_late:
                    raise BusyError(_no_room(self._primary, len(keys)))
                waiter.expect_room()
                await waiter.wait(deadline_s)

    def _ended(
        self,
        granted: PrepareStoreOutput,
        request: EngineRequest,
        release: Callable[[], None],
        success: bool,
    ) -> None:
        release()
        generation = granted.store_spec.generation
        self._manager.complete_store(granted.keys_to_store, request.ctx, success, generation)
        self._steps.note_progress()


def _may_have_room(primary: Primary, request: EngineRequest) -> bool:
    """Tell whether anything is owed, or in use that is not the request's own: it may be room."""
    if primary.protected_blocks:
        return True
    counts = primary.counts
    own = sum(primary.state_of(key) in _IN_USE for key in request.keys)
    return counts["pinned"] + counts["writing"] > own


def _no_room(primary: Primary, wanted: int) -> str:
    counts = primary.counts
    return (
        f"no room for {wanted} blocks in the primary's {primary.num_slots} slots: "
        f"{counts['pinned']} are pinned, {counts['writing']} being written, {counts['held']} held "
        f"by overdue copies, {counts['free']} free, and {counts['idle']} idle, which are too few "
        f"or a part of this request, or which tiers have still to store: {primary.protected_blocks}"
        "; raise cpu_bytes_to_use, or store less at once"
    )
