"""The law of room (see `core/room.py`), explored in the planner itself.

Every state that a small primary can reach is visited. A wrong law, seeded, must be found.
"""

from dataclasses import replace

import pytest
from core.law.exploration import Explorer, LawBrokenError, check_progress
from core.law.host import Setting

from kvoffload_async.core.barred import BarredKeys
from kvoffload_async.core.room import Room
from kvoffload_async.core.tier_state import TURN_S

ONCE = {"again": False}
LONG_STEPS = {"step_s": 1.25}
"""Steps longer than a turn: what a turn ends, ends in one step, and there are fewer states."""

ONE_TIER = Setting(3, ("ab", "cd"), {0: "abcd"}, **LONG_STEPS)
ONE_STORE = Setting(3, ("ab",), {0: "ab"}, ("xy",), **LONG_STEPS, **ONCE)
MANY_STORES = replace(ONE_STORE, stores=tuple("xyz"), writes_back=False)
HOLDER = Setting(3, ("ab", "cd"), {0: "abcd"}, idle=frozenset({0}), **ONCE)
SHARED = Setting(3, ("ab", "ac"), {0: "abc"}, failures=1, **ONCE)
BETWEEN = Setting(
    3, ("ab",), {0: "ab"}, ("x", "y"), stores_first=True, writes_back=False, **LONG_STEPS, **ONCE
)
HUNG = Setting(
    3,
    ("ab", "c"),
    {0: "ac", 1: "b"},
    tiers=2,
    hung=frozenset({1}),
    writes_back=False,
    **LONG_STEPS,
    **ONCE,
)
GONE = replace(HUNG, runs=("ab", "cd"), below={0: "cd", 1: "ab"})
AHEAD = replace(ONE_TIER, ahead=frozenset({0, 1}), early=2)
BEHIND = replace(
    ONE_TIER,
    slots=4,
    runs=("ab", "cd", "e"),
    below={0: "abcde"},
    ahead=frozenset({2}),
    early=1,
    **ONCE,
)
DELETION = Setting(2, ("ab", "b"), {0: "ab"}, deletes=("b",), **LONG_STEPS, **ONCE)
HUNG_STORES = replace(ONE_STORE, tiers=2, hung=frozenset({1}), copies=2)

SETTINGS = {
    "requests that come again": ONE_TIER,
    "a store of two blocks": ONE_STORE,
    "a store of two blocks, of which one may be taken": replace(ONE_STORE, takes_prefix=True),
    "a holder that is not scheduled": HOLDER,
    "a shared block, and a failure": SHARED,
    "stores between look-ups and loads": replace(BETWEEN, idle=frozenset({0})),
    "a tier that hangs": HUNG,
    "slots that are gone": GONE,
    "two tiers": replace(GONE, hung=frozenset()),
    "resets and cancellations": replace(ONE_TIER, resets=1, cancels=frozenset({0}), **ONCE),
    "a deletion": DELETION,
    "a deletion after probes": replace(DELETION, kinds={0: "probed"}),
    "probes": replace(SHARED, kinds={0: "probed"}, failures=0),
    "unknown order": replace(ONE_TIER, runs=("abc", "ad"), has_positions=False, **ONCE),
    "prefetch": AHEAD,
    "prefetch beside a store": replace(AHEAD, stores=("x",), writes_back=False, **ONCE),
    "prefetch that fails": replace(AHEAD, failures=1, **ONCE),
    "prefetch from two tiers, one of which hangs": replace(
        HUNG, slots=4, ahead=frozenset({0, 1}), early=2
    ),
    "prefetch of a shared block, for a time": replace(
        SHARED, failures=0, ahead=frozenset({0, 1}), early=3, early_s=2 * TURN_S
    ),
    "prefetch after probes": replace(AHEAD, kinds={0: "probed"}, ahead=frozenset({0}), **ONCE),
    "prefetch, resets and cancellations": replace(AHEAD, resets=1, cancels=frozenset({0}), **ONCE),
    "a prompt longer than the primary": replace(ONE_TIER, runs=("abcd",), has_positions=False),
}
"""What every run explores: tens to some thousand states."""

