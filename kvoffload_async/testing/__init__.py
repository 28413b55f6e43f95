"""Test support for authors of tiers: shipped, typed, deterministic.

* `TierConformance`: tests of the whole tier contract; subclass it and define one fixture.
* `TierHarness`: one open tier, with a primary of known bytes.
* `FaultyTier`: wraps any tier and injects faults from a seeded plan.
* `InlineIo`, `ScriptedIo`: run a blocking call at once, or when the test finishes it.
* `VirtualLoop`: an event loop with virtual time.
"""

from kvoffload_async.testing.conformance import TierConformance
from kvoffload_async.testing.fakes import (
    Fault,
    FaultPlan,
    FaultyTier,
    InlineIo,
    ParkedCall,
    ScriptedIo,
    VirtualLoop,
)
from kvoffload_async.testing.harness import TierHarness

__all__ = [
    "Fault",
    "FaultPlan",
    "FaultyTier",
    "InlineIo",
    "ParkedCall",
    "ScriptedIo",
    "TierConformance",
    "TierHarness",
    "VirtualLoop",
]
