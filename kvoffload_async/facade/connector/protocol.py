"""The types that a scheduler and the connector exchange: requests, steps, the KV cache's geometry.

Any scheduler can implement the protocol with its own objects. Token positions count from the start
of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvoffload_async.errors import ConfigError
from kvoffload_async.types import CPULoadStoreSpec, GPULoadStoreSpec, JobId

NULL_BLOCK = 0
"""Device block id for "no block", such as a block freed by a sliding window."""


class SchedulerRequest(Protocol):
    """A request as its scheduler sees it; read only on the scheduler's thread.

    Attributes:
        request_id: Unique among the requests in flight.
        block_hashes: The chained hash of every `tokens_per_hash` full tokens, in order, length
            `num_tokens // tokens_per_hash`; grows with the request.
        num_tokens: Prompt and generated tokens so far.
        num_prompt_tokens: Prompt tokens.
        num_computed_tokens: Number of tokens from the start whose KV was in the request's device
            blocks before this step, without the tokens scheduled in this step. 0 after a
            preemption; decreased when loaded blocks are invalid.
        kv_transfer_params: The serving stack's per-request parameters.

    A request may also have `kv_hints`; see `ReqContext`.
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
        """Return whether the request has ended, for any reason."""
        ...


BlockTables = Sequence[Sequence[int]]
"""Device block ids of a request, shape `[num_groups][num_blocks]`; `NULL_BLOCK` for no block.

The block at index `i` of a group holds the tokens from `i * tokens_per_block`.
"""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The scheduler's decisions in one step.

    Attributes:
        num_scheduled_tokens: Tokens to compute in this step, by request; a request that shares a
            block computed in this step follows the request that computes it.
        new_blocks: Device blocks appended in this step to known tables, by request, shape
            `[num_groups][num_new_blocks]`.
        block_tables: Complete tables of the requests that start or resume in this step.
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
        tokens_per_block: Tokens per device block.
        sliding_window_tokens: Size of the attention window; None for full attention.
    """

    tokens_per_block: int
    sliding_window_tokens: int | None = None

    def first_block_read(self, tokens: int) -> int:
        """Return the index of the first block that the token at position `tokens` attends to."""
        window = self.sliding_window_tokens
        return 0 if window is None else max(0, tokens + 1 - window) // self.tokens_per_block


@dataclass(frozen=True, slots=True)
class ConnectorGeometry:
    """The geometry of the KV cache and the limits of offloading.

    Attributes:
        groups: The KV-cache groups, by index.
        tokens_per_hash: Tokens per element of a request's `block_hashes`.
        blocks_per_chunk: Device blocks per chunk, the unit offloaded under one key.
        num_workers: Number of workers; each of them reports the end of each job.
        max_offload_tokens: Maximum tokens offloaded per request; None: all.
        max_load_tokens: Maximum tokens loaded per request; None: all.
        offload_prompt_only: Whether generated tokens are excluded.
    """

    groups: Sequence[KVGroup]
    tokens_per_hash: int
    blocks_per_chunk: int = 1
    num_workers: int = 1
    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    offload_prompt_only: bool = True

    def __post_init__(self) -> None:
        """Check that every chunk ends at a hash boundary.

        Raises:
            ConfigError: A group's chunks do not; the message names the group.
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

    @property
    def has_windows(self) -> bool:
        """Whether a group has a sliding window."""
        return any(group.sliding_window_tokens is not None for group in self.groups)

    def tokens_per_chunk(self, group: int) -> int:
        """Return the number of tokens per chunk of a group."""
        return self.groups[group].tokens_per_block * self.blocks_per_chunk

    def chunks_per_window(self, group: int) -> int | None:
        """Return the number of chunks in a group's window, rounded up; None for full attention."""
        window = self.groups[group].sliding_window_tokens
        return None if window is None else -(-window // self.tokens_per_chunk(group))


@dataclass(frozen=True, slots=True)
class TransferJobSpec:
    """One copy between device and primary, for a worker.

    Attributes:
        device: The device blocks, shape `[num_device_blocks]`, by group, without null blocks. A
            load's first chunk may be partial: its first device block is
            `block_indices[group] % blocks_per_chunk` blocks inside it.
        host: The primary slots, shape `[num_chunks]`, one per chunk, by group.
        req_id: The request of the copy.
    """

    device: GPULoadStoreSpec
    host: CPULoadStoreSpec
    req_id: str


@dataclass(frozen=True, slots=True)
class OffloadingConnectorMetadata:
    """The transfer jobs of one step, for the workers.

    Attributes:
        load_jobs: Host-to-device copies to start in this step.
        store_jobs: Device-to-host copies to start in the next step. Those in `jobs_to_flush` start
            at once, because their blocks were computed in an earlier step.
        jobs_to_flush: Jobs that must end before the step overwrites device blocks. Workers
            ignore unknown ids.
    """

    load_jobs: Mapping[JobId, TransferJobSpec] = field(default_factory=dict)
    store_jobs: Mapping[JobId, TransferJobSpec] = field(default_factory=dict)
    jobs_to_flush: Collection[JobId] = frozenset()


@dataclass(frozen=True, slots=True)
class ConnectorOutput:
    """The jobs that ended in one step, summed over all workers.

    Attributes:
        completed: Job id -> number of workers on which the job has ended since the last report,
            successfully or not.
        failed: Ids of the jobs in `completed` that failed on at least one worker.
    """

    completed: Mapping[JobId, int] = field(default_factory=dict)
    failed: Collection[JobId] = frozenset()
