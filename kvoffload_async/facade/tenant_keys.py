"""The tenants' own keys, given to tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.tenants import Tenants
from kvoffload_async.facade.tier_factory import SecondaryTierFactory, naming_tier
from kvoffload_async.tiers._sealed_names import read_name_keys
from kvoffload_async.tiers.files.digests import SecretKey, TenantRings
from kvoffload_async.tiers.files.sealing import EncryptionKey, read_encryption_keys

_BLOCKS, _NAMES = "encryption_key_file", "name_key_file"

K = TypeVar("K", bound=SecretKey)
_Rings = list[Sequence[K] | None]
_Read = Callable[[object, str], Sequence[K]]


def with_tenant_keys(
    tiers: Sequence[Mapping[str, Any]], tenants: Tenants, key: str = "secondary_tiers"
) -> list[Mapping[str, Any]]:
    """Return configurations of tiers that encrypt each tenant's blocks and names with its keys.

    A tenant without keys of its own has the tier's.

    Raises:
        ConfigError: A key file is unusable, a tenant has a key of another or of the tier, or a tier
            cannot encrypt the blocks of all tenants although one has a key.
    """
    own_keys = _own_keys(tenants, _BLOCKS, read_encryption_keys)
    own_names = _own_keys(tenants, _NAMES, read_name_keys)
    given: list[Mapping[str, Any]] = []
    for index, tier in enumerate(tiers):
        with naming_tier(index, tier, key):
            if tier.get("trust_vllm_directory"):
                raise ConfigError(
                    "trust_vllm_directory: does not go with tenants, which vLLM's own tier does "
                    "not know; leave one of them out"
                )
            tier_class = SecondaryTierFactory.class_of(tier).tier_class
            declares = None if tier_class is None else tier_class.declares
            added: dict[str, Any] = {}
            if declares is not None and _BLOCKS in declares.declared():
                if keys := _rings(tenants, own_keys, _BLOCKS, tier, read_encryption_keys):
                    added[_BLOCKS] = TenantRings(list(_bound(tenants, keys)), tenants.tenant_of)
            elif any(own_keys):
                raise ConfigError(
                    f"{_BLOCKS}: the tier cannot encrypt blocks, but a tenant has a key; use "
                    "another tier, or no key"
                )
            if names := _rings(tenants, own_names, _NAMES, tier, read_name_keys):
                added["tenant_names"] = TenantRings(names, tenants.tenant_of)
            given.append({**tier, **added})
    return given


def _own_keys(tenants: Tenants, option: str, read: _Read[K]) -> _Rings[K]:
    """Return the keys that each tenant has of its own, read from its files."""
    rings: _Rings[K] = []
    for name, options in zip(tenants.names, tenants.options, strict=True):
        files = {_BLOCKS: options.encryption_key_files, _NAMES: options.name_key_files}[option]
        try:
            rings.append(None if files is None else read(files, option))
        except ConfigError as error:
            raise ConfigError(f"tenants[{name!r}]: {error}") from error
    _check_distinct(tenants, rings, None, option)
    return rings


def _rings(
    tenants: Tenants, own: _Rings[K], option: str, tier: Mapping[str, Any], read: _Read[K]
) -> _Rings[K]:
    """Return the keys of each tenant in a tier, which may be the tier's; empty without any."""
    files = tier.get(option)
    tiers_own = None if files is None else read(files, option)
    rings = [tiers_own if ring is None else ring for ring in own]
    if None in own:
        _check_distinct(tenants, own, tiers_own, option)
    return rings if any(rings) else []


def _check_distinct(
    tenants: Tenants, own: _Rings[K], tiers_own: Sequence[K] | None, option: str
) -> None:
    """Raise ConfigError if two tenants have one key, or one has the tier's, which others use."""
    owners = {key.id: "the tier" for key in tiers_own or ()}
    for name, ring in zip(tenants.names, own, strict=True):
        for key in ring or ():
            owner = owners.setdefault(key.id, f"tenant {name!r}")
            if owner != f"tenant {name!r}":
                raise ConfigError(
                    f"{option}: tenant {name!r} has a key of {owner}, so deleting its own would "
                    "not make its blocks unreadable; give each its own"
                )


def _bound(tenants: Tenants, rings: _Rings[EncryptionKey]) -> Iterator[Sequence[EncryptionKey]]:
    """Yield each tenant's keys, bound to it; raises ConfigError if one has none."""
    for name, ring in zip(tenants.names, rings, strict=True):
        if ring is None:
            raise ConfigError(
                f"{_BLOCKS}: tenant {name!r} has none, but others have; give one to it, or to the "
                "tier"
            )
        yield [key.of(name) for key in ring]