SWEEP = {
    "two deletions": replace(ONE_TIER, deletes=("ac", "b"), **ONCE),
    "a deletion, and prefetch": replace(AHEAD, deletes=("b",), **ONCE),
    "a deletion and a store": replace(ONE_TIER, deletes=("x",), stores=("x",), **ONCE),
    "stores in all slots": MANY_STORES,
    "a tier that hangs with stores": HUNG_STORES,
    "three requests": Setting(2, ("a", "b", "c"), {0: "abc"}, **LONG_STEPS, **ONCE),
    "prefetch behind two requests": BEHIND,
    "two tiers for each": replace(GONE, below={0: "ac", 1: "bd"}),
    "more stores than slots": replace(MANY_STORES, stores=tuple("wxyz")),
    "short steps": replace(ONE_TIER, stores=("x",), step_s=0.75, **ONCE),
    "least recently used first": replace(ONE_TIER, stores=("x",), victims="oldest", **ONCE),
    "the last letter first": replace(ONE_TIER, stores=("x",), victims="last", **ONCE),
    "stores that drop": replace(ONE_TIER, stores=("x",), drops=True, **ONCE),
    "three requests of several blocks": Setting(
        4, ("ab", "ac", "de"), {0: "abcde"}, **LONG_STEPS, **ONCE
    ),
    "three requests that come again": Setting(2, ("a", "ab", "c"), {0: "abc"}, **LONG_STEPS),
    "a hot prompt": Setting(3, ("cd", "ab", "ab"), {0: "abcd"}, **LONG_STEPS),
    "three requests, two tiers, a store, a failure": Setting(
        3,
        ("ab", "a", "d"),
        {0: "a", 1: "bd"},
        ("x",),
        tiers=2,
        failures=1,
        writes_back=False,
        **LONG_STEPS,
        **ONCE,
    ),
    "three requests, a tier that hangs, stores": Setting(
        6,
        ("abc", "abd", "e"),
        {0: "acd", 1: "be"},
        ("x",),
        tiers=2,
        hung=frozenset({1}),
        writes_back=False,
        **LONG_STEPS,
        **ONCE,
    ),
    "a tier that hangs, short steps": replace(
        HUNG, runs=("abc", "de"), slots=4, writes_back=True, below={0: "acd", 1: "be"}, step_s=0.75
    ),
    "failures, resets, cancellations, stores": replace(
        ONE_TIER, stores=("x",), failures=1, resets=1, cancels=frozenset({0, 1}), **ONCE
    ),
    "probes that hang": replace(
        SHARED,
        kinds={1: "probed"},
        below={0: "a", 1: "bc"},
        tiers=2,
        hung=frozenset({1}),
        failures=0,
    ),
}

_SOME = 4_000
_MANY = 400_000


def explore(setting: Setting, most_states: int = _SOME) -> None:
    check_progress(Explorer(setting, most_states).explore())


@pytest.mark.parametrize("name", SETTINGS)
def test_nobody_waits_for_ever(name):
    explore(SETTINGS[name])


@pytest.mark.sweep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", SWEEP)
def test_nobody_waits_for_ever_in_larger_primaries(name):
    explore(SWEEP[name], _MANY)


# -- wrong laws, seeded --------------------------------------------------------------------------


def _grants_only_after_the_asks(monkeypatch):
    _never_grants_a_part(monkeypatch)
    monkeypatch.setattr(Room, "serve_first", lambda room: None)


def _never_grants_a_part(monkeypatch):
    monkeypatch.setattr(Room, "_is_starved", lambda room, head, now_s: False)


def _lets_stores_take_all(monkeypatch):
    monkeypatch.setattr(Room, "room_for_store", lambda room, count, share, **_: count)


def _gives_stores_nothing(monkeypatch):
    monkeypatch.setattr(Room, "room_for_store", lambda room, count, share, **_: 0)


def _ends_no_turn(monkeypatch):
    monkeypatch.setattr(Room, "_note_landed", lambda room, request: None)


def _tells_one_of_a_failure(monkeypatch):
    tell_all = Room.unwritten

    def tell_one(room, keys, tier=None, **options):
        for key in keys:
            del room._awaited.get(key, [])[1:]
        tell_all(room, keys, tier, **options)

    monkeypatch.setattr(Room, "unwritten", tell_one)


