"""What objects say of themselves."""

from facade.worlds import EXCLUSIVE, PROBED, Alone, World

from kvoffload_async import (
    CPUOffloadingSpec,
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingSpec,
)


def test_a_manager_says_how_full_it_is_and_what_is_under_way():
    here = World(EXCLUSIVE, PROBED)
    here.begin("r")
    here.store(1, 2)
    expected = "2 of 8 slots used, 1 request, 2 jobs in flight, tiers: tier0, tier1"
    assert repr(here.manager) == f"<TieringOffloadingManager: {expected}>"
    here.rest()
    for _ in range(3):
        here.manager.planner.tiers[1].health.lookup_failed(OSError("down"))
    assert "1 request, 0 jobs in flight, tiers: tier0, tier1 (suspended)" in repr(here.manager)
    here.end()
    assert repr(here.manager) == "<TieringOffloadingManager: closed>"


def test_a_tier_says_where_it_is():
    alone = Alone()
    alone.submit(0)
    assert repr(alone.manager) == "<SecondaryTierManager t: ScriptedTier, 1 job in flight>"
    alone.end()


def test_a_primary_alone_says_how_full_it_is():
    manager = CPUPrimaryTierOffloadingManager(2)
    assert repr(manager) == "<CPUPrimaryTierOffloadingManager: 0 of 2 slots used>"
    manager.shutdown()
    assert repr(manager) == "<CPUPrimaryTierOffloadingManager: closed>"


def test_a_spec_says_what_it_comes_to():
    config = {"cpu_bytes_to_use": 8192, "block_bytes": 4096}
    spec = CPUOffloadingSpec(config)
    assert repr(spec) == "<CPUOffloadingSpec: 2 blocks of 4,096 bytes, no tiers>"
    tiers = [{"type": "example"}, {"type": "example"}]
    spec = TieringOffloadingSpec({**config, "secondary_tiers": tiers})
    assert repr(spec).endswith("tiers: example, example>")
