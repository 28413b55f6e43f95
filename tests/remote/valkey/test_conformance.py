"""The `valkey` tier meets the whole contract, on a real server."""

import pytest
from remote.tampering import KEYS
from remote.valkey.tiers import damage, tier_at
from sealed_names import SealedConformance, key_file, sealing

from kvoffload_async.testing import TierConformance


class TestValkeyTier(TierConformance):
    fault_seeds = range(2)
    traffic_runs = 10

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    @pytest.fixture
    def tier(self, server):
        return lambda: tier_at(server.url())

    def damage(self, tier, key):
        return damage(self.server, key)


class TestValkeyTierThatRemembers(TestValkeyTier):
    """Longer than any test takes."""

    @pytest.fixture
    def tier(self, server):
        return lambda: tier_at(server.url(), positive_cache_ttl_s=60.0, negative_cache_ttl_s=60.0)


class TestValkeyTierWithSealedNames(SealedConformance, TestValkeyTier):
    @pytest.fixture
    def tier(self, server, tmp_path):
        return sealing(lambda: tier_at(server.url()), [key_file(tmp_path)])


class TestValkeyTierWithEncryption(TestValkeyTier):
    @pytest.fixture
    def tier(self, server):
        return lambda: tier_at(server.url(), encryption_keys=KEYS[:1])
