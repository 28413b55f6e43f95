"""The laws of the planner, P1 to P20, and the three ways of checking them.

Some hold at any moment between two calls, some when everything has come to rest, some only of a
whole story. The same laws run in the tests and, step by step, in a production's debug mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvoffload_async.core import restlaws, statelaws, storylaws
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.restlaws import Rest
from kvoffload_async.core.story import Story
from kvoffload_async.errors import InvariantError
from kvoffload_async.types import OffloadKey

S = TypeVar("S")
Check = Callable[[S], Iterable[str]]
"""Returns the violations, in words; none if the law holds."""


def _silent(_subject: object) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Law:
    """An invariant, and up to three checks of it.

    Attributes:
        name: P1 to P20.
        statement: What always holds.
        of_state: Checks an planner between any two calls.
        of_rest: Checks an planner that has come to rest.
        of_story: Checks a story, finished or not.
    """

    name: str
    statement: str
    of_state: Check[Planner] = _silent
    of_rest: Check[Rest] = _silent
    of_story: Check[Story] = _silent

    def enforce(self, violations: Iterable[str]) -> None:
        """Raise InvariantError if there are any violations."""
        found = list(violations)
        if found:
            raise InvariantError(f"{self.name} ({self.statement}): {'; '.join(found)}")


LAWS = (
    Law(
        "P1",
        "every accepted job gets exactly one result",
        of_state=statelaws.jobs_are_counted,
        of_rest=restlaws.no_job_is_left,
        of_story=storylaws.one_result_a_job,
    ),
    Law("P2", "at rest nothing is pinned, written or held", of_rest=restlaws.nothing_is_in_use),
    Law(
        "P3",
        "free, writing, idle, pinned and held partition the slots",
        of_state=statelaws.slots_are_partitioned,
    ),
    Law(
        "P4",
        "no slot is free while a job may touch it, and every pin and write has its reason",
        of_state=statelaws.every_use_has_its_reason,
    ),
    Law(
        "P5",
        "neither a block in use nor one just offered is evicted",
        of_story=storylaws.only_idle_blocks_are_evicted,
    ),
    Law("P6", "a refusal changes nothing", of_story=storylaws.refusals_change_nothing),
    Law(
        "P7",
        "at most one promotion a key is under way, and no more slots than the cap",
        of_state=statelaws.promotions_are_single_and_capped,
    ),
    Law(
        "P8",
        "a hit reads the bytes that were stored under its key",
        of_story=storylaws.reads_see_what_was_written,
    ),
    Law(
        "P9",
        "what was stored without failure, drop or eviction is in the primary or in every tier",
        of_rest=restlaws.nothing_is_lost,
    ),
    Law(
        "P10",
        "each tier hears once of a request's begin and end, and of no job outside of them",
        of_state=statelaws.finished_requests_wait_for_something,
        of_rest=restlaws.no_request_waits,
        of_story=storylaws.requests_are_framed,
    ),
    Law(
        "P11",
        "a step submits one promotion a tier and request, and polls a tier's gate once",
        of_story=storylaws.steps_are_batched,
    ),
    Law("P12", "events, replayed, give what is resident", of_story=storylaws.events_tell_all),
    Law(
        "P13",
        "the policy ranks exactly the resident keys, and its own invariants hold",
        of_state=statelaws.policy_ranks_what_is_resident,
    ),
    Law(
        "P14",
        "every deferred request is decided within a bounded number of steps",
        of_story=storylaws.deferrals_end,
    ),
    Law(
        "P15",
        "a completion from before a reset changes nothing",
        of_story=storylaws.stale_completions_change_nothing,
    ),
    Law(
        "P16",
        "work is pending if and only if a job is registered or a key is parked",
        of_state=statelaws.pending_work_is_known,
    ),
    Law(
        "P17",
        "no call of the facade exceeds its budget",
        of_story=storylaws.calls_keep_their_budget,
    ),
    Law(
        "P18",
        "no device block is overwritten while an unfinished store reads it",
        of_story=storylaws.device_reads_are_fenced,
    ),
    Law(
        "P19",
        "a published file has its full length, and anything else is temporary",
        of_story=storylaws.files_are_whole,
    ),
    Law(
        "P20",
        "completion order and thread count do not change the outcome",
        of_story=storylaws.outcomes_agree,
    ),
)


def check_state(planner: Planner) -> None:
    """Check what holds between any two calls; cost grows with the slots of the primary.

    Raises:
        InvariantError: A law does not hold; the message names it.
    """
    for law in LAWS:
        law.enforce(law.of_state(planner))


def check_quiescent(
    planner: Planner,
    *,
    kept: Collection[OffloadKey] = (),
    tier_contents: Sequence[Collection[OffloadKey]] = (),
) -> None:
    """Check an planner at rest: all jobs, copies, loads, stores and requests have ended.

    Args:
        planner: The planner.
        kept: Keys that were stored, and met no failure, no drop and no eviction since.
        tier_contents: What each tier has; needed for `kept`.

    Raises:
        InvariantError: A law does not hold; the message names it.
    """
    check_state(planner)
    rest = Rest(planner, kept, tier_contents)
    for law in LAWS:
        law.enforce(law.of_rest(rest))


def check_story(story: Story) -> None:
    """Check a story, finished or not.

    Raises:
        InvariantError: A law does not hold; the message names it.
    """
    for law in LAWS:
        law.enforce(law.of_story(story))
