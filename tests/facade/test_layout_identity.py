"""What a tier of one's own learns of the blocks that it keeps: whose they are, and their layout."""

import pytest
from scripted_tier import ScriptedTier

from kvoffload_async import (
    ExampleSecondaryTierManager,
    SecondaryTierFactory,
    SecondaryTierManager,
    TieringOffloadingSpec,
)
from kvoffload_async.abc.tier import KVIdentity

BLOCK = 4096
TIERS = {"fs": {}, "slab": {"capacity_bytes": "1MiB"}}


def configuration(root, tier, config, options):
    tier_config = {"type": tier, "root_dir": str(root), **TIERS[tier], **options}
    return {
        "cpu_bytes_to_use": 8 * BLOCK,
        "block_bytes": BLOCK,
        "secondary_tiers": [tier_config],
        **config,
    }


class LearningTier(ScriptedTier):
    async def open(self, env):
        await super().open(env)
        self.learned = env.identity


@pytest.fixture
def learned(monkeypatch):
    """Return what a tier of one's own learns under a configuration."""
    registry = SecondaryTierFactory._registry
    loaders = {**registry._loaders, "learning": lambda: LearningTier}
    monkeypatch.setattr(registry, "_loaders", loaders)

    def learn(own=None, **whole):
        config = {"cpu_bytes_to_use": 4 * BLOCK, "block_bytes": BLOCK, **whole}
        config["secondary_tiers"] = [{"type": "learning", **(own or {})}]
        with TieringOffloadingSpec(config) as spec:
            (tier,) = spec.get_manager().secondary_tiers
            assert isinstance(tier, SecondaryTierManager)
            return tier.tier.learned

    return learn


@pytest.mark.parametrize(
    ("whole", "own", "labels"),
    [
        ({}, {}, (None, None, None)),
        ({"model": "m", "fingerprint": "f"}, {}, ("m", "f", None)),
        ({"model": "m", "fingerprint": "f"}, {"namespace": "n"}, ("m", "f", "n")),
        ({"model": "m", "fingerprint": "f"}, {"fingerprint": "g"}, ("m", "g", None)),
        ({"model": "m"}, {"model": "x", "fingerprint": "g"}, ("x", "g", None)),
        ({"model": "m"}, {"run_config": {"model_name": "y"}}, ("y", None, None)),
    ],
)
def test_a_tier_of_ones_own_learns_whose_blocks_it_keeps(learned, whole, own, labels):
    found = learned(own, **whole)
    assert (found.model, found.fingerprint, found.namespace) == labels


def test_a_tier_of_ones_own_learns_how_a_block_is_laid_out(learned):
    found = learned({"rank": 3}, model="m", num_workers=2, block_size=32, blocks_per_chunk=4)
    assert (found.block_bytes, found.rank, found.num_workers) == (2 * BLOCK, 3, 2)
    assert found.run_config == {
        "inference_engine": "kvoffload_async",
        "block_bytes": 2 * BLOCK,
        "tokens_per_hash": 32,
        "blocks_per_file": 4,
        "num_workers": 2,
        "model_name": "m",
    }


@pytest.mark.parametrize("tier", TIERS)
def test_the_tiers_on_disk_keep_blocks_by_what_other_tiers_learn(learned, tmp_path, tier):
    options = {"namespace": "n", "fingerprint": "f", "rank": 1}
    config = {"model": "org/model", "block_size": 32}
    with TieringOffloadingSpec(configuration(tmp_path, tier, config, options)) as spec:
        (manager,) = spec.get_manager().secondary_tiers
        settings = manager.tier._settings
    found = learned(options, **config)
    assert (settings.run_config, settings.rank) == (found.run_config, found.rank)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"fingerprint": "f"},
        {"block_size": 32},
        {"block_bytes": 2 * BLOCK},
        {"num_workers": 2},
        {"own": {"rank": 1}},
        {"own": {"namespace": "n"}},
        {"own": {"run_config": {"layout": "x"}}},
    ],
)
def test_what_differs_makes_another_digest(learned, change):
    first = learned(model="m")
    assert learned(model="m").digest == first.digest
    other = learned(**{"model": "m", **change})
    assert other.digest != first.digest
    assert len(other.digest) == 32


def test_the_generation_is_told_and_is_no_part_of_the_digest():
    assert KVIdentity("m", generation="2").digest == KVIdentity("m").digest
    assert hash(KVIdentity("m", run_config={"a": 1})) == hash(KVIdentity("m"))


def test_the_tier_in_memory_takes_a_namespace():
    config = {"cpu_bytes_to_use": BLOCK, "block_bytes": BLOCK}
    config["secondary_tiers"] = [{"type": "example", "namespace": "n"}]
    with TieringOffloadingSpec(config) as spec:
        (tier,) = spec.get_manager().secondary_tiers
        assert isinstance(tier, ExampleSecondaryTierManager)
