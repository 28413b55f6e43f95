"""Keys and names in a configuration for vLLM, and checks of these that need no vLLM.

The specs and tiers use them, and so does `kvoffload check-config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvoffload_async.config import (
    OffloadConfig,
    one_of,
    or_none,
    parse_bool,
    parse_directory,
    parse_label,
    reject_unknown,
    shown,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.tier_factory import BUILT_IN, SecondaryTierFactory, naming_tier
from kvoffload_async.facade.tier_options import options_of
from kvoffload_async.types import Locality

EXTRA: Final = "kv_connector_extra_config"

TENANT_FIELD: Final = "tenant_field"
_CACHE_SALT: Final = "cache_salt"
_PARAMETERS: Final = "kv_transfer_params."

VLLMS_OWN: Final = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "sync_load_budget_bytes",
    }
)
"""Keys of `kv_connector_extra_config` that vLLM reads."""

OWN_CONNECTOR: Final = "KVOffloadConnector"
OFFLOADING_CONNECTORS: Final = ("OffloadingConnector", OWN_CONNECTOR)
"""Values of `kv_connector`: vLLM's connector that takes a spec, and this package's."""

DECIDED_OF_TIERS: Final = ("model", "rank", "run_config")
"""Keys of a tier that vLLM's configuration determines."""

NAMES_UNDER_VLLM: Final = {
    class_name: name for name, (_, class_name) in BUILT_IN.items() if name != "example"
}
"""Name of each tier under vLLM's own spec -> its name under `KVOffloadSpec`."""

DECIDED: Final = {
    "block_bytes",
    "block_size",
    "enable_kv_cache_events",
    "fingerprint",
    "generation",
    "model",
    "num_workers",
    "prefault",
}
"""Keys of `OffloadConfig` that vLLM's configuration determines, or this package fixes."""

IDENTITY_OPTIONS: Final = frozenset({"fingerprint", "namespace", "trust_vllm_directory"})
"""Keys of a tier's configuration that determine the identity of its blocks."""


def check_place_of_options(extra_config: Mapping[str, Any]) -> None:
    """Check that no identity option is given outside a tier; raises ConfigError."""
    for key in sorted(IDENTITY_OPTIONS & extra_config.keys()):
        raise ConfigError(
            f"{key}: {shown(extra_config[key])} in kv_connector_extra_config has no effect; put it "
            f'into the tier: "secondary_tiers": [{{"type": ..., {json.dumps(key)}: ...}}]'
        )


def parse_tenant_field(extra_config: Mapping[str, Any]) -> str | None:
    """Return the one of `kv_transfer_params` that names a request's tenant.

    None: `cache_salt` does, or there are no tenants.

    Raises:
        ConfigError: `tenant_field` is invalid, or one of `tenants` and `tenant_field` is missing.
    """
    field = extra_config.get(TENANT_FIELD)
    fields = f'"{_CACHE_SALT}" or "{_PARAMETERS}NAME", in which a trusted gateway names the tenant'
    if extra_config.get("tenants") is None:
        if field is not None:
            raise ConfigError(
                f"{TENANT_FIELD}: {shown(field)} has no effect without tenants; give tenants, or "
                "leave it out"
            )
        return None
    if field is None:
        raise ConfigError(f"{TENANT_FIELD}: missing, but there are tenants; give {fields}")
    if field == _CACHE_SALT:
        return None
    name = field.removeprefix(_PARAMETERS) if isinstance(field, str) else ""
    if not name or name == field:
        raise ConfigError(f"{TENANT_FIELD}: {shown(field)} is not valid; give {fields}")
    if extra_config.get("self_describing_kv_events"):
        raise ConfigError(
            f"self_describing_kv_events: tenants of {field} have blocks with equal hashes, which "
            f'vLLM cannot tell apart; give "{TENANT_FIELD}": "{_CACHE_SALT}", or leave it out'
        )
    return name


def check_no_tenants(extra_config: Mapping[str, Any]) -> None:
    """Check that no tenants are given to vLLM's own spec; raises ConfigError."""
    for key in (TENANT_FIELD, "tenants", "unknown_tenant"):
        if key in extra_config:
            raise ConfigError(
                f"{key}: vLLM's own tiering does not pass on a request's tenant; use "
                '"spec_name": "KVOffloadSpec", or leave it out'
            )


