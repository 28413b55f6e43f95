"""The `slab` tier behind plain calls, and the meaning of its options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.config import (
    OffloadConfig,
    at_least,
    or_none,
    parse_bool,
    parse_name,
    parse_size_bytes,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import SecondaryTierManager
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
from kvoffload_async.runtime.io_pool import suitable_threads
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.opening import OnMismatch
from kvoffload_async.tiers.slab.tier import SlabSettings, SlabTier
from kvoffload_async.types import Locality


class SlabTierManager(SecondaryTierManager):
    """A bounded store of preallocated files, for a local disk and one process.

    Every option is checked before anything is touched; the store is opened, and what is in it
    known, when the constructor returns.
    """

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "slab",
        *,
        root_dir: str,
        capacity_bytes: int | str,
        rank: int = 0,
        run_config: Mapping[str, Any] | None = None,
        on_mismatch: str = "fail",
        segment_bytes: int | str = "1GiB",
        eviction_policy: str = "lru",
        verify: bool = True,
        direct_io: bool = False,
        fdatasync: bool = False,
        io_threads: int | None = None,
        piece_bytes: int | str = "4MiB",
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
            capacity_bytes: Disk bytes, as allocated and with everything that the store needs
                beside its blocks, that are never exceeded.
            rank: Which worker's blocks these are.
            run_config: Everything that the layout of a block's bytes depends on; by default the
                spec's geometry and the slot size. What `model`, `fingerprint` and `namespace` say
                is added to it.
            on_mismatch: What happens if the folder has blocks of another layout or content:
                "fail"; "new_namespace", which makes a store of its own, with a capacity of its
                own, beside them; or "replace", which discards them.
            segment_bytes: Size of the files, at most; as many are allocated at once as there are
                threads, up to the capacity.
            eviction_policy: Eviction policy at capacity.
            verify: Compute a checksum of every block, and serve none whose bytes do not match.
            direct_io: Bypass the page cache where the filesystem can.
            fdatasync: Wait for the device before blocks count as stored.
            io_threads: Threads that move blocks; all but one prefer loads. By default one per CPU
                that this process may use, 2 to 4: what is in the page cache moves fastest so.
                For `n_read_threads` and `n_write_threads`, which this tier does not take.
            piece_bytes: About what one system call moves, but a quarter of it at least where one
                job has all threads to itself; with `io_threads`, how much of one job the device
                works on at a time.
            locality: "LOCAL" or "REMOTE".
            ops: The system calls; tests put a fault layer here.
            **options: The options that every tier takes.

        Raises:
            ConfigError: An option is unusable, the directory is, or the store in it is another
                process's or of another layout.
        """
        for name in ("n_read_threads", "n_write_threads"):
            if name in options:
                raise ConfigError(f"{name}: does not go with this tier; give io_threads")
        check_tier_options(options)
        check_policy(parse_name(eviction_policy, "eviction_policy"))
        fields = parse_run_config(run_config) or default_run_config(
            offloading_spec, primary_kv_view
        )
        fields |= identity_fields(run_config, options, config_of(offloading_spec))
        threads = or_none(at_least(2))(io_threads, "io_threads") or suitable_threads()
        settings = SlabSettings(
            root_dir=parse_directory(root_dir),
            run_config=fields,
            capacity_bytes=parse_size_bytes(capacity_bytes, "capacity_bytes"),
            rank=at_least(0)(rank, "rank"),
            segment_bytes=parse_size_bytes(segment_bytes, "segment_bytes"),
            verify=parse_bool(verify, "verify"),
            on_mismatch=OnMismatch(parse_choice(on_mismatch, OnMismatch, "on_mismatch")),
            direct_io=parse_bool(direct_io, "direct_io"),
            fdatasync=parse_bool(fdatasync, "fdatasync"),
            io_threads=threads,
            stripes=threads,
            piece_bytes=parse_size_bytes(piece_bytes, "piece_bytes"),
            locality=Locality(parse_choice(locality, Locality, "locality")),
        )
        tier = SlabTier(settings, partial(create_policy, eviction_policy), ops)
        options["n_read_threads"] = settings.io_threads - 1
        options["n_write_threads"] = 1
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], config: OffloadConfig | None) -> None:
        """Check that the model is named; see `SecondaryTierManager`."""
        identity_fields(options.get("run_config"), options, config)

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Not before it is asked for: it loads anyio.
        from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance  # noqa: PLC0415

        return SlabMaintenance
