"""The `mooncake` tier meets the whole contract: on a real master, and over a made-up library."""

import numpy as np
import pytest
from remote.tampering import KEYS
from sealed_names import SealedConformance, key_file, sealing

from kvoffload_async.testing import TierConformance
from kvoffload_async.tiers.mooncake.tier import MooncakeTier


class TestMooncakeTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _master(self, master):
        self.master = master

    @pytest.fixture
    def tier(self, master):
        return lambda: MooncakeTier(master.connection())

    def damage(self, tier, key):
        """Put another value where the block was."""
        store = self.master.host.store
        (name,) = tier._names([key])
        value = np.frombuffer(store.get(name), dtype=np.uint8).copy()
        if not len(value):
            return False
        value[-1] ^= 1
        assert store.remove(name, True) == 0
        return store.put(name, value.tobytes()) == 0


class TestMooncakeTierOverAMadeUpLibrary(TierConformance):
    @pytest.fixture(autouse=True)
    def _fake(self, fake):
        self.fake = fake

    @pytest.fixture
    def tier(self, fake):
        return fake.tier

    def damage(self, tier, key):
        return self.fake.damage(tier, key)


class TestMooncakeTierWithSealedNames(SealedConformance, TestMooncakeTierOverAMadeUpLibrary):
    @pytest.fixture
    def tier(self, fake, tmp_path):
        return sealing(fake.tier, [key_file(tmp_path)])


class TestMooncakeTierWithEncryption(TestMooncakeTierOverAMadeUpLibrary):
    @pytest.fixture
    def tier(self, fake):
        return lambda: fake.tier(encryption_keys=KEYS[:1])
