"""What a scheduler decides in a step: who gets frames, who is computed, who starts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvoffload_async.cli.device import FramePool
from kvoffload_async.cli.flight import Flight, Stage
from kvoffload_async.facade.connector.scheduler import OffloadingConnectorScheduler


@dataclass(slots=True)
class StepPlan:
    """One step.

    Attributes:
        placed: Requests that were given frames; `ready` blocks of them were there already.
        blocks: How many blocks to compute, a request.
        names: Which blocks somebody computes, in this step or a later one.
        tokens: Tokens to compute, by request.
        new_blocks: Device blocks given to requests that had some, by request.
        preempted: Requests that lost their frames.
        is_full: Whether nobody else is to be placed.
    """

    placed: list[Flight] = field(default_factory=list)
    blocks: list[tuple[Flight, int]] = field(default_factory=list)
    names: set[int] = field(default_factory=set)
    tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    is_full: bool = False


class Batch:
    """Places waiting requests and lets the placed ones grow, those that came first before others.

    If frames run out, the request that came last loses its own and starts again later. Whoever
    came first is never the loser, so that there is always one that gets on. Nobody computes what
    somebody else computes already: it waits, and finds it.

    Thread: owner.
    """

    def __init__(
        self,
        connector: OffloadingConnectorScheduler,
        pool: FramePool,
        device_blocks: Callable[[Sequence[int]], list[int]],
        blocks_per_step: int | None,
    ) -> None:
        """Share frames among requests.

        Args:
            connector: Asked what can be loaded, and told who has which device blocks.
            pool: The frames.
            device_blocks: Returns the device blocks of frames.
            blocks_per_step: Blocks of a request that a step computes at most; None: all.
        """
        self._connector = connector
        self._pool = pool
        self._device_blocks = device_blocks
        self._per_block = connector.geometry.blocks_per_chunk
        self._blocks_per_step = blocks_per_step

    def plan(self, flights: Sequence[Flight]) -> StepPlan:
        """Decide about requests in flight, the one that came first first."""
        plan = StepPlan()
        for flight in flights:
            if flight.stage is Stage.WAITING and not plan.is_full:
                self._place(flight, plan)
            if flight.stage is Stage.RUNNING:
                plan.names.update(flight.ids[flight.ready :])
                self._grow(flight, flights, plan)
            elif flight.stage is Stage.LOADING:
                plan.names.update(flight.ids[len(flight.frames) :])
        return plan

    def _place(self, flight: Flight, plan: StepPlan) -> None:
        """Give frames to a request for what is there of it, and begin to load it."""
        if not plan.names.isdisjoint(flight.ids):
            return  # once they are computed, they are found
        on_device = self._pool.match(flight.ids)
        tokens, _ = self._connector.get_num_new_matched_tokens(
            flight, len(on_device) * self._per_block
        )
        if tokens is None:
            return
        beyond = tokens // self._per_block
        others = self._pool.claim(on_device, beyond)
        if others is None:
            plan.is_full = True
            return
        flight.frames = on_device + others
        flight.ready = len(on_device)
        flight.start(len(on_device), beyond)
        table = self._device_blocks(flight.frames)
        self._connector.update_state_after_alloc(flight, (table,), tokens)
        flight.num_computed_tokens = (flight.ready + beyond) * self._per_block
        flight.stage = Stage.LOADING if tokens else Stage.RUNNING
        plan.placed.append(flight)

    def _grow(self, flight: Flight, flights: Sequence[Flight], plan: StepPlan) -> None:
        """Find frames for the blocks that are to be computed in this plan."""
        count = len(flight.ids) - flight.ready
        if self._blocks_per_step is not None:
            count = min(count, self._blocks_per_step)
        have = len(flight.frames) - flight.ready  # given for a load that has failed
        if count > have:
            while (frames := self._pool.claim((), count - have)) is None:
                plan.is_full = True
                victim = next(f for f in reversed(flights) if f.stage is Stage.RUNNING)
                if victim is flight and any(f.stage is Stage.LOADING for f in flights):
                    return  # what they hold can be taken from them as soon as it is there
                self._preempt(victim, plan)
                if victim is flight:
                    return
            flight.frames += frames
            plan.new_blocks[flight.request_id] = (self._device_blocks(frames),)
        is_last = flight.ready + count == len(flight.ids)
        plan.tokens[flight.request_id] = count * self._per_block + is_last
        plan.blocks.append((flight, count))

    def _preempt(self, flight: Flight, plan: StepPlan) -> None:
        plan.preempted.append(flight.request_id)
        self._pool.release(flight.frames)
        flight.frames = []
        flight.ready = flight.num_computed_tokens = 0
        flight.stage = Stage.WAITING
