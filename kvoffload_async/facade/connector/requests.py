"""What the adapter remembers of one request, and what it gathers between two ends of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvoffload_async.facade.connector.protocol import (
    NULL_BLOCK,
    BlockTables,
    ConnectorGeometry,
    SchedulerRequest,
    TransferJobSpec,
)
from kvoffload_async.facade.manager import Generation, RoomWatch
from kvoffload_async.types import (
    JobId,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
)


@dataclass(slots=True)
class Step:
    """What has gathered in the step under way.

    Attributes:
        load_jobs: Loads that were prepared in it.
        flush: Jobs to flush.
        allocated: Device blocks that somebody is about to write.
        placed_req_ids: Requests that were given their block tables in it.
        computed_req_ids: Requests that were given blocks to be computed, without a load.
    """

    load_jobs: dict[JobId, TransferJobSpec] = field(default_factory=dict)
    flush: set[JobId] = field(default_factory=set)
    allocated: set[int] = field(default_factory=set)
    placed_req_ids: set[str] = field(default_factory=set)
    computed_req_ids: set[str] = field(default_factory=set)

    def note_allocated(self, blocks: Iterable[int]) -> None:
        """Note that somebody is about to write device blocks."""
        self.allocated.update(blocks)
        self.allocated.discard(NULL_BLOCK)


class GroupState:
    """One KV-cache group of a request.

    Attributes:
        keys: One a full chunk, from the start.
        block_ids: The device block table; `NULL_BLOCK` for what is gone.
        next_chunk: The first chunk that was not offered to the manager yet.
    """

    __slots__ = ("block_ids", "keys", "next_chunk")

    def __init__(self) -> None:
        self.keys: list[OffloadKey] = []
        self.block_ids: list[int] = []
        self.next_chunk = 0


class ConnectorRequest:
    """One request, from its first lookup until its last transfer has ended.

    In flight are either one load, or any number of stores.

    Attributes:
        local_tokens: Tokens that the device had when the request was last looked up.
        offered_tokens: Tokens past them that it was offered to load.
        waits_below: It waits for loads of its blocks by others, with job ids below this one:
            those that were under way when it first asked. None: it has not waited yet.
        transfer_jobs: Its jobs in flight.
        room_watch: How many of the chunks that there was no room for are offered again.
        may_load: Whether no load of it has failed; one that failed is computed instead.
        has_ended: Whether the scheduler has ended it.
        finish_signalled: Whether the manager knows that, too.
        generation: That in which it began: the keys of all its blocks, also of later ones.
    """

    __slots__ = (
        "ctx",
        "finish_signalled",
        "generation",
        "groups",
        "has_ended",
        "local_tokens",
        "may_load",
        "offered_tokens",
        "policy",
        "request",
        "room_watch",
        "transfer_jobs",
        "waits_below",
    )

    def __init__(
        self,
        request: SchedulerRequest,
        ctx: ReqContext,
        policy: OffloadPolicy,
        groups: int,
        generation: Generation,
    ) -> None:
        self.request = request
        self.generation = generation
        self.ctx = ctx
        self.policy = policy
        self.groups = [GroupState() for _ in range(groups)]
        self.local_tokens = 0
        self.offered_tokens = 0
        self.waits_below: JobId | None = None
        self.transfer_jobs: set[JobId] = set()
        self.room_watch = RoomWatch()
        self.may_load = True
        self.has_ended = False
        self.finish_signalled = False

    def restart(self, local_tokens: int) -> None:
        """Forget the block tables: the request has no device blocks but a prefix, if any."""
        self.local_tokens = local_tokens
        self.offered_tokens = 0
        self.room_watch.clear()
        for group in self.groups:
            group.block_ids = []
            group.next_chunk = 0

    def extend_keys(self, geometry: ConnectorGeometry) -> None:
        """Give keys to the chunks that have become full; only full ones get any."""
        hashes = self.request.block_hashes
        for index, group in enumerate(self.groups):
            tokens = geometry.tokens_per_chunk(index)
            per_chunk = tokens // geometry.tokens_per_hash
            for chunk in range(len(group.keys), len(hashes) // per_chunk):
                key = self.generation.key(hashes[per_chunk * (chunk + 1) - 1], index)
                group.keys.append(key)
                self.ctx.key_positions[key] = (chunk + 1) * tokens

    def set_blocks(self, tables: BlockTables) -> None:
        """Replace the block tables."""
        for group, table in zip(self.groups, tables, strict=True):
            group.block_ids = list(table)

    def append_blocks(self, tables: BlockTables) -> None:
        """Extend the block tables."""
        for group, table in zip(self.groups, tables, strict=True):
            group.block_ids.extend(table)

    def drop_stale_blocks(self, allocated: Collection[int], geometry: ConnectorGeometry) -> None:
        """Null out blocks that a sliding window let go and that were allocated anew.

        Only from `next_chunk` on: nobody stores what lies before, and tables can be long.
        """
        for index, group in enumerate(self.groups):
            if geometry.groups[index].sliding_window_tokens is None:
                continue
            for at in range(group.next_chunk * geometry.blocks_per_chunk, len(group.block_ids)):
                if group.block_ids[at] in allocated:
                    group.block_ids[at] = NULL_BLOCK

    def store_anew(self, geometry: ConnectorGeometry) -> None:
        """Offer everything again.

        But of a sliding window nothing that it does not reach any more: where that was stored,
        nobody noticed whether it was allocated anew.
        """
        self.room_watch.clear()
        for index, group in enumerate(self.groups):
            shape = geometry.groups[index]
            if shape.sliding_window_tokens is not None:
                past_tokens = self.request.num_computed_tokens + 1 - shape.sliding_window_tokens
                past = max(0, past_tokens // shape.tokens_per_block)
                unwatched = min(past, group.next_chunk * geometry.blocks_per_chunk)
                group.block_ids[:unwatched] = [NULL_BLOCK] * unwatched
            group.next_chunk = 0

    def invalidate(self, blocks: Collection[int]) -> set[int]:
        """Invalidate those of `blocks` that are in the tables; return them."""
        taken = set()
        for group in self.groups:
            for at, block in enumerate(group.block_ids):
                if block in blocks:
                    taken.add(block)
                    group.block_ids[at] = NULL_BLOCK
        return taken
