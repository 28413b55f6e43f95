"""What a block takes on a filesystem, and the least capacity. Thread: any."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.ops import disk_bytes
from kvoffload_async.tiers.fs.counts import FILE_BYTES


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a block takes on a filesystem.

    Attributes:
        block_bytes: A block, in whole grains of the filesystem.
        folder_bytes: A new folder.
        least_bytes: The smallest capacity that holds a block.
    """

    block_bytes: int
    folder_bytes: int
    least_bytes: int

    @classmethod
    def of(cls, folder: os.stat_result, row_bytes: int) -> Footprint:
        """Return it for blocks of `row_bytes`, given a folder of that filesystem."""
        grain = max(512, folder.st_blksize)
        block_bytes = -(-row_bytes // grain) * grain
        folder_bytes = min(grain, disk_bytes(folder))  # it may have grown; a new one has not
        count_bytes = -(-FILE_BYTES // grain) * grain
        # The count, this writer's entry, and the folders: of both, of the block, above them, and
        # what these may grow.
        files_bytes = block_bytes + count_bytes + grain
        return cls(block_bytes, folder_bytes, files_bytes + 7 * folder_bytes)

    def check(self, capacity_bytes: int) -> None:
        """Check that a block fits; raises ConfigError."""
        if capacity_bytes < self.least_bytes:
            raise ConfigError(
                f"capacity_bytes: {capacity_bytes} holds no block of {self.block_bytes} bytes "
                f"and its folders; give at least {self.least_bytes}"
            )