def _grants_in_parts(monkeypatch):
    monkeypatch.setattr(Room, "_is_starved", lambda room, head, now_s: True)


def _counts_on_what_is_gone(monkeypatch):
    _never_grants_a_part(monkeypatch)
    monkeypatch.setattr(Room, "budget_in", lambda room, share: share.most - room.reserved)


def _leaves_stores_nothing(monkeypatch):
    monkeypatch.setattr(Room, "budget_in", lambda room, share: share.most - share.held)


def _waits_for_silent_tiers(monkeypatch):
    monkeypatch.setattr(Room, "_give_up_silent", lambda room, now_s: None)


def _ends_turns_before_the_asks(monkeypatch):
    def serve_first(room):
        room._serve(room._stepped_at_s, counts=True)

    monkeypatch.setattr(Room, "serve_first", serve_first)


def _takes_no_notice_of_refused_stores(monkeypatch):
    monkeypatch.setattr(Room, "store_refused", lambda room: None)


def _evicts_hits_within_a_step(monkeypatch):
    monkeypatch.setattr(Room, "guard_hits", lambda room: None)


def _promotes_ahead_of_the_queue(monkeypatch):
    left = property(lambda room: room.most_early - sum(new for _, new in room.early.values()))
    monkeypatch.setattr(Room, "left_early", left)


def _keeps_early_tickets_from_stores(monkeypatch):
    monkeypatch.setattr(Room, "give_way", lambda room, count, share: None)


def _holds_a_failed_prefetch_against_requests(monkeypatch):
    fail = Room.fail

    def fail_for_all(room, tier, keys, *, orphaned, is_early):
        fail(room, tier, keys, orphaned=orphaned, is_early=False)

    monkeypatch.setattr(Room, "fail", fail_for_all)


def _keeps_tickets_for_deleted_blocks(monkeypatch):
    monkeypatch.setattr(Room, "cut", lambda room, holders, keys: None)


def _promotes_what_is_being_deleted(monkeypatch):
    monkeypatch.setattr(BarredKeys, "without", lambda barred, keys: list(keys))


WRONG = [
    (_keeps_tickets_for_deleted_blocks, DELETION, "a ticket names"),
    (_promotes_what_is_being_deleted, DELETION, "a ticket names"),
    (_promotes_ahead_of_the_queue, BEHIND, "although another waits"),
    (
        _keeps_early_tickets_from_stores,
        replace(AHEAD, stores=("wxy",), early=3, writes_back=False, **ONCE),
        "beside early tickets",
    ),
    (_holds_a_failed_prefetch_against_requests, replace(AHEAD, failures=1), "held against"),
    (_ends_no_turn, HOLDER, "waits for ever"),
    (_lets_stores_take_all, MANY_STORES, "takes what the queue's head needs"),
    (_grants_only_after_the_asks, ONE_TIER, "waits for ever"),
    (_tells_one_of_a_failure, SHARED, "P26"),
    (_gives_stores_nothing, replace(HOLDER, stores=("x",)), "less than what is left to stores"),
    (_never_grants_a_part, HUNG_STORES, "request 0 waits for ever"),
    (_grants_in_parts, HOLDER, "granted without"),
    (_counts_on_what_is_gone, GONE, "request 1 waits for ever"),
    (_leaves_stores_nothing, replace(ONE_TIER, runs=("abc",)), "P7"),
    (_waits_for_silent_tiers, HUNG, "request 1 waits for ever"),
    (_ends_turns_before_the_asks, ONE_TIER, "waits for ever"),
    (_takes_no_notice_of_refused_stores, ONE_STORE, "store 0 waits for ever"),
    (_evicts_hits_within_a_step, BETWEEN, "not readable"),
]


@pytest.mark.parametrize(
    ("seed", "setting", "found"), WRONG, ids=[seed.__name__[1:] for seed, *_ in WRONG]
)
def test_a_wrong_law_is_found(seed, setting, found, monkeypatch):
    seed(monkeypatch)
    with pytest.raises(LawBrokenError, match=found):
        explore(setting)
