from typing import ClassVar

import pytest
from implementations import each_implementation
from sealed_names import SealedConformance, key_file, sealing
from slab.stores import KIB, SlabStore, flip

from kvoffload_async.testing import TierConformance
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.slab.addresses import segment_of, slot_of
from kvoffload_async.tiers.slab.layout import segment_name

__all__ = ["each_implementation"]


class SlabConformance(TierConformance):
    options: ClassVar[dict] = {}
    short_io_timeout_s = 0.05
    traffic_runs = 10

    @pytest.fixture
    def tier(self, tmp_path):
        self.slab_store = SlabStore(tmp_path / "root", block_bytes=self.slot_bytes)
        return lambda: self.slab_store.tier(**self.options)

    def damage(self, tier, key):
        store = tier._store
        (address,) = store.catalog.find([key])
        path = self.slab_store.folder / segment_name(segment_of(address))
        flip(path, store.manifest.offset_of(slot_of(address)) + 7)
        return True


class TestSlabTier(SlabConformance):
    traffic_runs = 40


class TestSlabTierThatIsFullAndWaitsForTheDevice(SlabConformance):
    options: ClassVar[dict] = {"capacity_bytes": 300 * KIB, "fsync": True, "policy": "arc"}


@pytest.mark.slow
@pytest.mark.usefixtures("each_implementation")
class TestSlabTierThatEncrypts(SlabConformance):
    options: ClassVar[dict] = {"encryption_keys": (EncryptionKey(bytes(32)),)}


@pytest.mark.slow
class TestSlabTierThatEncryptsRowsThatAreNoPages(SlabConformance):
    slot_bytes = 5000
    options: ClassVar[dict] = {"direct_io": True, "encryption_keys": (EncryptionKey(bytes(32)),)}


@pytest.mark.slow
class TestSlabTierWithRowsThatAreNoPages(SlabConformance):
    slot_bytes = 5000
    options: ClassVar[dict] = {"io_threads": 2, "piece_bytes": 16 * KIB}


@pytest.mark.slow
class TestSlabTierWithDirectIo(SlabConformance):
    options: ClassVar[dict] = {"direct_io": True}


class TestSlabTierWithDirectIoAndRowsThatAreNoPages(SlabConformance):
    slot_bytes = 5000
    options: ClassVar[dict] = {"direct_io": True, "piece_bytes": 16 * KIB}


@pytest.mark.slow
class TestSlabTierWithBlocksLargerThanAnExtent(SlabConformance):
    slot_bytes = 13_000
    options: ClassVar[dict] = {"piece_bytes": 4 * KIB}


@pytest.mark.slow
class TestSlabTierWithDirectIoAndBlocksLargerThanAnExtent(SlabConformance):
    slot_bytes = 12 * KIB
    options: ClassVar[dict] = {"direct_io": True, "piece_bytes": 4 * KIB}


class TestSlabTierWithSealedNames(SealedConformance, SlabConformance):
    @pytest.fixture
    def tier(self, tmp_path):
        self.slab_store = SlabStore(tmp_path / "root", block_bytes=self.slot_bytes)
        return sealing(self.slab_store.tier, [key_file(tmp_path)])
