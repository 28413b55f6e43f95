"""The `fs` tier behind plain calls, and the meaning of its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Unpack

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import KVIdentity, TierPlace
from kvoffload_async.config import (
    parse_bool,
    parse_fraction,
    parse_name,
    parse_seconds,
    parse_size_bytes,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.places import examine
from kvoffload_async.facade.secondary import SecondaryTierManager, read_threads
from kvoffload_async.facade.tier_options import (
    TierOptions,
    check_tier_options,
    check_verifies,
    config_of,
    defaults_of,
    identity_of,
    named_layout,
    parse_choice,
    parse_directory,
    parse_key_file,
    parse_modes,
)
from kvoffload_async.registry import check_policy, create_policy
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.footprint import Footprint
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.tiers.fs.outcome import Verify
from kvoffload_async.tiers.fs.space import SpaceSettings
from kvoffload_async.tiers.fs.tier import FsSettings, FsTier
from kvoffload_async.types import Locality


class FileSystemTierManager(SecondaryTierManager):
    """One file a block, in a directory that processes and hosts may share.

    Every option is checked before anything is touched; the directory is made, and found to be
    writable, by the constructor.
    """

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "fs",
        *,
        root_dir: str,
        verify: str = "when_present",
        integrity_key_file: str | None = None,
        capacity_bytes: int | str | None = None,
        eviction_policy: str = "lru",
        high_watermark: float = 1.0,
        low_watermark: float = 0.95,
        direct_io: bool = False,
        fsync: bool = False,
        reuse_inodes: bool = True,
        rescan_interval_s: float = 60.0,
        file_mode: int | str | None = None,
        dir_mode: int | str | None = None,
        locality: str = "LOCAL",
        ops: FileOps | None = None,
        **options: Unpack[TierOptions],
    ) -> None:
        """Open the tier; see `SecondaryTierManager` for the options that every tier takes.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`.
            root_dir: Absolute path of the directory; made if it is not there.
            verify: "required", "when_present" or "off": which blocks are served.
            integrity_key_file: Absolute path of a file with a key that checksums are made with;
                then only blocks with such a checksum are served.
            capacity_bytes: Disk bytes, as allocated, that are never exceeded; None: unbounded.
            eviction_policy: Eviction policy at capacity.
            high_watermark: Share of the capacity above which room is made in the background.
            low_watermark: Share of the capacity down to which that goes.
            direct_io: Bypass the page cache where the filesystem can.
            fsync: A block counts as stored once its bytes, checksum and name are on the device.
            reuse_inodes: Overwrite evicted files instead of making new ones, where that is safe.
            rescan_interval_s: Seconds, at least, between two walks over everything, which find what
                others have added and removed; more where they would take above 2 % of a core.
            file_mode: Permissions of new files, as octal text such as "0640"; by default 0600 and
                what the directory they lie in allows its group.
            dir_mode: The same of new directories; by default 0700 and the same.
            locality: "LOCAL" or "REMOTE".
            ops: The system calls; tests put a fault layer here.
            **options: The options that every tier takes.

        Raises:
            ConfigError: An option is unusable, or the directory is.
        """
        given = {
            "root_dir": root_dir,
            "verify": verify,
            "integrity_key_file": integrity_key_file,
            "capacity_bytes": capacity_bytes,
            "eviction_policy": eviction_policy,
            "high_watermark": high_watermark,
            "low_watermark": low_watermark,
            "direct_io": direct_io,
            "fsync": fsync,
            "reuse_inodes": reuse_inodes,
            "rescan_interval_s": rescan_interval_s,
            "file_mode": file_mode,
            "dir_mode": dir_mode,
            "locality": locality,
            **options,
        }
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        identity = identity_of(options, config_of(offloading_spec), row_bytes)
        tier = FsTier(_settings(given, identity), partial(create_policy, eviction_policy), ops)
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> list[TierPlace]:
        """Check every option, and that the capacity has room for a block."""
        settings = _settings(_DEFAULTS | dict(options), identity)
        capacity_bytes = settings.space.capacity_bytes if settings.space else None
        place = TierPlace(settings.root_dir, capacity_bytes)
        if settings.space is not None and identity.block_bytes:
            namespace = Namespace(settings.root_dir, settings.run_config, settings.rank)
            ground = examine(replace(place, path=namespace.folder))
            Footprint.of(ground.status, identity.block_bytes).check(settings.space.capacity_bytes)
        return [place]

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Not before it is asked for: it loads anyio.
        from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance  # noqa: PLC0415

        return FsMaintenance


_DEFAULTS: Final = defaults_of(FileSystemTierManager)


def _settings(options: Mapping[str, Any], identity: KVIdentity) -> FsSettings:
    """Return what the options mean, all of which are there; raises ConfigError."""
    check_tier_options(options)
    check_policy(parse_name(options["eviction_policy"], "eviction_policy"))
    high = parse_fraction(options["high_watermark"], "high_watermark")
    low = parse_fraction(options["low_watermark"], "low_watermark")
    if low > high:
        raise ConfigError(f"low_watermark: {low} is above high_watermark={high}; it must not be")
    space = None
    if options["capacity_bytes"] is not None:
        capacity_bytes = parse_size_bytes(options["capacity_bytes"], "capacity_bytes")
        space = SpaceSettings(capacity_bytes, high, low)
    reuses_inodes = parse_bool(options["reuse_inodes"], "reuse_inodes")
    verify = Verify(parse_choice(options["verify"], Verify, "verify"))
    key = parse_key_file(options["integrity_key_file"])
    if key is not None:
        check_verifies(options["verify"], does=verify is not Verify.OFF)
        verify = Verify.REQUIRED
    return FsSettings(
        root_dir=parse_directory(options["root_dir"]),
        run_config=named_layout(identity),
        rank=identity.rank,
        verify=verify,
        integrity_key=key,
        space=space,
        direct_io=parse_bool(options["direct_io"], "direct_io"),
        fsync=parse_bool(options["fsync"], "fsync"),
        # vLLM's own tier reads files of its namespaces without verifying them.
        reuse_inodes=reuses_inodes and options.get("run_config") is None,
        rescan_interval_s=parse_seconds(options["rescan_interval_s"], "rescan_interval_s"),
        io_threads=read_threads(options.get("n_read_threads")) + options.get("n_write_threads", 1),
        modes=parse_modes(options),
        locality=Locality(parse_choice(options["locality"], Locality, "locality")),
    )
