"""The options in `--hicache-storage-backend-extra-config`; importing this needs no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvoffload_async.config import (
    Options,
    option,
    or_none,
    parse_size_bytes,
    parse_socket_path,
    reject_unknown,
    shown,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory, naming_tier

EXTRA: Final = "hicache-storage-backend-extra-config"
_DECIDED: Final = ("enable_kv_events", "model", "rank", "run_config")
"""Options of a tier that SGLang's configuration or this integration determines."""
_SGLANGS_OWN: Final = {
    "allocator",
    "backend_name",
    "class_name",
    "file_storage_path",
    "hicache_storage_pass_prefix_keys",
    "interface_v1",
    "module_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
}
"""Keys that SGLang reads from the same mapping."""


def parse_tiers(value: object, key: str) -> list[dict[str, Any]]:
    """Return the configurations of the tiers, from one or from a list of them."""
    tiers = value if isinstance(value, list | tuple) else [value]
    if not tiers or not all(isinstance(tier, Mapping) for tier in tiers):
        raise ConfigError(
            f"{key}: {shown(value)} is not valid; it must be a tier, such as "
            '{"type": "slab", "root_dir": "/kv", "capacity_bytes": "200GiB"}, or a list of tiers'
        )
    return [dict(tier) for tier in tiers if isinstance(tier, Mapping)]


@dataclass(frozen=True, kw_only=True)
class HiCacheOptions(Options):
    """The options in `--hicache-storage-backend-extra-config`, besides SGLang's own."""

    tier: list[dict[str, Any]] = option(
        parse_tiers, remedy='a tier, such as {"type": "fs", "root_dir": "/kv"}, or a list of tiers'
    )
    """A tier, or a list of tiers. Pages are stored in all of them, and loaded from the first that
    has them."""
    staging_bytes: int = option(parse_size_bytes, 256 << 20)
    """Maximum memory for pages being stored, and again for pages being loaded."""
    status_socket: str | None = option(or_none(parse_socket_path), None)
    """Path of the Unix socket for `kvoffload top`; by default `KVOFFLOAD_STATUS_SOCKET`. Ranks
    other than the first append their number, such as `-tp1`."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Return the options; check the tiers' configurations without side effects.

        Raises:
            ConfigError: An option is missing, unknown or invalid.
        """
        reject_unknown(given, cls.declared().keys() | _SGLANGS_OWN, EXTRA)
        options = cls.take(given)
        for index, tier in enumerate(options.tier):
            with naming_tier(index, tier, "tier"):
                for key in _DECIDED:
                    if key in tier:
                        raise ConfigError(
                            f"{key}: {shown(tier[key])} is determined by SGLang; leave it out"
                        )
                SecondaryTierFactory.check_config({**tier, "run_config": {"model_name": "model"}})
        return options
