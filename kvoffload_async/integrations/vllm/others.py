"""Tiers without a directory of their own under this package's engine: whose blocks they keep.

They find it in their environment, as everywhere: what vLLM knows of model and layout is their
`run_config`, unless their configuration gives one.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

from vllm.v1.kv_offload import base

from kvoffload_async.abc.tier import AsyncTier
from kvoffload_async.facade.tier_factory import SecondaryTierFactory, accepted_options
from kvoffload_async.integrations.vllm.identity import (
    Identity,
    IdentityOptions,
    ModelContent,
    identify,
)
from kvoffload_async.registry import load_class

_OWN: Final = __name__.partition(".")[0]
_PROCESS: Final = uuid.uuid4().hex
"""Tells this process's blocks from all others', where nobody knows what they are of."""


def takes_identity(tier: Mapping[str, Any]) -> bool:
    """Tell whether a tier, checked before, is somebody else's and wants to know."""
    path, name = tier.get("module_path"), tier["type"]
    cls = SecondaryTierFactory.get_tier_class(name) if path is None else load_class(path, name)
    is_own = cls.__module__.partition(".")[0] == _OWN
    own_keys = accepted_options(cls)
    if issubclass(cls, AsyncTier):
        return not is_own and "run_config" not in own_keys
    return not is_own and "run_config" in own_keys


def identified(
    tier: Mapping[str, Any], spec: base.OffloadingSpec, layout: str, content: ModelContent
) -> Mapping[str, Any]:
    """Return such a tier's configuration with what vLLM knows of its blocks.

    Args:
        tier: Its configuration; what is in it counts first.
        spec: vLLM's spec.
        layout: The digest of a row's layout.
        content: The model's.
    """
    options = IdentityOptions(tier.get("namespace"), tier.get("fingerprint"))
    identity = identify(spec, options, layout, content, must_stay=False)
    return {"run_config": of_this_process(identity), "rank": identity.rank, **tier}


def of_this_process(identity: Identity) -> dict[str, Any]:
    """Return the `run_config` of blocks that others share, unless nobody knows what they are of.

    For a tier that has no folder of its own for those.
    """
    return identity.run_config | ({"process": _PROCESS} if identity.unknown else {})
