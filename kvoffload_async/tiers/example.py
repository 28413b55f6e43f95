"""The reference tier: an unbounded in-memory dictionary of blocks."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import (
    AsyncTier,
    Direction,
    TierCapabilities,
    TierEnvironment,
    TierSettings,
)
from kvoffload_async.config import at_least, option
from kvoffload_async.errors import BlockMissingError, TierClosedError, Trouble
from kvoffload_async.tables.keymap import key_of_cursor
from kvoffload_async.types import JobMetadata, Medium, OffloadKey, block_text

logger = logging.getLogger(__name__)

_Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ExampleSettings(TierSettings):
    """The options of an `example` tier."""

    custom_param: int = option(at_least(0), 0)
    """Only logged; shows how an option is declared."""


class ExampleTier(AsyncTier):
    """Keeps copies of blocks in a dictionary, without a limit, until the process ends.

    Each job is one call of the I/O runner: the copies run off the loop thread, and numpy releases
    the GIL while copying.
    """

    declares = ExampleSettings
    remedies: ClassVar = {Trouble.TOO_SLOW: "raise cpu_bytes_to_use, or set write_back to wait"}
    capabilities = TierCapabilities(exclusive=True, medium=Medium.CPU, deletes=True, lists=True)

    def __init__(self, settings: ExampleSettings | None = None) -> None:
        """Start without blocks."""
        logger.info("example tier: custom_param=%d", (settings or ExampleSettings()).custom_param)
        self._blocks: dict[OffloadKey, _Rows] = {}
        self._rows: _Rows | None = None
        self._env: TierEnvironment | None = None

    async def open(self, env: TierEnvironment) -> None:
        """Keep references to the environment and the primary's buffer."""
        self._env = env
        self._rows = np.asarray(env.kv_view)

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that are stored."""
        return frozenset(key for key in keys if key in self._blocks)

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Copy the blocks that are not stored yet."""
        env, rows = self._opened()

        def copy() -> dict[OffloadKey, _Rows]:
            return {
                key: rows[slot].copy()
                for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True)
                if key not in self._blocks
            }

        self._blocks.update(await env.io.run(Direction.STORE, copy))
        return {}

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Copy blocks into the job's slots; missing blocks fail individually."""
        env, rows = self._opened()
        found = [self._blocks.get(key) for key in job.keys]

        def copy() -> None:
            for block, slot in zip(found, job.block_ids.tolist(), strict=True):
                if block is not None:
                    np.copyto(rows[slot], block)

        await env.io.run(Direction.LOAD, copy)
        return {
            i: BlockMissingError(f"{block_text(job.keys[i])} is not stored")
            for i, block in enumerate(found)
            if block is None
        }

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Drop blocks."""
        for key in keys:
            self._blocks.pop(key, None)
        return {}

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Return the next keys in their order; a cursor is the last key in hexadecimal digits."""
        after = key_of_cursor(cursor) or b""
        keys = heapq.nsmallest(count, (key for key in self._blocks if key > after))
        return keys, keys[-1].hex() if len(keys) == count else None

    async def close(self) -> None:
        """Release the buffer; the blocks are kept until the tier object is deleted."""
        self._env = None
        self._rows = None

    def gauges(self) -> Mapping[str, float]:
        """Return the number of blocks and their bytes; there is no capacity."""
        rows, num_blocks = self._rows, len(self._blocks)
        row_bytes = 0 if rows is None else rows.shape[1]
        return {"blocks": num_blocks, "used_bytes": num_blocks * row_bytes}

    def get_num_blocks(self) -> int:
        """Return the number of blocks. Thread: any."""
        return len(self._blocks)

    def _opened(self) -> tuple[TierEnvironment, _Rows]:
        if self._env is None or self._rows is None:
            raise TierClosedError("the example tier is not open")
        return self._env, self._rows
