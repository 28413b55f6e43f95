"""The options of an `fs` tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from kvoffload_async.abc.tier import KVIdentity, TierLocation
from kvoffload_async.config import (
    TierOptions,
    one_of,
    option,
    or_none,
    parse_bool,
    parse_fraction,
    parse_seconds,
    parse_size_bytes,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.settings import DiskSettings, SealingOptions
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.tiers.fs.operations import Verify
from kvoffload_async.tiers.fs.usage import FILE_BYTES

_ENTRY_BYTES: Final = 4096
_ENTRIES_SHARE: Final = 64
_MOST_ENTRIES: Final = 16


def entries_bytes(capacity_bytes: int) -> int:
    """Return the part of a capacity that is left to the entries of writers that open later."""
    most_bytes = capacity_bytes // _ENTRIES_SHARE // _ENTRY_BYTES * _ENTRY_BYTES
    return min(most_bytes, _MOST_ENTRIES * _ENTRY_BYTES)


WAITS_FOR_DEVICE: Final = True
"""Whether I/O threads mostly wait for the device: to create, open and write a file per block."""


@dataclass(frozen=True, kw_only=True)
class FsSettings(DiskSettings, SealingOptions):
    """The options of an `fs` tier, and the identity of its blocks.

    Attributes:
        io_threads: I/O threads of the tier.
    """

    verify: Verify = option(one_of(Verify), Verify.WHEN_PRESENT)
    """Blocks that are served: only those with a valid checksum ("required"), those without an
    invalid one ("when_present"), or all ("off")."""
    capacity_bytes: int | None = option(or_none(parse_size_bytes), None)
    """Maximum allocated disk space in bytes; None: unlimited."""
    high_watermark: float = option(parse_fraction, 1.0)
    """Fraction of the capacity above which blocks are evicted in the background."""
    low_watermark: float = option(parse_fraction, 0.95)
    """Fraction of the capacity at which background eviction stops."""
    fsync: bool = option(parse_bool, default=False)
    """Report a block as stored only after its bytes, checksum and name are on the device."""
    rescan_interval_s: float = option(parse_seconds, 60.0)
    """Minimum seconds between two scans of the directory for blocks that other processes have added
    or removed; longer if scans would take more than 2 % of a core."""
    trust_vllm_directory: bool = option(parse_bool, default=False, is_internal=True)
    """Use the layout of vLLM's own tier, to share its directory."""
    io_threads: int = 3

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        common = TierOptions.take(options)
        settings = super().of(options, identity)
        high, low, verify = settings.high_watermark, settings.low_watermark, settings.verify
        if low > high:
            raise ConfigError(
                f"low_watermark: {low} is above high_watermark={high}; it must not be"
            )
        if settings.trust_vllm_directory and common.name_key_files is not None:
            raise ConfigError(
                "trust_vllm_directory: does not go with name_key_file, because vLLM's own tier "
                "does not seal names; leave one of them out"
            )
        if settings.quotas is not None and settings.capacity_bytes is None:
            raise ConfigError("capacity_bytes: not given, but tenants share the tier; give it")
        settings.check_verifies(str(verify), does=verify is not Verify.OFF)
        if settings.trust_vllm_directory and settings.encryption_keys is not None:
            raise ConfigError(
                "trust_vllm_directory: does not go with encryption_key_file: vLLM's own tier "
                "neither encrypts nor decrypts; leave one of them out"
            )
        loads = common.read_threads(waits_for_device=WAITS_FOR_DEVICE)
        return replace(
            settings,
            verify=verify if settings.key_option is None else Verify.REQUIRED,
            io_threads=loads + common.n_write_threads,
        )

    def locations(self, identity: KVIdentity) -> list[TierLocation]:
        has_limit = self.capacity_bytes is not None and identity.block_bytes > 0
        check = partial(self.allocated_bytes, identity.block_bytes) if has_limit else None
        return [TierLocation(self.root_dir, self.capacity_bytes, check=check)]

    def allocated_bytes(self, block_bytes: int, folder: os.stat_result) -> int:
        """Return the disk bytes of a block, given the status of a folder on its filesystem.

        Raises:
            ConfigError: The capacity is too small for a block.
        """
        grain = max(512, folder.st_blksize)
        allocated_bytes, count_bytes = (-(-n // grain) * grain for n in (block_bytes, FILE_BYTES))
        least_bytes = allocated_bytes + count_bytes + grain  # with this writer's entry
        if self.capacity_bytes is not None and self.capacity_bytes < least_bytes:
            raise ConfigError(
                f"capacity_bytes: {self.capacity_bytes} holds no block of {allocated_bytes} bytes "
                f"in addition to the count; give at least {least_bytes}"
            )
        self.parts(allocated_bytes)
        return allocated_bytes

    def parts(self, allocated_bytes: int) -> list[int]:
        """Return the maximum number of blocks of each tenant; empty without tenants.

        Raises:
            ConfigError: The capacity is too small for the quotas.
        """
        if self.quotas is None or self.capacity_bytes is None:
            return []
        others_bytes = entries_bytes(self.capacity_bytes) + FILE_BYTES + _ENTRY_BYTES
        most = max(0, self.capacity_bytes - others_bytes) // allocated_bytes
        return self.quotas.blocks(most, allocated_bytes, "capacity_bytes")

    @property
    def namespace(self) -> Namespace:
        """The location of the blocks."""
        return Namespace(
            self.root_dir, self.run_config, self.rank, is_vllms=self.trust_vllm_directory
        )
