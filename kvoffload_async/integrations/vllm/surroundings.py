"""Access to vLLM's complete configuration.

vLLM passes a spec, and through it a tier, a summary that lacks most settings that keys and values
depend on. But it creates both while it creates the connector, which receives the complete
configuration. The summary contains an object of that configuration, which identifies the
connector's stack frame.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from kvoffload_async.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RegisteredLayer:
    """One layer's KV cache, as registered by a worker.

    Attributes:
        kind: Attention backend that uses the cache, or the type of the layer.
        tensors: Views of its pages, of any dtype; the first dimension is the block.
    """

    kind: str
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The connector's arguments.

    Attributes:
        vllm_config: vLLM's `VllmConfig`, resolved.
        kv_cache_config: vLLM's `KVCacheConfig`, or None.
        outer: The `VllmConfig` of the `MultiConnector` that creates the connector, or None.
    """

    vllm_config: Any
    kv_cache_config: Any
    outer: Any = None

    def registered_layers(self) -> dict[str, RegisteredLayer]:
        """Return the layers whose KV cache is in this process; empty without a worker."""
        layers = self.vllm_config.compilation_config.static_forward_context
        found = {}
        for name, layer in layers.items():
            cache = getattr(layer, "kv_cache", None)
            views = cache if isinstance(cache, list | tuple) else [cache]
            tensors = [one for one in views if isinstance(one, torch.Tensor) and one.dim() > 1]
            if tensors:
                backend = getattr(layer, "attn_backend", None)
                kind = backend.get_name() if backend is not None else type(layer).__name__
                found[name] = RegisteredLayer(kind, tuple(tensors))
        return found


def surroundings_of(extra_config: Mapping[str, Any]) -> Surroundings | None:
    """Return the arguments of the connector being created by a caller, or None.

    Args:
        extra_config: The summary's `extra_config`, an object shared with the connector's config.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented, and inspect.currentframe does the same
    found: Surroundings | None = None
    while frame is not None:
        vllm_config = frame.f_locals.get("vllm_config")
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        if getattr(transfer, "kv_connector_extra_config", None) is extra_config:
            found = found or Surroundings(vllm_config, frame.f_locals.get("kv_cache_config"))
        elif found and getattr(transfer, "kv_connector", None) == "MultiConnector":
            return replace(found, outer=vllm_config)
        frame = frame.f_back
    return found


def require_one_host(surroundings: Surroundings | None) -> None:
    """Check that all ranks of a replica are on one host, as far as vLLM's configuration says so.

    Raises:
        ConfigError: They are on several hosts.
    """
    config = None if surroundings is None else surroundings.vllm_config
    hosts = getattr(getattr(config, "parallel_config", None), "nnodes_within_dp", 1)
    if hosts > 1:
        raise ConfigError(
            f"nnodes: each replica has workers on {hosts} hosts, but scheduler and workers share "
            "memory; place all ranks of a replica on one host (data parallelism may span hosts)"
        )
