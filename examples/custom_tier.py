"""A custom tier: an async class, a line of configuration, and the conformance suite.

The tier keeps compressed blocks. The suite needs pytest. Run the file as a script for a
demonstration. Run it under pytest to test the whole contract of a tier, including cancellation and
faults:

    pytest examples/custom_tier.py
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload_async import (
    AsyncTier,
    BlockMissingError,
    Direction,
    JobMetadata,
    OffloadKey,
    SecondaryTierFactory,
    TierCapabilities,
    TierEnvironment,
    TierError,
    TieringOffloadingSpec,
    make_offload_key,
)
from kvoffload_async.errors import TierClosedError
from kvoffload_async.testing import TierConformance
from kvoffload_async.types import LookupResult, Medium, ReqContext

Slots = npt.NDArray[np.uint8]


class CompressedTier(AsyncTier):
    """Keeps compressed blocks in memory; `level` is zlib's."""

    capabilities = TierCapabilities(exclusive=True, medium=Medium.CPU)

    def __init__(self, level: int = 1) -> None:
        self._level = level
        self._blocks: dict[OffloadKey, bytes] = {}
        self._env: TierEnvironment | None = None
        self._slots: Slots | None = None

    async def open(self, env: TierEnvironment) -> None:
        self._env = env
        self._slots = np.asarray(env.kv_view)

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        return frozenset(key for key in keys if key in self._blocks)

    async def store(self, job: JobMetadata) -> dict[int, TierError]:
        env, slots = self._opened()
        pairs = [
            (key, slot)
            for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True)
            if key not in self._blocks
        ]

        def compress() -> dict[OffloadKey, bytes]:  # slow, so it must not run on the loop
            return {key: zlib.compress(slots[slot].data, self._level) for key, slot in pairs}

        self._blocks.update(await env.io.run(Direction.STORE, compress))
        return {}

    async def load(self, job: JobMetadata) -> dict[int, TierError]:
        env, slots = self._opened()
        failures: dict[int, TierError] = {
            index: BlockMissingError(f"block {key.hex()} is not here")
            for index, key in enumerate(job.keys)
            if key not in self._blocks
        }
        wanted = [
            (self._blocks[key], job.block_ids[index])
            for index, key in enumerate(job.keys)
            if index not in failures
        ]

        def decompress() -> None:
            for block, slot in wanted:
                np.copyto(slots[slot], np.frombuffer(zlib.decompress(block), dtype=np.uint8))

        await env.io.run(Direction.LOAD, decompress)
        return failures

    async def close(self) -> None:
        self._env = self._slots = None
        self._blocks.clear()

    @property
    def compressed_bytes(self) -> int:
        return sum(map(len, self._blocks.values()))

    def _opened(self) -> tuple[TierEnvironment, Slots]:
        if self._env is None or self._slots is None:
            raise TierClosedError("the tier is not open")
        return self._env, self._slots


class TestCompressedTier(TierConformance):
    """Tests the whole contract of a tier; only the fixture has to be written."""

    @pytest.fixture
    def tier(self) -> Callable[[], AsyncTier]:
        return CompressedTier


def main() -> None:
    SecondaryTierFactory.register_tier("compressed", __name__, "CompressedTier")
    config = {
        "cpu_bytes_to_use": "64KiB",
        "block_bytes": 4096,
        "secondary_tiers": [{"type": "compressed", "level": 6}],
    }
    keys = [make_offload_key(bytes([number]) * 16) for number in range(8)]
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        request = ReqContext("request")
        manager.on_new_request(request)
        granted = manager.prepare_store(keys, request)
        assert granted is not None
        slots = np.asarray(manager.get_primary_kv_view())
        for number, slot in enumerate(granted.store_spec.block_ids):
            slots[slot] = number  # a server would copy device blocks here
        manager.complete_store(keys, request)
        manager.on_schedule_end()
        while manager.has_pending_work():
            manager.wait_for_progress(1.0)
            manager.on_schedule_end()

        manager.reset_cache()  # empties the primary; the tier keeps its blocks
        manager.on_reset_flushed()
        while any(manager.lookup(key, request) is not LookupResult.HIT for key in keys):
            manager.on_schedule_end()
            manager.wait_for_progress(1.0)
        loaded = manager.prepare_load(keys, request)
        assert all((slots[slot] == n).all() for n, slot in enumerate(loaded.block_ids))
        manager.complete_load(keys, request)
        manager.on_request_finished(request)
        tier = manager.secondary_tiers[0].tier
        assert isinstance(tier, CompressedTier)
        print(f"{len(keys)} blocks of 4096 bytes came back from {tier.compressed_bytes} bytes")
        del slots


if __name__ == "__main__":
    main()
