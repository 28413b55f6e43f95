"""Conversions between vLLM's types and this package's; no other module converts.

Unqualified names in annotations are this package's; vLLM's are qualified with their module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu import common as cpu
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering import base as tiering

from kvoffload_async.errors import ConfigError, StateError
from kvoffload_async.facade.connector.protocol import TransferJobSpec
from kvoffload_async.integrations.vllm.internals import share_positions
from kvoffload_async.transport.layout import CopyRun, KVLayout, PageTable
from kvoffload_async.types import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    JobMetadata,
    JobResult,
    LoadTierFilter,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierMatcher,
    TransferResult,
    as_block_ids,
)

_LOOKUP: Final = {own: base.LookupResult[own.name] for own in LookupResult}
_POLICY: Final = {
    OffloadPolicy.BLOCK_LEVEL: base.OffloadPolicy.CHUNK_LEVEL,
    OffloadPolicy.REQUEST_LEVEL: base.OffloadPolicy.REQUEST_LEVEL,
}
_MEDIUM: Final = {own: base.Medium[own.name] for own in Medium}

# -- from vLLM ----------------------------------------------------------------------------------


def rows_of(primary_kv_view: memoryview) -> memoryview:
    """Return a view of the primary as bytes, `[num_slots, slot_bytes]`; the caller releases it.

    Raises:
        StateError: The view is not two-dimensional and contiguous.
    """
    shape, strides = primary_kv_view.shape, primary_kv_view.strides
    if shape is None or strides is None or len(shape) != 2 or not primary_kv_view.c_contiguous:  # noqa: PLR2004 - 2-D
        raise StateError(
            f"primary_kv_view has shape {shape}; it must be [num_slots, slot_bytes], contiguous"
        )
    with primary_kv_view.cast("B") as flat:
        return flat.cast("B", (shape[0], strides[0]))


def request_of(context: base.ReqContext) -> ReqContext:
    """Convert vLLM's context of a request to this package's, cached in the state of vLLM's."""
    known = context.get_state(ReqContext)
    if isinstance(known, ReqContext):
        return known
    made = ReqContext(
        context.req_id,
        context.kv_transfer_params,
        load_tier_filter=tier_filter(context.load_tier_filter),
        kv_hints=context.kv_hints,
    )
    share_positions(context, made)
    context.set_state(made)
    return made


def job_of(job: tiering.TransferJob) -> JobMetadata:
    """Convert vLLM's transfer job to this package's, with a copy of its slots."""
    return JobMetadata(
        job.job_id,
        tuple(job.keys),
        as_block_ids(job.chunk_ids),
        job.is_promotion,
        request_of(job.req_context),
        job.submit_time,
    )


def locality_of(locality: Locality | None) -> base.Locality | None:
    """Convert a tier's locality to vLLM's; None stays None."""
    return None if locality is None else base.Locality(locality.value)


def file_mapper_of(
    offloading_spec: base.OffloadingSpec, root_dir: str, *, parallel_agnostic: bool = True
) -> FileMapper:
    """Return the file mapper of vLLM's own `fs` tier, created with the arguments that vLLM uses.

    Its `get_run_config()` has all fields that the layout of a block's bytes depends on; its `rank`
    is the blocks' rank.

    Args:
        offloading_spec: vLLM's spec.
        root_dir: Directory of the tier.
        parallel_agnostic: Whether vLLM may leave the parallel sizes out, as its tier does; vLLM
            assumes that this is right for more layouts than it is.
    """
    return FileMapper.from_offloading_spec(
        root_dir=root_dir,
        offloading_spec=offloading_spec,
        blocks_per_file=offloading_spec.blocks_per_chunk,
        parallel_agnostic=parallel_agnostic,
    )


# -- to vLLM ------------------------------------------------------------------------------------


def lookup_result(result: LookupResult) -> base.LookupResult:
    """Convert the result of a lookup to vLLM's type."""
    return _LOOKUP[result]


def offloading_context(context: RequestOffloadingContext) -> base.RequestOffloadingContext:
    """Convert a tier's offloading policy for a request to vLLM's type."""
    return base.RequestOffloadingContext(_POLICY[context.policy])


