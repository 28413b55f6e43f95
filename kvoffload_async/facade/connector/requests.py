"""What the adapter remembers of one request."""

from __future__ import annotations

from kvoffload_async.facade.connector.protocol import (
    NULL_BLOCK,
    BlockTables,
    ConnectorGeometry,
    SchedulerRequest,
)
from kvoffload_async.types import (
    JobId,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    make_offload_key,
)


class GroupState:
    """One KV-cache group of a request: its keys, its device blocks, how far it is stored."""

    __slots__ = ("block_ids", "keys", "next_chunk")

    def __init__(self) -> None:
        self.keys: list[OffloadKey] = []
        self.block_ids: list[int] = []
        self.next_chunk = 0


class ConnectorRequest:
    """One request, from its first lookup until its last transfer has ended.

    In flight are either one load, or any number of stores.
    """

    __slots__ = (
        "ctx",
        "finish_signalled",
        "groups",
        "local_tokens",
        "policy",
        "request",
        "transfer_jobs",
    )

    def __init__(
        self, request: SchedulerRequest, ctx: ReqContext, policy: OffloadPolicy, groups: int
    ) -> None:
        self.request = request
        self.ctx = ctx
        self.policy = policy
        self.groups = [GroupState() for _ in range(groups)]
        self.local_tokens = 0
        self.transfer_jobs: set[JobId] = set()
        self.finish_signalled = False

    def restart(self, local_tokens: int) -> None:
        """Forget the block tables: the request is (re)scheduled from `local_tokens` on."""
        self.local_tokens = local_tokens
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
                key = make_offload_key(hashes[per_chunk * (chunk + 1) - 1], index)
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

    def drop_stale_blocks(self, reallocated: set[int], kept: BlockTables) -> None:
        """Null out ids that a sliding window let go and that belong to somebody else now.

        Args:
            reallocated: Device blocks that were allocated in this step.
            kept: Those of them that were allocated to this request, a sequence a group.
        """
        for group, own in zip(self.groups, kept, strict=True):
            start = len(group.block_ids) - len(own)
            for position in range(start):
                if group.block_ids[position] in reallocated:
                    group.block_ids[position] = NULL_BLOCK
