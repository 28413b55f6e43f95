"""A tier that probes prefixes is asked for chains, through a tier with faults too."""

import pytest
from facade.worlds import HIT, MISS, RETRY, k, ks
from scripted_tier import ScriptedTier

from kvoffload_async.abc.tier import TierBounds, TierCapabilities
from kvoffload_async.testing import FaultyTier


class RecordingTier(ScriptedTier):
    """Has the first key of every chain, and knows what it was asked for."""

    def __init__(self):
        super().__init__(TierCapabilities(exclusive=False, probes_prefixes=True), TierBounds())
        self.asked = []

    async def longest_prefixes(self, chains):
        self.asked.append(chains)
        return [1] * len(chains)


class Faulty(FaultyTier):
    """With what a world looks at."""

    @property
    def parked(self):
        return self.inner.parked

    def finish_all(self):
        self.inner.finish_all()


@pytest.mark.parametrize("wrap", [lambda tier: tier, Faulty])
def test_a_tier_is_asked_for_the_chain_of_a_request(worlds, wrap):
    tier = RecordingTier()
    world = worlds(wrap(tier))
    world.begin("r", key_positions={k(number): 16 * number for number in range(1, 9)})
    assert {world.lookup(number) for number in (5, 6)} == {RETRY}
    world.step()
    world.manager.on_schedule_end()  # takes the answers in
    answers = [world.secondaries[0].lookup(k(number), world.contexts["r"]) for number in (5, 6)]
    assert answers == [HIT, MISS]
    assert tier.asked == [(tuple(ks(5, 6)),)]