def job_result(result: JobResult, keys: Sequence[OffloadKey]) -> tiering.JobResult:
    """Convert a job's result to vLLM's type; successful keys are in the order of `keys`."""
    landed = result.successful_keys
    return tiering.JobResult(
        job_id=result.job_id,
        success=result.success,
        successful_keys=tuple(key for key in keys if key in landed) if landed else None,
        transfer_time=result.transfer_time,
        transfer_bytes=result.transfer_bytes,
    )


def event(event: OffloadingEvent, locality: base.Locality | None) -> base.OffloadingEvent:
    """Convert an event of a tier with this locality to vLLM's type."""
    return base.OffloadingEvent(
        keys=list(event.keys),
        medium=_MEDIUM[event.medium],
        removed=event.removed,
        locality=locality,
        ownership=event.ownership,
        removal_expected=event.removal_expected,
    )


def definitions(
    kind: type[base.OffloadingMetricMetadata], documentation: Mapping[str, str], *labels: str
) -> dict[str, base.OffloadingMetricMetadata]:
    """Return vLLM's definitions of metrics of one kind with common labels, from help texts."""
    return {
        name: kind(documentation=text, labelnames=labels) for name, text in documentation.items()
    }


def counter_stats(
    counted: Iterable[tuple[str, tuple[str, ...], int]],
) -> OffloadingConnectorStats | None:
    """Return vLLM's stats from tuples (counter, label values, increment); None if empty."""
    stats: Any = OffloadingConnectorStats()
    for name, labels, amount in counted:
        stats.increase_counter(name, amount, labels)
    return None if stats.is_empty() else stats


# -- the whole engine ---------------------------------------------------------------------------

_HAS_METADATA_ONLY: Final = "metadata_only" in base.OffloadingEvent.__dataclass_fields__
"""Whether vLLM's events have `metadata_only`: since 0.33."""


def tier_filter(given: base.TierFilter) -> LoadTierFilter:
    """Convert vLLM's filter of the tiers that a request may load from."""
    return frozenset(
        TierMatcher(
            None if matcher.medium is None else Medium(matcher.medium.value),
            None if matcher.locality is None else Locality(matcher.locality.value),
        )
        for matcher in given.matchers
    )


def schedule_end(context: base.ScheduleEndContext) -> ScheduleEndContext:
    """Convert vLLM's end of a scheduler step: new and preempted requests."""
    return ScheduleEndContext(context.new_req_ids, context.preempted_req_ids)


def transfer(device: base.GPULoadStoreSpec, host: base.LoadStoreSpec) -> TransferJobSpec:
    """Convert vLLM's copy between device blocks and slots, in either direction."""
    return TransferJobSpec(
        GPULoadStoreSpec(
            as_block_ids(device.block_ids),
            group_sizes=tuple(device.group_sizes),
            block_indices=tuple(device.block_indices),
        ),
        CPULoadStoreSpec(as_block_ids(host.block_ids)),
        req_id="",
    )


def kv_layout(
    kv_caches: base.CanonicalKVCaches, blocks_per_chunk: int, *, is_canonical: bool = False
) -> KVLayout:
    """Return the layout of a worker's tensors, without copying them.

    As in vLLM's own region, a cell contains the tensors consecutively in list order, each in whole
    pages, independent of the groups.

    Args:
        kv_caches: The tensors.
        blocks_per_chunk: Device blocks per chunk.
        is_canonical: Whether workers share a cell, in which their pages are scattered as their
            mappings say; there must be one for each layer.

    Raises:
        ConfigError: The tensors are not pages by block, or not on one device.
    """
    tensors: list[torch.Tensor] = []
    for index, cache in enumerate(kv_caches.tensors):
        tensor, page_bytes = cache.tensor.detach(), cache.page_size_bytes
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.shape[1] != page_bytes:  # noqa: PLR2004 - 2-D
            raise ConfigError(
                f"KV cache tensor {index} has shape {tuple(tensor.shape)} and elements of "
                f"{tensor.element_size()} bytes; it must be [num_blocks, {page_bytes}] in bytes"
            )
        tensors.append(tensor.view(torch.uint8))
    if len({tensor.device for tensor in tensors}) != 1:
        raise ConfigError("the KV cache tensors must be on one device, and there must be one")
    sizes = [cache.page_size_bytes for cache in kv_caches.tensors]
    if is_canonical:
        sizes = canonical_page_bytes(kv_caches)
    *offsets, chunk_bytes = accumulate((size * blocks_per_chunk for size in sizes), initial=0)
    groups = [
        [
            _page_table(tensors[index], offsets[index], sizes[index], mapping)
            for index, mapping in dict.fromkeys(
                (ref.tensor_idx, ref.mapping if is_canonical else None) for ref in refs
            )
        ]
        for refs in kv_caches.group_data_refs
    ]
    return KVLayout(groups, blocks_per_chunk, chunk_bytes)


