"""What the adapter needs to know of a scheduler: a request, a step, the KV cache's geometry.

Any scheduler can satisfy it with its own objects. Tokens count from the start of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvoffload_async.errors import ConfigError
from kvoffload_async.types import CPULoadStoreSpec, GPULoadStoreSpec, JobId

NULL_BLOCK = 0
"""The device block that stands for "none": a sliding window's blocks that were let go."""


class SchedulerRequest(Protocol):
    """A request as its scheduler knows it; read on the scheduler's thread only.

    Attributes:
        request_id: Unique among the requests in flight.
        block_hashes: The chained hash of every full run of `tokens_per_hash` tokens, in order,
            length `num_tokens // tokens_per_hash`; grows with the request.
        num_tokens: Prompt and generated tokens so far.
        num_prompt_tokens: Prompt tokens.
        num_computed_tokens: Tokens, from the start, whose KV lies in the request's device blocks
            once the steps before this one have run; the tokens scheduled in this step come on
            top. 0 after a preemption; set back when loaded blocks turn out to be invalid.
        kv_transfer_params: The serving stack's per-request parameters.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...

    def is_finished(self) -> bool:
        """Tell whether the request has ended, in whatever way."""
        ...


BlockTables = Sequence[Sequence[int]]
"""Device block ids of a request, shape `[num_groups][num_blocks]`; `NULL_BLOCK` for none.

The block at index `i` of a group holds tokens `i * tokens_per_block` up to the next one's.
"""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the scheduler decided in one step.

    Attributes:
        num_scheduled_tokens: Tokens to compute in this step, by request.
        new_blocks: Device blocks that were appended in this step to tables that are known
            already, by request, shape `[num_groups][num_new_blocks]`.
        block_tables: Whole tables of the requests that start or resume in this step.
        preempted_req_ids: Requests that lost their device blocks in this step.
    """

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    new_blocks: Mapping[str, BlockTables] = field(default_factory=dict)
    block_tables: Mapping[str, BlockTables] = field(default_factory=dict)
    preempted_req_ids: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A KV-cache group: layers that share a block table.

    Attributes:
        tokens_per_block: Tokens of one device block.
        sliding_window_tokens: How many tokens back its attention reaches; None for all the way.
    """

    tokens_per_block: int
    sliding_window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ConnectorGeometry:
    """The shapes that the adapter computes with.

    Attributes:
        groups: The KV-cache groups, by index.
        tokens_per_hash: Tokens behind one of a request's `block_hashes`.
        blocks_per_chunk: Device blocks of one chunk, which is what is offloaded under one key.
        num_workers: Workers that each report every job.
        max_offload_tokens: Tokens of a request that are offloaded at most; None: all.
        max_load_tokens: Tokens that one request loads at most; None: all.
        offload_prompt_only: Whether generated tokens stay out.
    """

    groups: Sequence[KVGroup]
    tokens_per_hash: int
    blocks_per_chunk: int = 1
    num_workers: int = 1
    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    offload_prompt_only: bool = True

    def __post_init__(self) -> None:
        """Check that every chunk ends where a hash ends.

        Raises:
            ConfigError: One does not; the message names the group.
        """
        if not self.groups:
            raise ConfigError("groups: there must be at least one")
        if min(self.tokens_per_hash, self.blocks_per_chunk, self.num_workers) < 1:
            raise ConfigError("tokens_per_hash, blocks_per_chunk and num_workers: at least 1 each")
        for index in range(len(self.groups)):
            if self.tokens_per_chunk(index) % self.tokens_per_hash:
                raise ConfigError(
                    f"groups[{index}]: a chunk of {self.tokens_per_chunk(index)} tokens is no "
                    f"multiple of tokens_per_hash={self.tokens_per_hash}"
                )

    def tokens_per_chunk(self, group: int) -> int:
        """Return the tokens of one chunk of a group."""
        return self.groups[group].tokens_per_block * self.blocks_per_chunk

    def chunks_per_window(self, group: int) -> int | None:
        """Return how many chunks a group's window reaches back at most; None for all of them."""
        window = self.groups[group].sliding_window_tokens
        return None if window is None else -(-window // self.tokens_per_chunk(group))


@dataclass(frozen=True, slots=True)
class TransferJobSpec:
    """One copy between device and primary, for a worker.

    Attributes:
        device: The device blocks, shape `[num_device_blocks]`, group after group; nulls are not
            among them. A load's first chunk may be partial: its first device block lies
            `block_indices[group] % blocks_per_chunk` blocks inside of it.
        host: The primary slots, shape `[num_chunks]`, one a chunk, group after group.
        req_id: The request that it is for.
    """

    device: GPULoadStoreSpec
    host: CPULoadStoreSpec
    req_id: str


@dataclass(frozen=True, slots=True)
class OffloadingConnectorMetadata:
    """What the workers are told in one step.

    Attributes:
        load_jobs: Host to device, to start in this step.
        store_jobs: Device to host, to start with the next step; those that are to be flushed,
            at once: what they read was computed in an earlier step.
        jobs_to_flush: Jobs that must have ended before the step overwrites device blocks. A
            worker ignores those that it does not know.
    """

    load_jobs: Mapping[JobId, TransferJobSpec] = field(default_factory=dict)
    store_jobs: Mapping[JobId, TransferJobSpec] = field(default_factory=dict)
    jobs_to_flush: Collection[JobId] = frozenset()


@dataclass(frozen=True, slots=True)
class ConnectorOutput:
    """What the workers report in one step, summed over them.

    Attributes:
        completed: How many workers ended each job, well or not, since the last report.
        failed: Those of them that failed on at least one worker.
    """

    completed: Mapping[JobId, int] = field(default_factory=dict)
    failed: Collection[JobId] = frozenset()
