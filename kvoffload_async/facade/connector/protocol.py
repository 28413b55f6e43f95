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
        block_hashes: The chained hash of every full run of `tokens_per_hash` tokens, in order;
            grows with the request.
        num_tokens: Prompt and generated tokens so far.
        num_prompt_tokens: Prompt tokens.
        num_computed_tokens: Tokens whose KV lies in the device cache, or is being computed.
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
"""Device block ids of a request, a sequence a KV-cache group; `NULL_BLOCK` for none."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the scheduler decided in one step.

    Attributes:
        num_scheduled_tokens: Tokens to compute in this step, by request.
        new_blocks: Device blocks that were appended in this step, by request and group.
        block_tables: Whole tables of the requests that (re)start in this step.
        preempted_req_ids: Requests that lost their device blocks in this step.
        finished_req_ids: Requests that ended since the last step.
    """

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    new_blocks: Mapping[str, BlockTables] = field(default_factory=dict)
    block_tables: Mapping[str, BlockTables] = field(default_factory=dict)
    preempted_req_ids: Collection[str] = ()
    finished_req_ids: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A KV-cache group: layers that share a block table.

    Attributes:
        tokens_per_block: Tokens of one device block.
        sliding_window_tokens: How far back its attention reaches; None for all the way.
    """

    tokens_per_block: int
    sliding_window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ConnectorGeometry:
    """The shapes that the adapter computes with.

    Attributes:
        groups: The KV-cache groups, by index.
        tokens_per_hash: Tokens behind one of a request's `block_hashes`.
        blocks_per_chunk: Device blocks of one offloaded block.
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
        if not self.groups or self.blocks_per_chunk < 1 or self.num_workers < 1:
            raise ConfigError("groups, blocks_per_chunk and num_workers must be at least 1")
        for index in range(len(self.groups)):
            if self.tokens_per_chunk(index) % self.tokens_per_hash:
                raise ConfigError(
                    f"groups[{index}]: a chunk of {self.tokens_per_chunk(index)} tokens is no "
                    f"multiple of tokens_per_hash={self.tokens_per_hash}"
                )

    def tokens_per_chunk(self, group: int) -> int:
        """Return the tokens of one offloaded block of a group."""
        return self.groups[group].tokens_per_block * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class TransferJobSpec:
    """One copy between device and primary, for a worker.

    Attributes:
        device: The device blocks, group after group.
        host: The primary slots, one a chunk, group after group.
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
        store_jobs: Device to host, to start with the next step.
        jobs_to_flush: Jobs that must have ended before the step overwrites device blocks.
    """

    load_jobs: Mapping[JobId, TransferJobSpec] = field(default_factory=dict)
    store_jobs: Mapping[JobId, TransferJobSpec] = field(default_factory=dict)
    jobs_to_flush: Collection[JobId] = frozenset()


@dataclass(frozen=True, slots=True)
class ConnectorOutput:
    """What the workers report in one step, summed over them.

    Attributes:
        completed: How many workers ended each job.
        failed: Jobs that failed on at least one of them.
    """

    completed: Mapping[JobId, int] = field(default_factory=dict)
    failed: Collection[JobId] = frozenset()
