"""The `fs` tier behind plain calls, and the meaning of its options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.config import (
    OffloadConfig,
    at_least,
    parse_bool,
    parse_fraction,
    parse_name,
    parse_seconds,
    parse_size_bytes,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import SecondaryTierManager, read_threads
from kvoffload_async.facade.storage import (
    config_of,
    default_run_config,
    identity_fields,
    parse_choice,
    parse_directory,
    parse_run_config,
)
from kvoffload_async.facade.tier_options import TierOptions, check_tier_options
from kvoffload_async.registry import check_policy, create_policy
from kvoffload_async.tiers.files.ops import FileOps
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
        rank: int = 0,
        run_config: Mapping[str, Any] | None = None,
        verify: str = "when_present",
        capacity_bytes: int | str | None = None,
        eviction_policy: str = "lru",
        high_watermark: float = 1.0,
        low_watermark: float = 0.95,
        direct_io: bool = False,
        fsync: bool = False,
        reuse_inodes: bool = True,
        rescan_interval_s: float = 60.0,
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
            rank: Which worker's blocks these are.
            run_config: Everything that the layout of a block's bytes depends on; by default the
                spec's geometry and the slot size. What `model`, `fingerprint` and `namespace` say
                is added to it.
            verify: "required", "when_present" or "off": which blocks are served.
            capacity_bytes: Disk bytes, as allocated, that are never exceeded; None: unbounded.
            eviction_policy: Eviction policy at capacity.
            high_watermark: Share of the capacity above which room is made in the background.
            low_watermark: Share of the capacity down to which that goes.
            direct_io: Bypass the page cache where the filesystem can.
            fsync: Wait for the device before a block is published.
            reuse_inodes: Overwrite evicted files instead of making new ones, where that is safe.
            rescan_interval_s: Seconds between two walks that correct the count.
            locality: "LOCAL" or "REMOTE".
            ops: The system calls; tests put a fault layer here.
            **options: The options that every tier takes.

        Raises:
            ConfigError: An option is unusable, or the directory is.
        """
        check_tier_options(options)
        directory = parse_directory(root_dir)
        check_policy(parse_name(eviction_policy, "eviction_policy"))
        high = parse_fraction(high_watermark, "high_watermark")
        low = parse_fraction(low_watermark, "low_watermark")
        if low > high:
            raise ConfigError(
                f"low_watermark: {low} is above high_watermark={high}; it must not be"
            )
        space = None
        if capacity_bytes is not None:
            space = SpaceSettings(parse_size_bytes(capacity_bytes, "capacity_bytes"), high, low)
        fields = parse_run_config(run_config) or default_run_config(
            offloading_spec, primary_kv_view
        )
        fields |= identity_fields(run_config, options, config_of(offloading_spec))
        settings = FsSettings(
            root_dir=directory,
            run_config=fields,
            rank=at_least(0)(rank, "rank"),
            verify=Verify(parse_choice(verify, Verify, "verify")),
            space=space,
            direct_io=parse_bool(direct_io, "direct_io"),
            fsync=parse_bool(fsync, "fsync"),
            # vLLM's own tier reads files of its namespaces without verifying them.
            reuse_inodes=parse_bool(reuse_inodes, "reuse_inodes") and run_config is None,
            rescan_interval_s=parse_seconds(rescan_interval_s, "rescan_interval_s"),
            io_threads=read_threads(options.get("n_read_threads"))
            + options.get("n_write_threads", 1),
            locality=Locality(parse_choice(locality, Locality, "locality")),
        )
        tier = FsTier(settings, partial(create_policy, eviction_policy), ops)
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], config: OffloadConfig | None) -> None:
        """Check that the model is named; see `SecondaryTierManager`."""
        identity_fields(options.get("run_config"), options, config)

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Not before it is asked for: it loads anyio.
        from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance  # noqa: PLC0415

        return FsMaintenance
