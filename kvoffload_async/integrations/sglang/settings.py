"""The options in `--hicache-storage-backend-extra-config`; importing this needs no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvoffload_async.config import (
    OffloadConfig,
    Options,
    option,
    or_none,
    parse_label,
    parse_size_bytes,
    parse_socket_path,
    reject_unknown,
)
from kvoffload_async.facade.plugged import tiers_under
from kvoffload_async.facade.tier_factory import check_tiers

EXTRA: Final = "hicache-storage-backend-extra-config"
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


@dataclass(frozen=True, kw_only=True)
class HiCacheOptions(Options):
    """The options in `--hicache-storage-backend-extra-config`, besides SGLang's own."""

    tier: tuple[Mapping[str, Any], ...] = option(
        tiers_under("SGLang"),
        remedy='a tier, such as {"type": "fs", "root_dir": "/kv"}, or a list of tiers',
    )
    """A tier, or a list of tiers. Pages are stored in all of them, and loaded from the first that
    has them."""
    staging_bytes: int = option(parse_size_bytes, 256 << 20)
    """Maximum memory for pages being stored, and again for pages being loaded."""
    tenant: str | None = option(or_none(parse_label), None)
    """Tenant of all pages, which only servers of this tenant find; without it, those without."""
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
        config = OffloadConfig(cpu_bytes_to_use=0, block_bytes=0, model="model")
        check_tiers(options.tier, config, key="tier")
        return options
