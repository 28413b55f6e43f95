"""In which order a row of the primary holds which numbers, as a digest.

Equal sizes and an equal checksum do not make two rows interchangeable: ranks, tensors, heads,
tokens and the halves of a page may stand in another order. The digest is computed from the tensors
that were registered; only where no process of ours has seen them, from what vLLM's scheduler knows.
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
from kvoffload_async.integrations.vllm.surroundings import RegisteredLayer, Surroundings

DIGEST_BYTES = 16


def layout_of_layers(layers: Mapping[str, RegisteredLayer], groups: Sequence[Sequence[str]]) -> str:
    """Return the digest of one worker's registered tensors.

    Args:
        layers: The worker's layers by name; a group may name others, which other ranks have.
        groups: The layers of each KV-cache group that is offloaded, in vLLM's order.
    """
    first_at: dict[tuple[int, ...], str] = {}

    def described(name: str) -> list[Any]:
        layer = layers.get(name)
        row: list[Any] = [name] if layer is None else [name, layer.kind]
        for tensor in () if layer is None else layer.tensors:
            # Layers of several groups may share one tensor, and then one part of the row.
            place = (tensor.data_ptr(), *tensor.stride())
            shared_with = first_at.setdefault(place, name)
            within = [list(tensor.shape[1:]), list(tensor.stride())]
            row.append([shared_with, str(tensor.dtype), *within])
        return row

    rows = [[described(name) for name in names] for names in groups]
    devices = {_device_of(tensor) for layer in layers.values() for tensor in layer.tensors}
    return _digest({"devices": sorted(devices), "layers": rows})


def layout_of_pages(kv_caches: base.CanonicalKVCaches) -> str:
    """Return the digest of one worker's tensors where only their pages are known."""
    return _digest(
        {
            "devices": sorted({_device_of(cache.tensor) for cache in kv_caches.tensors}),
            "pages": [cache.page_size_bytes for cache in kv_caches.tensors],
            "groups": [
                [[ref.tensor_idx, ref.page_size_bytes] for ref in refs]
                for refs in kv_caches.group_data_refs
            ],
        }
    )


def layout_of_ranks(digests: Sequence[str]) -> str:
    """Return the digest of a row that has a cell a rank, given each rank's."""
    return digests[0] if len(digests) == 1 else _digest(list(digests))


def announced_layout(surroundings: Surroundings | None) -> str:
    """Return the digest of what the scheduler knows of tensors in other processes."""
    if surroundings is None:
        return _digest("unknown")
    cache = surroundings.kv_cache_config
    return _digest(
        {
            "layout": getattr(cache, "kv_cache_layout", None),
            "device": _device(surroundings.vllm_config.device_config.device_type),
            "v2": bool(getattr(surroundings.vllm_config, "use_v2_model_runner", False)),
            "ranks": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
            "groups": [] if cache is None else [_group(group) for group in cache.kv_cache_groups],
            "placed": [] if cache is None else [_placed(one) for one in cache.kv_cache_tensors],
        }
    )


# -- inside -------------------------------------------------------------------------------------


def _group(group: Any) -> list[Any]:  # noqa: ANN401 - vLLM's KVCacheGroupSpec
    spec = group.kv_cache_spec
    return [list(group.layer_names), type(spec).__name__, settings.folded(spec)]


def _placed(tensor: Any) -> list[Any]:  # noqa: ANN401 - vLLM's KVCacheTensor
    """Where its layers lie within a block, whatever the number of blocks."""
    is_packed = tensor.layer_stride < tensor.block_stride
    within = [tensor.offset % tensor.block_stride, tensor.layer_stride] if is_packed else []
    return [list(tensor.layers), tensor.block_stride, within]


def _device_of(tensor: torch.Tensor) -> str:
    return _device(tensor.device.type)


def _device(kind: str) -> str:
    """Return the kind of device, as far as it decides what a byte means.

    On a CPU, kernels pack keys by its instruction set. CUDA and ROCm are one kind to torch, but
    have different 8-bit floats, and some AMD devices have others again.
    """
    if kind != "cpu":
        return f"{kind} {type(current_platform).__name__} {current_platform.fp8_dtype()}"
    has_amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - what vLLM itself asks
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{' amx' if has_amx else ''}"


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
