"""Disk usage of a block on a filesystem, and the minimum capacity. Thread-safe."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.ops import disk_bytes
from kvoffload_async.tiers.fs.counts import FILE_BYTES


@dataclass(frozen=True, slots=True)
class Footprint:
    """Disk usage of a block on a filesystem.

    Attributes:
        block_bytes: Disk bytes of a block, in whole filesystem blocks.
        folder_bytes: Disk bytes of a new folder.
        least_bytes: Minimum capacity for one block.
    """

    block_bytes: int
    folder_bytes: int
    least_bytes: int

    @classmethod
    def of(cls, folder: os.stat_result, row_bytes: int) -> Footprint:
        """Return the footprint of blocks of `row_bytes`, given the status of a folder there."""
        grain = max(512, folder.st_blksize)
        block_bytes = -(-row_bytes // grain) * grain
        folder_bytes = min(grain, disk_bytes(folder))  # `folder` may have grown
        count_bytes = -(-FILE_BYTES // grain) * grain
        # The count, this writer's entry, and folders: theirs, the block's, their parents, and
        # their growth.
        files_bytes = block_bytes + count_bytes + grain
        return cls(block_bytes, folder_bytes, files_bytes + 7 * folder_bytes)

    def check(self, capacity_bytes: int) -> None:
        """Check that the capacity fits a block; raises ConfigError."""
        if capacity_bytes < self.least_bytes:
            raise ConfigError(
                f"capacity_bytes: {capacity_bytes} holds no block of {self.block_bytes} bytes "
                f"and its folders; give at least {self.least_bytes}"
            )
