"""The engine's part of a configuration for vLLM, `--kv-transfer-config`, for `check-config`.

vLLM knows the model, the layout of its tensors and hence the size of a block; here a placeholder
stands for them. So the engine's keys, the tiers and their places are checked, but not whether the
sizes suffice for vLLM's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvoffload_async.errors import InputError
from kvoffload_async.facade.vllm_keys import DECIDED_OF_TIERS, NAMES_UNDER_VLLM, VLLMS_OWN

_MODULE: Final = "kvoffload_async.integrations.vllm"
_WHOLE_ENGINE: Final = "KVOffloadSpec"
_EXTRA: Final = "kv_connector_extra_config"
UNKNOWN_BLOCK_BYTES: Final = 64 * 1024


def is_for_vllm(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is one for vLLM."""
    return "kv_connector" in config


def engine_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's configuration within one for vLLM; model and block are placeholders.

    Tiers of other packages are left out: only vLLM can check them.

    Raises:
        InputError: The configuration is not one of this package, or sets what vLLM decides.
    """
    extra = config.get(_EXTRA)
    if not isinstance(extra, Mapping):
        raise InputError(f"{_EXTRA}: missing; it has the engine's keys, such as secondary_tiers")
    tiers = extra.get("secondary_tiers", [])
    if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
        raise InputError(f"{_EXTRA}: secondary_tiers: {tiers!r} is not a list of objects")
    is_whole = extra.get("spec_name") == _WHOLE_ENGINE
    own = [
        _tier_part(tier, number)
        for number, tier in enumerate(tiers)
        if is_whole or tier.get("module_path") == _MODULE
    ]
    if not is_whole and not own:
        raise InputError(
            f"{_EXTRA}: spec_name is not {_WHOLE_ENGINE}, and no tier has module_path {_MODULE}: "
            "nothing here is of this package"
        )
    engine = (
        {key: value for key, value in extra.items() if key not in VLLMS_OWN} if is_whole else {}
    )
    engine.setdefault("cpu_bytes_to_use", extra.get("cpu_bytes_to_use", UNKNOWN_BLOCK_BYTES))
    for key in ("block_bytes", "model", "num_workers", "fingerprint"):
        if key in engine:
            remedy = "put it into the tiers" if key == "fingerprint" else "leave it out"
            raise InputError(f"{_EXTRA}: {key}: follows from vLLM's configuration; {remedy}")
    placeholders = {"block_bytes": UNKNOWN_BLOCK_BYTES, "model": "vllm"}
    return {**engine, **placeholders, "secondary_tiers": own}


def _tier_part(tier: Mapping[str, Any], number: int) -> dict[str, Any]:
    for key in DECIDED_OF_TIERS:
        if key in tier:
            raise InputError(
                f"{_EXTRA}: secondary_tiers[{number}]: {key}: follows from vLLM's configuration; "
                "leave it out"
            )
    part = dict(tier)
    if part.get("module_path") == _MODULE:
        del part["module_path"]
        part["type"] = NAMES_UNDER_VLLM.get(str(part.get("type")), part.get("type"))
    if isinstance(directory := part.get("root_dir"), str):
        part["root_dir"] = str(Path(directory).absolute())  # vLLM's: relative to where it runs
    return part
