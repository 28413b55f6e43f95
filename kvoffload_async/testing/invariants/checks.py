"""The invariants P1 to P26 that no single state can show, and their checks.

Some hold when everything has come to rest, some only of a whole history; those that hold of any
state are `core.invariants`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvoffload_async.core.invariants import STATE_INVARIANTS, Invariant, check_state
from kvoffload_async.core.planner import Planner
from kvoffload_async.testing.invariants import of_history, of_rest
from kvoffload_async.testing.invariants.history import History
from kvoffload_async.testing.invariants.of_rest import Rest
from kvoffload_async.types import OffloadKey

_STATEMENTS = {invariant.name: invariant.statement for invariant in STATE_INVARIANTS}

REST_INVARIANTS: tuple[Invariant[Rest], ...] = (
    Invariant("P1", _STATEMENTS["P1"], of_rest.no_job_is_left),
    Invariant("P2", "at rest nothing is pinned, written or held", of_rest.nothing_is_in_use),
    Invariant(
        "P9",
        "what was stored is in every tier, or owed to it and resident, or counted as lost",
        of_rest.nothing_is_lost,
    ),
    Invariant("P10", _STATEMENTS["P10"], of_rest.no_request_waits),
    Invariant("P23", _STATEMENTS["P23"], of_rest.nothing_is_owed),
)

HISTORY_INVARIANTS: tuple[Invariant[History], ...] = (
    Invariant("P1", _STATEMENTS["P1"], of_history.one_result_a_job),
    Invariant(
        "P5",
        "neither a block in use nor one just offered is evicted",
        of_history.only_idle_blocks_are_evicted,
    ),
    Invariant("P6", "a refusal changes nothing", of_history.refusals_change_nothing),
    Invariant(
        "P8",
        "a hit reads the bytes that were stored under its key",
        of_history.reads_see_what_was_written,
    ),
    Invariant("P10", _STATEMENTS["P10"], of_history.requests_are_framed),
    Invariant(
        "P11",
        "a step submits one promotion a tier and request, and polls and touches a tier once",
        of_history.steps_are_batched,
    ),
    Invariant("P12", "events, replayed, give what is resident", of_history.events_tell_all),
    Invariant(
        "P14",
        "every deferred request is decided within a bounded number of steps",
        of_history.deferrals_end,
    ),
    Invariant(
        "P15",
        "a completion from before a reset changes nothing",
        of_history.stale_completions_change_nothing,
    ),
    Invariant(
        "P17", "no call of the facade exceeds its budget", of_history.calls_keep_their_budget
    ),
    Invariant(
        "P18",
        "no device block is overwritten while an unfinished store reads it",
        of_history.device_reads_are_fenced,
    ),
    Invariant(
        "P19",
        "a published file has its full length, and anything else is temporary",
        of_history.files_are_whole,
    ),
    Invariant(
        "P20",
        "completion order and thread count do not change the outcome",
        of_history.outcomes_agree,
    ),
)


def check_quiescent(
    planner: Planner,
    *,
    kept: Collection[OffloadKey] = (),
    tier_contents: Sequence[Collection[OffloadKey]] = (),
    counted: Sequence[Collection[OffloadKey]] | None = None,
) -> None:
    """Check a planner at rest: all jobs, copies, loads, stores and requests have ended.

    Args:
        planner: The planner.
        kept: Keys that were stored, and that no tier has lost since.
        tier_contents: What each tier has; needed for `kept`.
        counted: See `Rest`.

    Raises:
        InvariantError: One does not hold; the message names it.
    """
    check_state(planner)
    rest = Rest(planner, kept, tier_contents, counted)
    for invariant in REST_INVARIANTS:
        invariant.enforce(rest)


def check_history(history: History) -> None:
    """Check a history, finished or not.

    Raises:
        InvariantError: One does not hold; the message names it.
    """
    for invariant in HISTORY_INVARIANTS:
        invariant.enforce(history)
