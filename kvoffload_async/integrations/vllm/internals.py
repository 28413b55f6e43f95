"""Access to vLLM's state outside its interfaces: its configuration, and the positions of keys.

vLLM passes a spec, and through it a tier, a summary that lacks most settings that keys and values
depend on. But it creates both while it creates the connector, which receives the complete
configuration. The summary contains an object of that configuration, which identifies the
connector's stack frame.

vLLM's scheduler records the positions of all keys of a request in its prompt before the first
lookup. Its public method returns the position of one given key at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from kvoffload_async.errors import ConfigError
from kvoffload_async.types import OffloadKey, ReqContext

if TYPE_CHECKING:
    from vllm.v1.kv_offload import base


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
class ConnectorArguments:
    """The arguments with which vLLM creates the connector.

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


def connector_arguments(extra_config: Mapping[str, Any]) -> ConnectorArguments | None:
    """Return the arguments of the connector being created by a caller, or None.

    Args:
        extra_config: The summary's `extra_config`, an object shared with the connector's config.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented, and inspect.currentframe does the same
    found: ConnectorArguments | None = None
    while frame is not None:
        vllm_config = frame.f_locals.get("vllm_config")
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        if getattr(transfer, "kv_connector_extra_config", None) is extra_config:
            found = found or ConnectorArguments(vllm_config, frame.f_locals.get("kv_cache_config"))
        elif found and getattr(transfer, "kv_connector", None) == "MultiConnector":
            return replace(found, outer=vllm_config)
        frame = frame.f_back
    return found


def require_one_host(arguments: ConnectorArguments | None) -> None:
    """Check that all ranks of a replica are on one host, as far as vLLM's configuration says so.

    Raises:
        ConfigError: They are on several hosts.
    """
    config = None if arguments is None else arguments.vllm_config
    hosts = getattr(getattr(config, "parallel_config", None), "nnodes_within_dp", 1)
    if hosts > 1:
        raise ConfigError(
            f"nnodes: each replica has workers on {hosts} hosts, but scheduler and workers share "
            "memory; place all ranks of a replica on one host (data parallelism may span hosts)"
        )


def share_positions(context: base.ReqContext, request: ReqContext) -> None:
    """Let a new request use vLLM's dictionary of key positions, which vLLM keeps extending.

    Has no effect if vLLM stores positions differently. The dictionary is never modified here.

    Not thread-safe; call only from the scheduler's thread.
    """
    positions = _positions_of(context)
    if positions is not None:
        request.key_positions = positions


def take_positions(
    keys: Iterable[OffloadKey], context: base.ReqContext, request: ReqContext
) -> None:
    """Copy the keys' positions from vLLM, unless the request shares vLLM's dictionary."""
    if request.key_positions is _positions_of(context):
        return
    for key in keys:
        position = context.get_offload_key_position(key)
        if position is not None:
            request.key_positions[key] = position


def _positions_of(context: base.ReqContext) -> dict[OffloadKey, int] | None:
    positions = getattr(context, "_offload_key_positions", None)
    return positions if isinstance(positions, dict) else None
