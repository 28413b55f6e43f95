"""Digest of the layout of a row of the primary.

Equal sizes and checksums do not make rows interchangeable: the order of ranks, tensors, heads,
tokens and K/V halves of a page may differ. The digest is computed from the registered tensors or,
if they are in another process, from the information of vLLM's scheduler.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload import base

from kvoffload_async.integrations.vllm import settings
from kvoffload_async.integrations.vllm.convert import canonical_page_bytes
from kvoffload_async.integrations.vllm.internals import ConnectorArguments, RegisteredLayer

DIGEST_BYTES = 16


def layout_of_layers(layers: Mapping[str, RegisteredLayer], groups: Sequence[Sequence[str]]) -> str:
    """Return the digest of the layout of one worker's registered tensors.

    Args:
        layers: The worker's layers by name; a group may name further layers, of other ranks.
        groups: Layer names of each offloaded KV-cache group, in vLLM's order.
    """
    first_at: dict[tuple[int, ...], str] = {}

    def described(name: str) -> list[Any]:
        layer = layers.get(name)
        row: list[Any] = [name] if layer is None else [name, layer.kind]
        for tensor in () if layer is None else layer.tensors:
            # Layers of several groups may share a tensor, and thus a part of the row.
            view = (tensor.data_ptr(), *tensor.stride())
            shared_with = first_at.setdefault(view, name)
            within = [list(tensor.shape[1:]), list(tensor.stride())]
            row.append([shared_with, str(tensor.dtype), *within])
        return row

    rows = [[described(name) for name in names] for names in groups]
    devices = {_device(one.device.type) for layer in layers.values() for one in layer.tensors}
    return _digest({"devices": sorted(devices), "layers": rows})


def layout_of_pages(kv_caches: base.CanonicalKVCaches) -> str:
    """Return the digest of the layout of one worker's tensors if only their pages are known."""
    return _digest(
        {
            "devices": sorted({_device(cache.tensor.device.type) for cache in kv_caches.tensors}),
            "pages": [cache.page_size_bytes for cache in kv_caches.tensors],
            "groups": [
                [[ref.tensor_idx, ref.page_size_bytes] for ref in refs]
                for refs in kv_caches.group_data_refs
            ],
        }
    )


def layout_of_canonical_pages(
    kv_caches: base.CanonicalKVCaches,
    layers: Mapping[str, RegisteredLayer],
    groups: Sequence[Sequence[str]],
    canonical_format: str,
) -> str:
    """Return the digest of a row of canonical pages, equal for all ranks and parallel sizes.

    Args:
        kv_caches: One worker's tensors, each layer with a mapping.
        layers: The worker's layers by name; empty if only their pages are known.
        groups: Layer names of each offloaded KV-cache group, in vLLM's order.
        canonical_format: vLLM's id of the format.
    """

    def described(name: str) -> list[Any]:
        if name not in layers:
            return [name]
        tensors = [[str(one.dtype), one.dim(), one.shape[-1]] for one in layers[name].tensors]
        return [name, layers[name].kind, *tensors]

    return _digest(
        {
            "format": canonical_format,
            "devices": sorted({_device(cache.tensor.device.type) for cache in kv_caches.tensors}),
            "pages": canonical_page_bytes(kv_caches),
            "groups": [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs],
            "layers": [[described(name) for name in names] for names in groups],
        }
    )


def layout_of_ranks(digests: Sequence[str], *, is_shared: bool = False) -> str:
    """Return the digest of a row's layout, from each rank's digest.

    Args:
        digests: One per rank.
        is_shared: Whether a row has one cell for all ranks, instead of one per rank. Ranks whose
            tensors differ cannot share a cell; they are distinguished nevertheless.
    """
    is_one_cell = len(digests) == 1 or (is_shared and len(set(digests)) == 1)
    return digests[0] if is_one_cell else _digest(list(digests))


def announced_layout(arguments: ConnectorArguments | None, canonical_format: str = "") -> str:
    """Return the layout digest of tensors in other processes, from the configuration alone.

    With vLLM's id of a canonical format, the digest does not depend on the parallel sizes.
    """
    if arguments is None:
        return _digest(["unknown", canonical_format] if canonical_format else "unknown")
    cache = arguments.kv_cache_config
    groups = [] if cache is None else [_group(group) for group in cache.kv_cache_groups]
    placed = [] if cache is None else [_placed(one) for one in cache.kv_cache_tensors]
    if canonical_format:
        groups = [[*others, _without_heads(spec)] for *others, spec in groups]
        placed = [[canonical_format, layers] for layers, *_ in placed]
    return _digest(
        {
            "layout": getattr(cache, "kv_cache_layout", None),
            "device": _device(arguments.vllm_config.device_config.device_type),
            "v2": bool(getattr(arguments.vllm_config, "use_v2_model_runner", False)),
            "ranks": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
            "groups": groups,
            "placed": placed,
        }
    )


# -- inside -------------------------------------------------------------------------------------


def _group(group: Any) -> list[Any]:  # noqa: ANN401 - vLLM's KVCacheGroupSpec
    spec = group.kv_cache_spec
    return [list(group.layer_names), type(spec).__name__, settings.folded(spec)]


def _without_heads(spec: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a folded KVCacheSpec without the heads of a rank, which follow from the model."""
    if not isinstance(spec, dict):
        return spec
    return {name: _without_heads(value) for name, value in spec.items() if name != "num_kv_heads"}


def _placed(tensor: Any) -> list[Any]:  # noqa: ANN401 - vLLM's KVCacheTensor
    """Return how a tensor's layers lie within a block, independent of the number of blocks."""
    is_packed = tensor.layer_stride < tensor.block_stride
    within = [tensor.offset % tensor.block_stride, tensor.layer_stride] if is_packed else []
    return [list(tensor.layers), tensor.block_stride, within]


def _device(kind: str) -> str:
    """Return the type of the device, as far as it affects the meaning of the bytes.

    On a CPU, kernels pack keys depending on the instruction set. torch reports CUDA and ROCm as one
    kind, but their 8-bit floats differ, also among AMD devices.
    """
    if kind != "cpu":
        return f"{kind} {type(current_platform).__name__} {current_platform.fp8_dtype()}"
    has_amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - as vLLM itself does
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{' amx' if has_amx else ''}"


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
