"""What the author of a tier, or of a scheduler, tests against: shipped, typed, deterministic.

* `VirtualLoop`, `VirtualRunner`: an event loop whose time is virtual, and the owner's view of it.
* `InlineIo`, `ScriptedIo`, `ScriptedTier`: every call parks until the test says how it ends.
* `FaultyTier`: any tier, with faults from a seeded plan.
* `TierConformance`: the whole contract of a tier; subclass it with one fixture.
* `kvoffload_async.testing.strategies`: hypothesis strategies (needs hypothesis; imported by name).
"""

from kvoffload_async.testing.conformance import TierConformance
from kvoffload_async.testing.faults import Fault, FaultPlan, FaultyTier
from kvoffload_async.testing.harness import TierHarness
from kvoffload_async.testing.scripted import (
    InlineIo,
    Operation,
    ParkedCall,
    ParkedOperation,
    ScriptedIo,
    ScriptedTier,
)
from kvoffload_async.testing.virtual_time import LeftoverTasksError, VirtualLoop, VirtualRunner

__all__ = [
    "Fault",
    "FaultPlan",
    "FaultyTier",
    "InlineIo",
    "LeftoverTasksError",
    "Operation",
    "ParkedCall",
    "ParkedOperation",
    "ScriptedIo",
    "ScriptedTier",
    "TierConformance",
    "TierHarness",
    "VirtualLoop",
    "VirtualRunner",
]
