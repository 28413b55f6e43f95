"""Test support for authors of tiers and schedulers: shipped, typed, deterministic.

* `VirtualLoop`, `VirtualRunner`: an event loop with virtual time, and a `LoopRunner` over it.
* `InlineIo`, `ScriptedIo`, `ScriptedTier`: fakes; the scripted ones park every call until finished.
* `FaultyTier`: wraps any tier and injects faults from a seeded plan.
* `TierConformance`: tests of the whole tier contract; subclass it and define one fixture.
* `kvoffload_async.testing.strategies`: hypothesis strategies (needs hypothesis).
"""

from kvoffload_async.testing.conformance import TierConformance
from kvoffload_async.testing.fakes import (
    Fault,
    FaultPlan,
    FaultyTier,
    InlineIo,
    LeftoverTasksError,
    Operation,
    ParkedCall,
    ParkedOperation,
    ScriptedIo,
    ScriptedTier,
    VirtualLoop,
    VirtualRunner,
)
from kvoffload_async.testing.harness import TierHarness

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
