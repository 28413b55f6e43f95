"""What a scheduler decides in a step: who gets frames, who is computed, who starts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvoffload_async.facade.connector.scheduler import OffloadingConnectorScheduler
from kvoffload_async.replay.device import FramePool
from kvoffload_async.replay.prompt import Prompt, Stage


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

    placed: list[Prompt] = field(default_factory=list)
    blocks: list[tuple[Prompt, int]] = field(default_factory=list)
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

    def plan(self, prompts: Sequence[Prompt]) -> StepPlan:
        """Decide about requests in flight, the one that came first first."""
        plan = StepPlan()
        for prompt in prompts:
            if prompt.stage is Stage.WAITING and not plan.is_full:
                self._place(prompt, plan)
            if prompt.stage is Stage.RUNNING:
                plan.names.update(prompt.ids[prompt.ready :])
                self._grow(prompt, prompts, plan)
            elif prompt.stage is Stage.LOADING:
                plan.names.update(prompt.ids[len(prompt.frames) :])
        return plan

    def _place(self, prompt: Prompt, plan: StepPlan) -> None:
        """Give frames to a request for what is there of it, and begin to load it."""
        if not plan.names.isdisjoint(prompt.ids):
            return  # once they are computed, they are found
        on_device = self._pool.match(prompt.ids)
        tokens, _ = self._connector.get_num_new_matched_tokens(
            prompt, len(on_device) * self._per_block
        )
        if tokens is None:
            return
        beyond = tokens // self._per_block
        others = self._pool.claim(on_device, beyond)
        if others is None:
            plan.is_full = True
            return
        prompt.frames = on_device + others
        prompt.ready = len(on_device)
        prompt.start(len(on_device), beyond)
        table = self._device_blocks(prompt.frames)
        self._connector.update_state_after_alloc(prompt, (table,), tokens)
        prompt.num_computed_tokens = (prompt.ready + beyond) * self._per_block
        prompt.stage = Stage.LOADING if tokens else Stage.RUNNING
        plan.placed.append(prompt)

    def _grow(self, prompt: Prompt, prompts: Sequence[Prompt], plan: StepPlan) -> None:
        """Find frames for the blocks that are to be computed in this plan."""
        count = len(prompt.ids) - prompt.ready
        if self._blocks_per_step is not None:
            count = min(count, self._blocks_per_step)
        have = len(prompt.frames) - prompt.ready  # given for a load that has failed
        if count > have:
            while (frames := self._pool.claim((), count - have)) is None:
                plan.is_full = True
                victim = next(f for f in reversed(prompts) if f.stage is Stage.RUNNING)
                if victim is prompt and any(f.stage is Stage.LOADING for f in prompts):
                    return  # what they hold can be taken from them as soon as it is there
                self._preempt(victim, plan)
                if victim is prompt:
                    return
            prompt.frames += frames
            plan.new_blocks[prompt.request_id] = (self._device_blocks(frames),)
        is_last = prompt.ready + count == len(prompt.ids)
        plan.tokens[prompt.request_id] = count * self._per_block + is_last
        plan.blocks.append((prompt, count))

    def _preempt(self, prompt: Prompt, plan: StepPlan) -> None:
        plan.preempted.append(prompt.request_id)
        self._pool.release(prompt.frames)
        prompt.frames = []
        prompt.ready = prompt.num_computed_tokens = 0
        prompt.stage = Stage.WAITING