@dataclass(frozen=True, slots=True)
class IdentityOptions:
    """Identity options in a tier's JSON; see the module's docstring."""

    namespace: str | None = None
    fingerprint: str | None = None
    trust_vllm_directory: bool = False

    @classmethod
    def take_from(cls, options: dict[str, Any], kind: str) -> IdentityOptions:
        """Take the identity options out of a tier's options; raises ConfigError if invalid."""
        parse = or_none(parse_label)
        labels = {key: parse(options.pop(key, None), key) for key in ("namespace", "fingerprint")}
        trust = parse_bool(options.pop("trust_vllm_directory", False), "trust_vllm_directory")
        for key, value in labels.items():
            if trust and value is not None:
                raise ConfigError(
                    f"{key}: {shown(value)} conflicts with trust_vllm_directory, because vLLM's "
                    "tier has no such name for its directories; remove one of them"
                )
        if trust and kind != "fs":
            raise ConfigError("trust_vllm_directory: vLLM has no tier of this kind; leave it out")
        return cls(**labels, trust_vllm_directory=trust)


def parse_locality(kind: str, value: object) -> Locality | None:
    """Return the locality of a tier under vLLM's own spec, None if it is not configured.

    Raises:
        ConfigError: The value is not a locality, or the tier always has the same.
    """
    if "locality" in options_of(SecondaryTierFactory.get_tier_class(kind)):
        return None if value is None else one_of(Locality)(value, "locality")
    if value is not None:
        raise ConfigError(
            f"locality: {shown(value)} is not for {kind!r}, whose blocks always are REMOTE; leave "
            "it out"
        )
    return Locality.REMOTE


def take_identity_options(kind: str, options: dict[str, Any], tier_type: str) -> IdentityOptions:
    """Remove the identity options of a tier under vLLM's own spec; check all option names.

    Raises:
        ConfigError: An option is unknown, or is determined by vLLM, or an identity option is wrong.
    """
    own = options_of(SecondaryTierFactory.get_tier_class(kind)).keys()
    known = (own | IDENTITY_OPTIONS).difference(DECIDED_OF_TIERS)
    reject_unknown(options, known, f"secondary tier {tier_type!r}")
    return IdentityOptions.take_from(options, kind)


def engine_options(
    extra_config: Mapping[str, Any],
) -> tuple[dict[str, Any], list[IdentityOptions | None]]:
    """Return the engine's part of `kv_connector_extra_config` under `KVOffloadSpec`.

    Returns:
        The options, and the identity options of each tier; see `own_tier`.

    Raises:
        ConfigError: A key is unknown, or is determined by vLLM.
    """
    check_place_of_options(extra_config)
    parse_bool(extra_config.get("canonical_layout", False), "canonical_layout")
    own = OffloadConfig.declared().keys() - DECIDED
    reject_unknown(extra_config, own | VLLMS_OWN | {TENANT_FIELD}, EXTRA)
    parse_tenant_field(extra_config)
    options = {key: value for key, value in extra_config.items() if key in own}
    identities: list[IdentityOptions | None] = []
    tiers = options.get("secondary_tiers")
    if isinstance(tiers, list | tuple):
        options["secondary_tiers"] = own_tiers = []
        for index, tier in enumerate(tiers):
            with naming_tier(index, tier if isinstance(tier, Mapping) else {}):
                found, identity = own_tier(tier)
                if identity and identity.trust_vllm_directory and options.get("tenants"):
                    raise ConfigError(
                        "trust_vllm_directory: vLLM's blocks have no tenant; remove it, or tenants"
                    )
            own_tiers.append(found)
            identities.append(identity)
    return options, identities


def own_tier(tier: Any) -> tuple[Any, IdentityOptions | None]:  # noqa: ANN401 - a user's JSON, checked later
    """Separate the identity options of a tier under `KVOffloadSpec` from its other options.

    Returns:
        The tier, and its identity options; None if it has none: not persistent, or not of this
        package.

    Raises:
        ConfigError: An option is for vLLM's own spec, or is determined by vLLM.
    """
    name = tier.get("type") if isinstance(tier, Mapping) else None
    if name in tuple(NAMES_UNDER_VLLM) and tier.get("module_path", __package__) == __package__:
        raise ConfigError(
            f"type: {name!r} is for vLLM's own TieringOffloadingSpec; "
            f'use "{NAMES_UNDER_VLLM[name]}" here, without module_path'
        )
    if name not in SecondaryTierFactory.names() or "module_path" in tier:
        return tier, None  # an external tier, or an error that the factory reports
    for key in DECIDED_OF_TIERS:
        if key in tier:
            raise ConfigError(f"{key}: {shown(tier[key])} is determined by vLLM; leave it out")
    location_options = {"root_dir", "url", "master"}
    if not location_options & options_of(SecondaryTierFactory.get_tier_class(name)).keys():
        return tier, None
    options = dict(tier)
    identity = IdentityOptions.take_from(options, name)
    if "root_dir" in options:
        options["root_dir"] = parse_directory(options["root_dir"], "root_dir")
    return options, identity
