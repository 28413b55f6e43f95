"""A tier of somebody else's under `KVOffloadSpec` learns whose blocks it keeps."""

import pytest

from kvoffload_async import ExampleSecondaryTierManager
from kvoffload_async.tiers.example import ExampleTier


class LearningTier(ExampleTier):
    async def open(self, env):
        await super().open(env)
        self.learned = env.identity


LearningTier.__module__ = "somebody_elses"


class PlainManager(ExampleSecondaryTierManager):
    """Takes the options of every tier, and hands them on."""


PlainManager.__module__ = "somebody_elses"


@pytest.fixture
def identity(pair, monkeypatch):
    """Return what such a tier learns, under a given configuration."""
    from kvoffload_async.facade.tier_factory import SecondaryTierFactory

    registry = SecondaryTierFactory._registry
    loaders = {"learning": lambda: LearningTier, "plain": lambda: PlainManager}
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, **loaders})

    def learn(tier=None, **options):
        world = pair([{"type": "learning", **(tier or {})}], **options)
        (manager,) = world.spec._engine.get_manager().secondary_tiers
        return manager.tier.learned

    return learn


def test_it_learns_model_layout_and_geometry(identity):
    one = identity({"namespace": "n", "fingerprint": "f"}, ranks=2, model="org/other")
    assert one.model == "org/other"
    assert (one.namespace, one.fingerprint) == ("n", "f")
    assert one.num_workers == 2
    assert one.block_bytes == 4096
    assert one.run_config["row_layout"]
    assert one.run_config["tp_size"] == 2


def test_what_differs_makes_another_digest(identity):
    given = {"fingerprint": "f"}
    first = identity(given).digest
    assert identity(given).digest == first
    assert identity(given, model="org/other").digest != first
    assert identity({"fingerprint": "g"}).digest != first
    assert identity(given, ranks=2).digest != first


def test_blocks_of_unknown_content_are_told_apart_from_those_of_any_other_process(identity):
    unknown = identity()
    assert len(unknown.run_config["process"]) == 32


def test_a_manager_of_somebody_elses_is_opened_too(identity, pair):
    world = pair([{"type": "plain"}])
    assert world.spec._engine.get_manager().secondary_tiers[0].tier_type == "plain"
