"""The `object` tier meets the whole contract: in a directory, and on a real S3 server."""

import pytest
from remote.object.tiers import damage, tier_on
from remote.tampering import KEYS
from sealed_names import SealedConformance, key_file, sealing

from kvoffload_async.testing import TierConformance
from kvoffload_async.tiers.object.tier import ObjectOptions


class TestObjectTierInADirectory(TierConformance):
    fault_seeds = range(2)
    traffic_runs = 10

    @pytest.fixture
    def connection(self, tmp_path):
        return ObjectOptions(url=f"file://{tmp_path}/blocks")

    @pytest.fixture
    def tier(self, connection):
        self.connection = connection
        return lambda: tier_on(connection)

    def damage(self, tier, key):
        return damage(self.connection, key)


@pytest.mark.servers
class TestObjectTierOnS3(TestObjectTierInADirectory):
    traffic_runs = 5

    @pytest.fixture
    def connection(self, server, prefix):
        return server.connection(prefix)


class TestObjectTierWithSealedNames(SealedConformance, TestObjectTierInADirectory):
    @pytest.fixture
    def tier(self, connection, tmp_path):
        self.connection = connection
        return sealing(lambda: tier_on(connection), [key_file(tmp_path)])


class TestObjectTierWithEncryption(TestObjectTierInADirectory):
    @pytest.fixture
    def tier(self, connection):
        self.connection = connection
        return lambda: tier_on(connection, encryption_keys=KEYS[:1])
