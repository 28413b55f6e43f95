"""What the machine sees under one seed, told; as a script, in a process of its own."""

import json
import logging
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from async_engine.test_engine_machine import EngineMachine
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

SETTINGS = settings(
    max_examples=4,
    stateful_step_count=40,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
)


def history():
    """Play; return what was to be seen after every step."""
    seen = []

    class Observed(EngineMachine):
        @invariant()
        def the_step_is_seen(self):
            world, core = self.world, self.world.core
            seen.append(
                [
                    repr([(copy.direction, copy.parts) for copy in world.parked]),
                    repr([(p.kind, p.keys, p.job) for tier in world.tiers for p in tier.parked]),
                    repr([(s.task.done(), s.task.cancelled()) for s in self.serving]),
                    repr([(t.health.loads.state, t.health.stores.state) for t in core.tiers]),
                    repr(core.counters),
                    self.runner.get_loop().time(),
                ]
            )

    run_state_machine_as_test(seed(1)(Observed), settings=SETTINGS)
    return seen


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    json.dump(history(), sys.stdout)
