"""The `slab` tier behind plain calls, and the meaning of its options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Unpack

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import KVIdentity, TierPlace
from kvoffload_async.config import (
    at_least,
    or_none,
    parse_bool,
    parse_name,
    parse_size_bytes,
    shown,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import (
    MAX_THREADS,
    TierOptions,
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
        on_mismatch: str = "fail",
        segment_bytes: int | str = "1GiB",
        eviction_policy: str = "lru",
        verify: bool = True,
        integrity_key_file: str | None = None,
        direct_io: bool = False,
        fdatasync: bool = False,
        io_threads: int | None = None,
        piece_bytes: int | str = "4MiB",
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
            capacity_bytes: Disk bytes, as allocated and with everything that the store needs
                beside its blocks, that are never exceeded.
            on_mismatch: What happens if the folder has blocks of another layout or content:
                "fail"; "new_namespace", which makes a store of its own, with a capacity of its
                own, beside them; or "replace", which discards them.
            segment_bytes: Size of the files, at most; as many are allocated at once as there are
                threads, up to the capacity.
            eviction_policy: Eviction policy at capacity.
            verify: Compute a checksum of every block, and serve none whose bytes do not match.
            integrity_key_file: Absolute path of a file with a key that checksums are made with. A
                store with another key, or without one, is one of another layout.
            direct_io: Bypass the page cache where the filesystem can.
            fdatasync: Wait for the device before blocks count as stored.
            io_threads: Threads that move blocks; all but one prefer loads. By default one per CPU
                that this process may use, 2 to 4: what is in the page cache moves fastest so.
                For `n_read_threads` and `n_write_threads`, which this tier does not take.
            piece_bytes: About what one system call moves, but a quarter of it at least where one
                job has all threads to itself; with `io_threads`, how much of one job the device
                works on at a time.
            file_mode: Permissions of new files, as octal text such as "0640"; by default 0600 and
                what the directory they lie in allows its group.
            dir_mode: The same of new directories; by default 0700 and the same.
            locality: "LOCAL" or "REMOTE".
            ops: The system calls; tests put a fault layer here.
            **options: The options that every tier takes.

        Raises:
            ConfigError: An option is unusable, the directory is, or the store in it is another
                process's or of another layout.
        """
        given = {
            "root_dir": root_dir,
            "capacity_bytes": capacity_bytes,
            "on_mismatch": on_mismatch,
            "segment_bytes": segment_bytes,
            "eviction_policy": eviction_policy,
            "verify": verify,
            "integrity_key_file": integrity_key_file,
            "direct_io": direct_io,
            "fdatasync": fdatasync,
            "io_threads": io_threads,
            "piece_bytes": piece_bytes,
            "file_mode": file_mode,
            "dir_mode": dir_mode,
            "locality": locality,
            **options,
        }
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        settings = _settings(given, identity_of(options, config_of(offloading_spec), row_bytes))
        tier = SlabTier(settings, partial(create_policy, eviction_policy), ops)
        options["n_read_threads"] = settings.io_threads - 1
        options["n_write_threads"] = 1
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> list[TierPlace]:
        """Check every option, and that the capacity has room for a block."""
        settings = _settings(_DEFAULTS | dict(options), identity)
        if identity.block_bytes:
            settings.budget(identity.block_bytes)
        return [TierPlace(settings.root_dir, settings.capacity_bytes)]

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Not before it is asked for: it loads anyio.
        from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance  # noqa: PLC0415

        return SlabMaintenance


_DEFAULTS: Final = defaults_of(SlabTierManager)


def _settings(options: Mapping[str, Any], identity: KVIdentity) -> SlabSettings:
    """Return what the options mean, all of which are there; raises ConfigError."""
    for name in ("n_read_threads", "n_write_threads"):
        if name in options:
            raise ConfigError(
                f"{name}: {shown(options[name])} does not go with this tier; give io_threads"
            )
    check_policy(parse_name(options["eviction_policy"], "eviction_policy"))
    parse_threads = or_none(at_least(2, MAX_THREADS))
    threads = parse_threads(options["io_threads"], "io_threads") or suitable_threads()
    verify = parse_bool(options["verify"], "verify")
    key = parse_key_file(options["integrity_key_file"])
    if key is not None:
        check_verifies(verify, does=verify)
    return SlabSettings(
        root_dir=parse_directory(options["root_dir"]),
        run_config=named_layout(identity),
        capacity_bytes=parse_size_bytes(options["capacity_bytes"], "capacity_bytes"),
        rank=identity.rank,
        segment_bytes=parse_size_bytes(options["segment_bytes"], "segment_bytes"),
        verify=verify,
        integrity_key=key,
        on_mismatch=OnMismatch(parse_choice(options["on_mismatch"], OnMismatch, "on_mismatch")),
        direct_io=parse_bool(options["direct_io"], "direct_io"),
        fdatasync=parse_bool(options["fdatasync"], "fdatasync"),
        io_threads=threads,
        stripes=threads,
        piece_bytes=parse_size_bytes(options["piece_bytes"], "piece_bytes"),
        modes=parse_modes(options),
        locality=Locality(parse_choice(options["locality"], Locality, "locality")),
    )
