"""Actors that end in order."""

import pytest
from tiers.actors import World


@pytest.fixture
def worlds():
    made = []

    def make(*args, **kwargs):
        made.append(World(*args, **kwargs).open())
        return made[-1]

    yield make
    for world in made:
        while world.tier.parked:
            world.tier.finish_all()
            world.runner.run_ready()
        world.runner.close()
        world.tier._env = None
        assert world.buffer.release()