def require_announced(layout: KVLayout, announced_bytes: int) -> None:
    """Raise ConfigError if a chunk takes more bytes than vLLM's configuration says."""
    if layout.chunk_bytes > announced_bytes:
        raise ConfigError(
            f"a chunk of the KV caches takes {layout.chunk_bytes} bytes, and vLLM announced "
            f"{announced_bytes}: this model's caches are not supported"
        )


def canonical_page_bytes(kv_caches: base.CanonicalKVCaches) -> list[int]:
    """Return the bytes of a canonical page of each tensor, which layers of groups may share."""
    sizes = [0] * len(kv_caches.tensors)
    for ref in chain(*kv_caches.group_data_refs):
        sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return sizes


def _runs_of(mapping: base.CanonicalPageMapping) -> list[CopyRun]:
    """Return a mapping's runs; single fragments at equal distances become one."""
    runs: list[CopyRun] = []
    for run in mapping.runs:
        page, slot, size = run.local_offset, run.canonical_offset, run.fragment_size
        last = runs[-1] if runs and runs[-1].fragment_bytes == size else None
        if last is not None and run.num_fragments == 1:
            count = last.num_fragments
            strides = (page - last.page_offset) // count, (slot - last.slot_offset) // count
            longer = CopyRun(*last[:3], count + 1, *strides)
            is_next = (longer.page_end, longer.slot_end) == (page + size, slot + size)
            if is_next and min(strides) > 0 and (count == 1 or last[4:] == strides):
                runs[-1] = longer
                continue
        strides = run.local_stride, run.canonical_stride
        runs.append(CopyRun(page, slot, size, run.num_fragments, *strides))
    return runs


def _page_table(
    pages: torch.Tensor,
    offset_bytes: int,
    slot_page_bytes: int,
    mapping: base.CanonicalPageMapping | None,
) -> PageTable:
    if mapping is None:
        return PageTable(pages, offset_bytes)
    return PageTable(
        pages,
        offset_bytes,
        slot_page_bytes,
        _runs_of(mapping),
        mapping.num_writers,
        mapping.writer_index,
    )


def load_store_spec(spec: CPULoadStoreSpec) -> cpu.CPULoadStoreSpec:
    """Convert a transfer's slots to vLLM's type, which is sent to the workers."""
    return cpu.CPULoadStoreSpec(spec.block_ids.tolist())


def prepare_store_output(output: PrepareStoreOutput) -> base.PrepareStoreOutput:
    """Convert the result of `prepare_store` to vLLM's type."""
    return base.PrepareStoreOutput(
        keys_to_store=list(output.keys_to_store),
        store_spec=load_store_spec(output.store_spec),
        evicted_keys=list(output.evicted_keys),
    )


def transfer_result(result: TransferResult) -> base.TransferResult:
    """Convert a worker's job result, always to a success: vLLM accepts no failures."""
    return base.TransferResult(
        job_id=result.job_id,
        success=True,
        transfer_size=result.transfer_size,
        transfer_time=result.transfer_time,
    )


def events(given: Iterable[OffloadingEvent]) -> Iterator[base.OffloadingEvent]:
    """Convert events of the primary and its tiers to vLLM's; events unknown to vLLM are skipped."""
    for one in given:
        if one.metadata_only and not _HAS_METADATA_ONLY:
            continue  # these blocks were never announced as stored
        made = event(one, locality_of(one.locality))
        if _HAS_METADATA_ONLY:
            made.metadata_only = one.metadata_only
        yield made


