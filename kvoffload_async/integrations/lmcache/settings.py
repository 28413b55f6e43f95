"""The options of the LMCache adapter: `adapter_params` in LMCache's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvoffload_async.config import (
    OffloadConfig,
    Options,
    TenantOptions,
    UnknownTenant,
    at_least,
    one_of,
    option,
    or_none,
    parse_directory,
    parse_seconds,
    parse_size_bytes,
    parse_socket_path,
    parse_tenants,
    reject_unknown,
    shown,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.plugged import tiers_under
from kvoffload_async.facade.tenant_keys import with_tenant_keys
from kvoffload_async.facade.tenants import Tenants
from kvoffload_async.facade.tier_factory import SecondaryTierFactory, check_tiers, with_quotas
from kvoffload_async.integrations.lmcache.keys import StoreId
from kvoffload_async.policies.tenants import TenantQuotas


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Options):
    """The options of `KVOffloadL2Adapter`.

    Attributes:
        known_tenants: Made of `tenants`; None without them.
    """

    tier: tuple[Mapping[str, Any], ...] = option(
        tiers_under("LMCache"), remedy='a tier, such as {"type": "slab", ...}, or a list of tiers'
    )
    """Configuration of a tier, or a list in lookup order; see docs/reference/configuration.md."""
    num_stores: int = option(at_least(1, 1024), 1)
    """Number of combinations of model, object group and object size. Each has a store of its own,
    with an equal part of `capacity_bytes`; objects of further combinations are not stored."""
    lookup_timeout_s: float = option(parse_seconds, 5.0)
    """Seconds until an unanswered lookup counts as a miss."""
    lock_timeout_s: float = option(parse_seconds, 60.0)
    """Seconds until a lock on an object expires, if it was not unlocked."""
    staging_bytes: int = option(parse_size_bytes, 64 << 20)
    """Memory of a store for objects that cannot be transferred in place; at least one object."""
    close_timeout_s: float = option(parse_seconds, 10.0)
    """Seconds for running transfers when LMCache closes the adapter."""
    status_socket: str | None = option(or_none(parse_socket_path), None)
    """Path of the Unix socket that serves the adapter's status to `kvoffload top`."""
    tenants: tuple[TenantOptions, ...] | None = option(or_none(parse_tenants), None)
    """Tenants by name, each with its options; an object's tenant is its `cache_salt`. They share
    stores and no object; each store has an equal part of `quota_bytes`."""
    unknown_tenant: UnknownTenant = option(one_of(UnknownTenant), UnknownTenant.DEFAULT)
    """Tenant of an object whose `cache_salt` is not in `tenants`: "default", or with "no_store"
    none: it is neither stored nor found."""
    known_tenants: Tenants | None = None

    @classmethod
    def parse(cls, params: object) -> Self:
        """Return the options; check the tiers' configurations without side effects.

        Raises:
            ConfigError: An option is missing, unknown or invalid; also a `ValueError`, like
                LMCache's errors.
            TierUnavailableError: A tier's filesystem cannot be reached.
        """
        if not isinstance(params, Mapping):
            raise ConfigError(f"adapter_params: {shown(params)} is not valid; give an object")
        reject_unknown(params, cls.declared(), "adapter_params")
        options = cls.take(params)
        if options.tenants is not None:
            options = options.with_tenants(Tenants(options.tenants, options.unknown_tenant))
        config = OffloadConfig(cpu_bytes_to_use=0, block_bytes=0, model="model")
        check_tiers(options.tier, config, key="tier")
        return options

    def with_tenants(self, tenants: Tenants) -> Self:
        """Return the options with tiers that know the tenants' keys, and their parts of space."""
        quotas = [
            None if quota is None else quota // self.num_stores
            for quota in tenants.quotas.quota_bytes
        ]
        parts = TenantQuotas(quotas, tenants.tenant_of)
        return replace(
            self,
            tier=tuple(with_quotas(with_tenant_keys(self.tier, tenants, "tier"), parts, "tier")),
            known_tenants=tenants,
        )

    def tier_of(self, tier: Mapping[str, Any], store: StoreId) -> dict[str, Any]:
        """Return the configuration of a tier, completed for one store.

        The store has its own folder below `root_dir`, and its part of `capacity_bytes`.
        """
        own: dict[str, Any] = {
            **SecondaryTierFactory.host_defaults(tier),
            **tier,
            "enable_kv_events": True,
            "run_config": {
                "inference_engine": "lmcache",
                "model_name": store.model,
                "object_group": store.group,
                "object_bytes": store.object_bytes,
            },
        }
        if "root_dir" in tier:
            root_dir = parse_directory(tier["root_dir"], "root_dir")
            own["root_dir"] = f"{root_dir}/group{store.group}-{store.object_bytes}"
        if tier.get("capacity_bytes") is not None:
            capacity_bytes = parse_size_bytes(tier["capacity_bytes"], "capacity_bytes")
            own["capacity_bytes"] = max(1, capacity_bytes // self.num_stores)
        return own
