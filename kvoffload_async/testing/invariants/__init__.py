"""What tests check of an engine beyond `core.invariants`: at rest, and over a whole history.

Nothing that runs in production: what `check_invariants` checks every step is in `core`.
"""

from kvoffload_async.testing.invariants.checks import (
    HISTORY_INVARIANTS,
    REST_INVARIANTS,
    check_history,
    check_quiescent,
)
from kvoffload_async.testing.invariants.history import History
from kvoffload_async.testing.invariants.of_rest import Rest

__all__ = [
    "HISTORY_INVARIANTS",
    "REST_INVARIANTS",
    "History",
    "Rest",
    "check_history",
    "check_quiescent",
]