def engine_stats(
    counted: Iterable[tuple[str, tuple[str, ...], int]],
    gauges: Iterable[tuple[str, tuple[str, ...], float]],
    observed: Mapping[str, Sequence[float]],
) -> OffloadingConnectorStats:
    """Return vLLM's stats from increments, gauges and observations."""
    stats: Any = counter_stats(counted) or OffloadingConnectorStats()
    for name, labels, value in gauges:
        stats.set_gauge(name, value, labels)
    for name, values in observed.items():
        for value in values:
            stats.observe_histogram(name, value)
    return stats


# -- tiers written for vLLM ---------------------------------------------------------------------

_OWN_LOOKUP: Final = {theirs: own for own, theirs in _LOOKUP.items()}
_OWN_MEDIUM: Final = {theirs: own for own, theirs in _MEDIUM.items()}
_OWN_LOCALITY: Final = {base.Locality(own.value): own for own in Locality}


def context_of(request: ReqContext) -> base.ReqContext:
    """Convert this package's context of a request to vLLM's, cached in the former's state.

    It is not the one that vLLM's scheduler has: each of the two would keep the other alive.
    """
    known = request.get_scratch(base.ReqContext)
    if known is None:
        known = base.ReqContext(request.req_id, request.kv_transfer_params, request.kv_hints)
        request.put_scratch(known)
    return known


def transfer_job(job: JobMetadata) -> tiering.TransferJob:
    """Convert this package's job to vLLM's transfer job; its slots are read-only."""
    return tiering.TransferJob(
        job.job_id,
        job.keys,
        job.block_ids,
        job.is_promotion,
        context_of(job.req_context),
        job.submit_time,
    )


def step_end(context: ScheduleEndContext | None) -> base.ScheduleEndContext:
    """Convert the end of a scheduler step to vLLM's type."""
    given = context or ScheduleEndContext()
    return base.ScheduleEndContext(given.new_req_ids, given.preempted_req_ids)


def own_location(manager: tiering.SecondaryTierManager) -> tuple[Medium, Locality]:
    """Return the medium and locality of vLLM's tier manager; local storage by default."""
    return (
        _OWN_MEDIUM.get(manager.medium, Medium.STORAGE),
        _OWN_LOCALITY.get(getattr(manager, "locality", None), Locality.LOCAL),
    )


# The functions below get values of third-party code. They return a value that cannot be converted
# unchanged, and `facade.external` refuses it.


def own_lookup(answer: Any) -> Any:  # noqa: ANN401 - see above
    """Convert the lookup result of vLLM's tier."""
    return _OWN_LOOKUP.get(answer, answer)


def own_offloading_context(context: base.RequestOffloadingContext) -> RequestOffloadingContext:
    """Convert the offloading policy of vLLM's tier for a request."""
    is_request_level = context.policy is base.OffloadPolicy.REQUEST_LEVEL
    return RequestOffloadingContext(
        OffloadPolicy.REQUEST_LEVEL if is_request_level else OffloadPolicy.BLOCK_LEVEL
    )


def own_result(result: Any) -> Any:  # noqa: ANN401 - see above
    """Convert the job result of vLLM's tier."""
    with suppress(AttributeError, TypeError):
        landed = result.successful_keys
        return JobResult(
            result.job_id,
            result.success,
            successful_keys=None if landed is None else frozenset(landed),
            transfer_time=result.transfer_time,
            transfer_bytes=result.transfer_bytes,
        )
    return result


def own_event(event: Any) -> Any:  # noqa: ANN401 - see above
    """Convert an event of vLLM's tier."""
    with suppress(AttributeError, KeyError, TypeError):
        return OffloadingEvent(
            tuple(event.keys),
            _OWN_MEDIUM[event.medium],
            event.removed,
            locality=_OWN_LOCALITY.get(event.locality),
            metadata_only=getattr(event, "metadata_only", False),
            removal_expected=event.removal_expected,
        )
    return event
