"""A request of the asynchronous surface."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload_async.types import OffloadKey, ReqContext


class EngineRequest:
    """One request; made by `OffloadEngine.request`.

    Attributes:
        ctx: Its context.
        keys: The keys of its full blocks, head to tail.
        prefix_blocks: Blocks at the head that are pinned, ready to be loaded.
        slots: Where they lie.
        generation: Of the primary that they lie in: a reset makes them void.
        left_out: Keys that the last `store` found no room for; they are a tail of what it was to
            store.
    """

    def __init__(self, ctx: ReqContext, keys: tuple[OffloadKey, ...]) -> None:
        self.ctx = ctx
        self.keys = keys
        self.prefix_blocks = 0
        self.slots: Sequence[int] = ()
        self.generation = 0
        self.left_out: Sequence[OffloadKey] = ()
