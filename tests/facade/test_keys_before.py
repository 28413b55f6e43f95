"""A tier that probes prefixes learns what comes before them, if it wants to."""

import pytest
from facade.worlds import HIT, MISS, RETRY, k, ks

from kvoffload_async.abc.tier import TierBounds, TierCapabilities
from kvoffload_async.testing import FaultyTier, ScriptedTier


class RecordingTier(ScriptedTier):
    """Has the first key of every chain, and knows what it was told."""

    def __init__(self, keys_before):
        capabilities = TierCapabilities(
            exclusive=False, probes_prefixes=True, keys_before=keys_before
        )
        super().__init__(capabilities, TierBounds())
        self.asked = []

    async def longest_prefixes(self, chains, before=()):
        self.asked.append((chains, before))
        return [1] * len(chains)


class TierOfTheOldSignature(RecordingTier):
    async def longest_prefixes(self, chains):
        return await super().longest_prefixes(chains)


class Faulty(FaultyTier):
    """With what a world looks at."""

    @property
    def parked(self):
        return self.inner.parked

    def finish_all(self):
        self.inner.finish_all()


def answers(world, *numbers):
    positions = {k(number): 16 * number for number in range(1, 9)}
    world.begin("r", key_positions=positions)
    assert {world.lookup(number) for number in numbers} == {RETRY}
    world.step()
    world.manager.on_schedule_end()  # takes the answers in
    return [world.secondaries[0].lookup(k(number), world.contexts["r"]) for number in numbers]


def test_a_tier_is_told_the_keys_before_what_it_is_asked_for(worlds):
    tier = RecordingTier(3)
    assert answers(worlds(tier), 5, 6) == [HIT, MISS]
    assert tier.asked == [((tuple(ks(5, 6)),), (tuple(ks(2, 3, 4)),))]


@pytest.mark.parametrize("kind", [RecordingTier, TierOfTheOldSignature])
def test_a_tier_that_wants_none_may_have_a_method_that_takes_none(worlds, kind):
    tier = kind(0)
    assert answers(worlds(tier), 5, 6) == [HIT, MISS]
    assert tier.asked == [((tuple(ks(5, 6)),), ())]


@pytest.mark.parametrize(("keys_before", "before"), [(0, ()), (1, (tuple(ks(4)),))])
def test_a_tier_with_faults_is_told_what_the_tier_that_it_wraps_would_be(
    worlds, keys_before, before
):
    kind = RecordingTier if keys_before else TierOfTheOldSignature
    tier = Faulty(kind(keys_before))
    assert answers(worlds(tier), 5, 6) == [HIT, MISS]
    assert tier.inner.asked == [((tuple(ks(5, 6)),), before)]
