"""The managers of the tiers on disk, `fs` and `slab`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import KVIdentity, TierLocation
from kvoffload_async.config import shown
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.locations import examine
from kvoffload_async.facade.secondary import DeclaredTierManager, read_threads
from kvoffload_async.facade.tier_options import TierOptions, require_model
from kvoffload_async.registry import check_tier_policy, create_policy
from kvoffload_async.runtime.io_pool import suitable_threads
from kvoffload_async.tiers.fs.namespace_init import Footprint
from kvoffload_async.tiers.fs.outcome import Verify
from kvoffload_async.tiers.fs.tier import FsSettings, FsTier
from kvoffload_async.tiers.slab.opening import SlabSettings
from kvoffload_async.tiers.slab.tier import SlabTier


class FileSystemTierManager(DeclaredTierManager[FsSettings]):
    """One file per block, in a directory that processes and hosts may share.

    All options are checked before anything is touched; the constructor then creates the directory
    and checks that it is writable.
    """

    kind = "fs"
    declares = FsSettings
    waits_for_device = True  # to create, open and write a file for each block

    @classmethod
    def settings_of(cls, options: Mapping[str, Any], identity: KVIdentity) -> FsSettings:
        common = TierOptions.take(options)
        settings = FsSettings.take(options, run_config=identity.run_config, rank=identity.rank)
        require_model(identity)
        check_tier_policy(settings.eviction_policy)
        high, low, verify = settings.high_watermark, settings.low_watermark, settings.verify
        if low > high:
            raise ConfigError(
                f"low_watermark: {low} is above high_watermark={high}; it must not be"
            )
        if settings.integrity_key is not None:
            _check_verifies(str(verify), does=verify is not Verify.OFF)
            verify = Verify.REQUIRED
        loads = read_threads(common.n_read_threads, waits_for_device=cls.waits_for_device)
        return replace(settings, verify=verify, io_threads=loads + common.n_write_threads)

    @classmethod
    def create_tier(cls, settings: FsSettings) -> FsTier:
        return FsTier(settings, partial(create_policy, settings.eviction_policy), settings.ops)

    @classmethod
    def locations_of(cls, settings: FsSettings, identity: KVIdentity) -> list[TierLocation]:
        location = TierLocation(settings.root_dir, settings.capacity_bytes)
        if settings.capacity_bytes is not None and identity.block_bytes:
            ground = examine(replace(location, path=settings.namespace.folder))
            Footprint.of(ground.status, identity.block_bytes).check(settings.capacity_bytes)
        return [location]

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Imported on demand, because it loads anyio.
        from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance  # noqa: PLC0415

        return FsMaintenance


class SlabTierManager(DeclaredTierManager[SlabSettings]):
    """A store of fixed capacity in preallocated files, for a local disk and one process.

    All options are checked before anything is touched; the constructor then opens the store and
    reads its index.
    """

    kind = "slab"
    declares = SlabSettings

    @classmethod
    def settings_of(cls, options: Mapping[str, Any], identity: KVIdentity) -> SlabSettings:
        for name in ("n_read_threads", "n_write_threads"):
            if name in options:
                raise ConfigError(
                    f"{name}: {shown(options[name])} does not go with this tier; give io_threads"
                )
        settings = SlabSettings.take(options, run_config=identity.run_config, rank=identity.rank)
        require_model(identity)
        check_tier_policy(settings.eviction_policy)
        if settings.integrity_key is not None:
            _check_verifies(settings.verify, does=settings.verify)
        threads = settings.wanted_threads or suitable_threads(waits_for_device=settings.direct_io)
        return replace(settings, io_threads=threads, stripes=threads)

    @classmethod
    def create_tier(cls, settings: SlabSettings) -> SlabTier:
        return SlabTier(settings, partial(create_policy, settings.eviction_policy), settings.ops)

    @classmethod
    def locations_of(cls, settings: SlabSettings, identity: KVIdentity) -> list[TierLocation]:
        if identity.block_bytes:
            settings.budget(identity.block_bytes)
        return [TierLocation(settings.root_dir, settings.capacity_bytes)]

    @classmethod
    def implied_options(cls, settings: SlabSettings) -> dict[str, Any]:
        return {"n_read_threads": settings.io_threads - 1, "n_write_threads": 1}

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Imported on demand, because it loads anyio.
        from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance  # noqa: PLC0415

        return SlabMaintenance


def _check_verifies(verify: str | bool, *, does: bool) -> None:
    """Raise ConfigError if a tier has an integrity key but does not verify every block it loads."""
    if not does:
        raise ConfigError(
            f"verify: {verify!r} does not go with integrity_key_file: the tier would serve blocks "
            "that anybody may have made; leave one of them out"
        )
