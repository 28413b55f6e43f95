"""State of the connector: of its requests, of the device blocks, and of the current step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvoffload_async.core.room import RoomWatch
from kvoffload_async.facade.connector.protocol import (
    NULL_BLOCK,
    BlockTables,
    ConnectorGeometry,
    SchedulerRequest,
    TransferJobSpec,
)
from kvoffload_async.facade.generation import Generation
from kvoffload_async.types import (
    JobId,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
)


@dataclass(slots=True)
class Step:
    """The connector's state that lasts for the current step only.

    Attributes:
        load_jobs: Loads prepared in this step.
        flush: Jobs that must end before this step overwrites device blocks.
        allocated: Device blocks that this step will write.
        placed_req_ids: Requests that got their block tables in this step.
        computed_req_ids: Requests that got blocks to compute, without a load.
    """

    load_jobs: dict[JobId, TransferJobSpec] = field(default_factory=dict)
    flush: set[JobId] = field(default_factory=set)
    allocated: set[int] = field(default_factory=set)
    placed_req_ids: set[str] = field(default_factory=set)
    computed_req_ids: set[str] = field(default_factory=set)

    def note_allocated(self, blocks: Iterable[int]) -> None:
        """Record device blocks that this step will write."""
        self.allocated.update(blocks)
        self.allocated.discard(NULL_BLOCK)


@dataclass(slots=True)
class GroupState:
    """A request's state in one KV-cache group.

    Attributes:
        keys: The keys of the full chunks, from the start of the prompt.
        block_ids: The device block table; `NULL_BLOCK` for freed blocks.
        next_chunk: The first chunk not yet offered to the manager.
    """

    keys: list[OffloadKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    next_chunk: int = 0


@dataclass(slots=True, eq=False)
class ConnectorRequest:
    """One request, from its first lookup to the end of its last transfer.

    It has either one load in flight or any number of stores.

    Attributes:
        local_tokens: Tokens present on the device at the request's last lookup.
        offered_tokens: Number of tokens after `local_tokens` that the last lookup offered to load.
        loaded_tokens: Number of tokens after `local_tokens` that its load fills.
        reads_content: Whether the blocks that its computation began with had known content; None
            before that.
        waits_below: The request waits for loads of its blocks by other requests, if their job id
            is less than this: they began before its first lookup. None before that lookup.
        transfer_jobs: Ids of its jobs in flight.
        room_watch: Limits how many chunks without room are offered again.
        may_load: False after a failed load: the blocks are then computed.
        has_ended: Whether the scheduler has ended the request.
        finish_signalled: Whether the manager was notified of the end.
        generation: The generation in which it began; used for the keys of all its blocks.
    """

    request: SchedulerRequest
    ctx: ReqContext
    policy: OffloadPolicy
    groups: Sequence[GroupState]
    generation: Generation
    local_tokens: int = 0
    offered_tokens: int = 0
    loaded_tokens: int = 0
    reads_content: bool | None = None
    waits_below: JobId | None = None
    transfer_jobs: set[JobId] = field(default_factory=set)
    room_watch: RoomWatch = field(default_factory=RoomWatch)
    may_load: bool = True
    has_ended: bool = False
    finish_signalled: bool = False

    def restart(self, local_tokens: int) -> None:
        """Clear the block tables: the request starts or was preempted.

        Args:
            local_tokens: Number of tokens at its start that are present on the device.
        """
        self.local_tokens = local_tokens
        self.offered_tokens = 0
        self.loaded_tokens = 0
        self.reads_content = None
        self.room_watch.clear()
        for group in self.groups:
            group.block_ids = []
            group.next_chunk = 0

    def extend_keys(self, geometry: ConnectorGeometry) -> None:
        """Create the keys of the chunks that have become full since the last call."""
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
        """Remove blocks that a sliding window freed, and that were reallocated, from the tables.

        `NULL_BLOCK` takes their place. Blocks before `next_chunk` are skipped, because they are not
        stored again and tables can be long.
        """
        for index, group in enumerate(self.groups):
            if geometry.groups[index].sliding_window_tokens is None:
                continue
            for at in range(group.next_chunk * geometry.blocks_per_chunk, len(group.block_ids)):
                if group.block_ids[at] in allocated:
                    group.block_ids[at] = NULL_BLOCK

    def store_anew(self, geometry: ConnectorGeometry) -> None:
        """Offer all chunks again, except those outside the sliding window.

        The device blocks of the latter may have been reallocated since they were stored.
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

    def load_failed(self, geometry: ConnectorGeometry) -> set[int]:
        """Return the device blocks that the failed load was to fill; prevent further loads."""
        self.may_load = False
        end = self.local_tokens + self.loaded_tokens
        invalid = {
            block
            for group, shape in zip(self.groups, geometry.groups, strict=True)
            for block in group.block_ids[
                self.local_tokens // shape.tokens_per_block : end // shape.tokens_per_block
            ]
        }
        return invalid - {NULL_BLOCK}


class DeviceContents:
    """Tracks which device blocks have known content and may therefore be stored.

    A block loses its content when the scheduler allocates it, and has it again when a load has
    filled it or its request computes its tokens. Until then it stays unfilled, whichever request
    finds it in the device's prefix cache. Blocks found there are otherwise trusted.

    Attributes:
        unfilled: The blocks without known content; at most one entry per device block.
    """

    def __init__(self) -> None:
        self.unfilled: set[int] = set()

    def have_content(self, blocks: Collection[int]) -> bool:
        """Return whether all blocks have known content; a null block has none."""
        return NULL_BLOCK not in blocks and self.unfilled.isdisjoint(blocks)

    def note_computed(
        self, state: ConnectorRequest, geometry: ConnectorGeometry, tokens: int
    ) -> None:
        """Record the next tokens of a request as computed in this step.

        What is computed from unfilled blocks is wrong, so a request that begins with such blocks
        within its windows fills no others.
        """
        start = state.request.num_computed_tokens
        shapes = list(zip(state.groups, geometry.groups, strict=True))
        if state.reads_content is None:
            known = min(start, state.local_tokens + state.loaded_tokens)
            state.reads_content = all(
                self.unfilled.isdisjoint(
                    group.block_ids[shape.first_block_read(start) : known // shape.tokens_per_block]
                )
                for group, shape in shapes
            )
        if not state.reads_content:
            return
        for group, shape in shapes:
            size = shape.tokens_per_block
            # The first tokens of a partly found block come from the device's prefix cache.
            first = start // size if start == state.local_tokens else -(-start // size)
            self.unfilled.difference_update(group.block_ids[first : -(-(start + tokens) // size)])
