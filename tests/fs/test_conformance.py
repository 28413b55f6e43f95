from typing import ClassVar

import pytest
from fs.directories import KIB, FsDirectory
from implementations import each_implementation
from sealed_names import SealedConformance, key_file, sealing

from kvoffload_async.testing import TierConformance
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.sealing import EncryptionKey

__all__ = ["each_implementation"]


class FsConformance(TierConformance):
    options: ClassVar[dict] = {}
    short_io_timeout_s = 0.05
    traffic_runs = 10

    @pytest.fixture
    def directory(self, tmp_path):
        self.found = FsDirectory(tmp_path)
        return self.found

    @pytest.fixture
    def tier(self, directory):
        return lambda: directory.tier(**self.options)

    def damage(self, tier, key):
        path = self.found.path(key)
        content = bytearray(path.read_bytes())
        content[7] ^= 1
        path.write_bytes(content)
        return True


class TestFsTier(FsConformance):
    traffic_runs = 40


@pytest.mark.slow
@pytest.mark.usefixtures("each_implementation")
class TestFsTierThatEncrypts(FsConformance):
    options: ClassVar[dict] = {
        "verify": "required",
        "capacity_bytes": 1024 * KIB,
        "encryption_keys": (EncryptionKey(bytes(32)),),
    }


@pytest.mark.slow
class TestFsTierWithCapacity(FsConformance):
    options: ClassVar[dict] = {"capacity_bytes": 1024 * KIB}


@pytest.mark.slow
class TestFsTierThatRequiresChecksums(FsConformance):
    options: ClassVar[dict] = {"verify": "required", "fsync": True}


class TestFsTierWithDirectIoAndArc(FsConformance):
    options: ClassVar[dict] = {"capacity_bytes": 1024 * KIB, "policy": "arc", "direct_io": True}


class TestFsTierWithSealedNames(SealedConformance, FsConformance):
    options: ClassVar[dict] = {"capacity_bytes": 1024 * KIB}

    @pytest.fixture
    def tier(self, directory, tmp_path):
        return sealing(lambda: directory.tier(**self.options), [key_file(tmp_path)])


def test_a_stored_block_survives_beside_a_tier_that_does_not_verify(directory):
    with directory.open() as first, directory.open(verify="off") as second:
        assert first.store([key_of(1)]) == {}
        assert second.store([key_of(2)]) == {}
        assert first.load([key_of(2)], [3]) == {}
        assert second.load([key_of(1)], [3]) == {}
