"""Recency, admission, event log and the requests' state."""

import pytest
from core.terms import k, ks
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.core.admission import AdmissionFilter
from kvoffload_async.core.eventlog import KEYS_PER_EVENT, Change, EventLog
from kvoffload_async.core.primary import RecencyLog
from kvoffload_async.core.requests import RequestState
from kvoffload_async.errors import StateError
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.tiers.files.ranking import KeyRanking
from kvoffload_async.types import Locality, Medium, ReqContext


def request(req_id="r"):
    return RequestState(ReqContext(req_id), ())


# -- recency ------------------------------------------------------------------------------------


def ranks_by(policy):
    return lambda _ctx, accesses: policy.access(dict(accesses), dict(accesses).__getitem__)


def test_the_head_of_a_prompt_ends_most_recent_and_unplaced_keys_rank_behind():
    policy = KeyRanking(LruPolicy(4))
    policy.admit(ks("abcd"))
    log = RecencyLog(ranks_by(policy))
    ctx = ReqContext("r", key_positions={k("a"): 1, k("b"): 2})
    log.open(ctx)
    log.note(ctx, ks("dcb"), reused=True)
    log.note(ctx, ks("a"), reused=True)
    log.commit(ctx)
    assert list(policy.resident()) == ks("cdba")
    assert not log.knows(ctx)


def test_the_first_use_decides_how_a_key_counts():
    arc = ArcPolicy(4)
    policy = KeyRanking(arc)
    policy.admit(ks("ab"))
    log = RecencyLog(ranks_by(policy))
    ctx = ReqContext("r")
    log.open(ctx)
    log.note(ctx, ks("a"), reused=False)
    log.note(ctx, ks("ab"), reused=True)
    log.commit(ctx)
    assert [list(part) for part in arc.lists()[:2]] == [ks("a"), ks("b")]


def test_a_request_is_live_from_its_opening_to_its_one_end():
    log = RecencyLog(ranks_by(KeyRanking(LruPolicy(1))))
    ctx = ReqContext("r")
    with pytest.raises(StateError, match="unknown"):
        log.note(ctx, ks("a"), reused=True)
    log.open(ctx)
    assert log.knows(ctx)
    with pytest.raises(StateError, match="known already"):
        log.open(ctx)
    log.commit(ctx)
    with pytest.raises(StateError, match="finished already"):
        log.commit(ctx)


# -- admission ----------------------------------------------------------------------------------


def test_offers_are_counted_and_the_oldest_forgotten():
    admission = AdmissionFilter(2, tracked_keys=2)
    assert admission.admitted(ks("ab")) == []
    admission.offered(ks("ab"))
    assert admission.admitted(ks("ab")) == ks("ab")
    admission.offered(ks("c"))
    assert admission.admitted(ks("abc")) == ks("abc")
    admission.offered(ks("cd"))
    assert admission.admitted(ks("abcd")) == ks("abcd")
    admission.offered(ks("efg"))
    assert admission.admitted(ks("abcdefg")) == ks("cdfg"), "no more than twice as many are known"
    admission.clear()
    assert admission.admitted(ks("cdfg")) == []


def test_offers_of_keys_that_are_known_make_no_others_forgotten():
    admission = AdmissionFilter(2, tracked_keys=10)
    for names in "abcdefghij", "klmnopqr", "klmnopqr":
        admission.offered(ks(names))
    assert admission.admitted(ks("ijklmnopqr")) == ks("ijklmnopqr")


def test_the_latest_offers_are_known_and_twice_as_many_at_most():
    admission = AdmissionFilter(3, tracked_keys=10)
    for number in range(100):
        admission.offered(ks([number]))
        admission.offered(ks([number]))
        known = admission.admitted(ks(range(100)))
        assert known[-10:] == ks(range(max(0, number - 9), number + 1))
        assert len(known) <= 20


# -- event log ----------------------------------------------------------------------------------


def log_of(**options):
    return EventLog(Medium.STORAGE, Locality.REMOTE, **{"enabled": True, **options})


def taken(log, allocated=""):
    return [
        (list(event.keys), event.removed, event.metadata_only)
        for event in log.take(ks(allocated).__contains__)
    ]


def test_events_come_out_once_and_oldest_first_44206():
    log = log_of()
    log.add(ks("ab"), Change.STORED)
    log.add([], Change.STORED)
    log.add(ks("a"), Change.REMOVED)
    assert taken(log) == [(ks("ab"), False, False), (ks("a"), True, False)]
    assert taken(log) == []


def test_an_iterator_consumed_in_part_cannot_replay():
    log = log_of()
    log.add(ks("a"), Change.STORED)
    log.add(ks("b"), Change.STORED)
    next(log.take(lambda _: False))
    assert taken(log) == []


def test_events_say_where_they_come_from():
    log = log_of()
    log.add(ks("a"), Change.STORED)
    (event,) = log.take(lambda _: False)
    assert (event.medium, event.locality) == (Medium.STORAGE, Locality.REMOTE)


def test_a_metadata_only_removal_loses_the_keys_allocated_anew():
    log = log_of()
    log.add(ks("ab"), Change.RELEASED)
    log.add(ks("b"), Change.RELEASED)
    assert taken(log, allocated="b") == [(ks("a"), True, True)]


def test_events_have_the_ownership_of_the_time_when_they_are_taken():
    log = log_of(ownership="fs")
    log.add(ks("a"), Change.STORED)
    log.ownership = "fs-2"
    (event,) = log.take(lambda _: False)
    assert event.ownership == "fs-2"


@pytest.mark.parametrize("announces", [False, True])
def test_stored_events_alone_say_that_a_removal_will_follow(announces):
    log = log_of(announces_removals=announces)
    log.add(ks("a"), Change.STORED)
    log.add(ks("a"), Change.REMOVED)
    assert [e.removal_expected for e in log.take(lambda _: False)] == [announces, False]


def test_a_log_that_remembers_announces_a_block_once_until_its_removal_and_that_once():
    log = log_of(remembers=True)
    log.add(ks("ab"), Change.STORED)
    log.add(ks("bc"), Change.STORED)
    log.add(ks("ad"), Change.REMOVED)
    log.add(ks("a"), Change.REMOVED)
    log.add(ks("a"), Change.STORED)
    assert taken(log) == [
        (ks("ab"), False, False),
        (ks("c"), False, False),
        (ks("a"), True, False),
        (ks("a"), False, False),
    ]


def test_a_log_that_announces_anew_still_knows_what_can_be_removed():
    log = log_of(remembers=True)
    log.add(ks("ab"), Change.STORED)
    log.announce_anew()
    log.add(ks("a"), Change.STORED)
    log.add(ks("a"), Change.STORED)
    log.add(ks("ab"), Change.REMOVED)
    assert taken(log) == [
        (ks("ab"), False, False),
        (ks("a"), False, False),
        (ks("ab"), True, False),
    ]


def test_the_oldest_events_are_dropped_when_nobody_reads():
    """The bound counts keys: an event may have one or thousands."""
    log = log_of(bound=4)
    for names in "ab", "c", "de", "f":
        log.add(ks(names), Change.STORED)
    assert log.dropped == 1
    assert [keys for keys, _, _ in taken(log)] == [ks("c"), ks("de"), ks("f")]
    log.add(ks("abcd"), Change.REMOVED)
    assert log.dropped == 1, "what was taken does not count any more"


def test_the_latest_event_is_kept_however_large_it_is():
    log = log_of(bound=2)
    log.add(ks("a"), Change.STORED)
    log.add(ks("bcd"), Change.STORED)
    assert log.dropped == 1
    assert [keys for keys, _, _ in taken(log)] == [ks("bcd")]


def test_events_are_numbered_and_a_dropped_one_leaves_a_gap():
    log = log_of(bound=2)
    numbers = []
    for names in "a", "bcd", "ef", "g":
        log.add(ks(names), Change.STORED)
        if names != "bcd":
            numbers += [event.sequence for event in log.take(lambda _: False)]
    assert numbers == [1, 3, 4]
    log.add(ks("a"), Change.RELEASED)
    log.add(ks("b"), Change.RELEASED)
    (event,) = log.take(lambda key: key == k("a"))
    assert event.sequence == 5, "what is left out on purpose leaves no gap"


@given(
    data=st.data(),
    bound=st.integers(1, 12),
    remembers=st.booleans(),
)
def test_what_is_read_late_and_in_parts_from_a_log_of_every_block_is_the_contents(
    data, bound, remembers
):
    """The reader describes a block of the primary from its write until a batch removes it."""
    log = log_of(bound=bound, remembers=remembers, announces_removals=True)
    contents, read, described = set(), set(), set()

    def take(max_keys):
        removed = set()
        for event in log.take(contents.__contains__, max_keys):
            keys = set(event.keys)
            if event.removed:
                removed |= keys
            assert remembers or event.metadata_only or keys <= described
            if event.metadata_only:
                assert read.isdisjoint(keys)
            elif event.removed:
                assert read >= keys
                read.difference_update(keys)
            else:
                assert read.isdisjoint(keys)
                read.update(keys)
        described.difference_update(removed - read)

    for keys in data.draw(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), max_size=30)):
        removed = [key for key in ks(sorted(keys)) if key in contents]
        stored = [key for key in ks(sorted(keys)) if key not in contents]
        described.update(stored)
        if data.draw(st.booleans(), "fails") and not remembers:
            log.add(stored, Change.RELEASED)
            stored = []
        contents.difference_update(removed)
        log.add(removed, Change.REMOVED)
        contents.update(stored)
        log.add(stored, Change.STORED)
        assert sum(len(entry.keys) for entry in log.entries) <= max(bound, 4 * 6)
        if data.draw(st.booleans(), "reads"):
            take(data.draw(st.integers(1, 8), "max_keys"))
    take(None)
    assert read == contents
    assert not log.is_behind
    assert not log.dropped


S, R, X = Change


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([S], [(False, False)]),
        ([S, S], [(False, False)]),
        ([R, S], []),
        ([S, R], [(True, True)]),
        ([S, R, S], [(False, False)]),
        ([R, X], [(True, False)]),
        ([R, X, S], []),
        ([X, S], [(False, False)]),
        ([X, S, R], [(True, True)]),
    ],
)
def test_unread_changes_of_a_block_are_replaced_by_one(changes, left):
    log = log_of(announces_removals=True, bound=1)
    for change in changes:
        log.add(ks("a"), change)
    for _ in range(len(changes) + 1):
        log.add(ks("b"), Change.STORED)
    events = [event for event in taken(log) if k("a") in event[0]]
    assert [(event[1], event[2]) for event in events] == left


class CountedKey(bytes):
    """A key that counts the operations of tables with it and its equals."""

    operations = 0

    def __hash__(self):
        type(self).operations += 1
        return super().__hash__()


@pytest.mark.parametrize("remembers", [False, True])
def test_a_change_costs_the_same_however_many_wait_to_be_read(remembers):
    log = log_of(bound=1000, announces_removals=True, remembers=remembers)
    worst = 0
    for first in range(0, 6000, 10):
        CountedKey.operations = 0
        log.add([CountedKey(key) for key in ks(range(first, first + 10))], Change.STORED)
        log.add([CountedKey(key) for key in ks(range(first, first + 10))], Change.REMOVED)
        worst = max(worst, CountedKey.operations)
    assert worst <= 20 * 8


@pytest.mark.parametrize("remembers", [False, True])
def test_blocks_that_came_and_went_unread_take_no_memory_for_ever(remembers):
    log = log_of(bound=100, announces_removals=True, remembers=remembers)
    log.add(ks(range(50)), Change.STORED)
    for first in range(50, 20_000, 10):
        log.add(ks(range(first, first + 10)), Change.STORED)
        log.add(ks(range(first, first + 10)), Change.REMOVED)
    read = set()
    num_keys = 0
    for event in log.take(lambda _: False):
        num_keys += len(event.keys)
        if event.removed:
            read.difference_update(event.keys)
        else:
            read.update(event.keys)
    assert read == set(ks(range(50)))
    assert num_keys <= 100 + 100 + 10 + 60, "unread, released, of one batch, and the contents"
    assert not log.dropped


def test_a_released_block_that_comes_and_goes_leaves_room_for_others():
    log = log_of(bound=2, announces_removals=True)
    for _ in range(10):
        for change in (Change.STORED, Change.REMOVED):
            log.add(ks("a"), change)
    log.add(ks("bcde"), Change.RELEASED)
    log.add(ks("fg"), Change.STORED)
    assert log._num_released <= 2
    taken(log)
    assert log._num_released == 0
    assert log._merged is None


def test_a_reader_in_parts_gets_merged_changes_before_later_ones():
    log = log_of(bound=2, announces_removals=True)
    log.add(ks("abcd"), Change.STORED)
    log.add(ks("ab"), Change.REMOVED)
    log.add(ks("ef"), Change.STORED)
    assert not list(log.take(lambda _: False, 0))
    assert all(map(log.will_announce, ks("cdef")))
    read = []
    while not read or log.is_behind:
        read += list(log.take(lambda _: False, 1))
        assert len(read) < 10
    left = set()
    for event in read:
        left = left - set(event.keys) if event.removed else left | set(event.keys)
    assert not any(map(log.will_announce, ks("cdef")))
    assert left == set(ks("cdef"))
    assert [event.sequence for event in read] == [*range(1, len(read) + 1)]


def test_events_have_a_limited_size_and_a_reader_may_take_a_part():
    log = log_of(announces_removals=True)
    keys = ks(range(2 * KEYS_PER_EVENT + 1))
    log.add(keys, Change.STORED)
    first = list(log.take(lambda _: False, KEYS_PER_EVENT + 1))
    assert log.is_behind
    rest = list(log.take(lambda _: False))
    assert not log.is_behind
    assert [len(event.keys) for event in (*first, *rest)] == [KEYS_PER_EVENT, KEYS_PER_EVENT, 1]
    assert [key for event in (*first, *rest) for key in event.keys] == keys


def test_more_blocks_than_the_bound_are_all_announced():
    log = log_of(bound=2, announces_removals=True)
    log.add(ks("abcde"), Change.STORED)
    log.add(ks("f"), Change.STORED)
    assert taken(log) == [(ks("abcde"), False, False), (ks("f"), False, False)]
    assert not log.dropped


def test_contents_begin_again_and_the_next_event_leaves_no_gap():
    log = log_of()
    log.add(ks("a"), Change.STORED)
    list(log.take(lambda _: False))
    (whole,) = log.contents(ks("ab"))
    assert (list(whole.keys), whole.removed) == (ks("ab"), False)
    assert (whole.restarts, whole.sequence) == (True, 1)
    (empty,) = log.contents([])
    assert (empty.keys, empty.restarts) == ((), True)
    log.add(ks("b"), Change.REMOVED)
    (event,) = log.take(lambda _: False)
    assert (event.restarts, event.sequence) == (False, 2)
    first, second = log.contents(ks(range(KEYS_PER_EVENT + 1)))
    assert (first.restarts, second.restarts) == (True, False)


def test_after_lost_state_a_load_confirms_only_blocks_that_are_still_announced():
    log = log_of(remembers=True)
    log.add(ks("ab"), Change.STORED)
    log.confirm(ks("ab"))
    log.announce_anew()
    log.add(ks("b"), Change.REMOVED)
    log.confirm(ks("abc"))
    log.confirm(ks("a"))
    assert taken(log) == [
        (ks("ab"), False, False),
        (ks("b"), True, False),
        (ks("a"), False, False),
    ]


def test_a_store_that_engines_share_has_one_name_in_events():
    log = log_of(ownership="fs-2")
    log.shared_store = "fs@0123"
    log.add(ks("a"), Change.STORED)
    (event,) = log.take(lambda _: False)
    assert event.ownership == "fs@0123"


def test_a_log_that_remembers_leaves_repetitions_out():
    log = log_of(remembers=True)
    log.add(ks("aba"), Change.STORED)
    log.add(ks("aab"), Change.REMOVED)
    assert taken(log) == [(ks("ab"), False, False), (ks("ab"), True, False)]


def test_a_disabled_log_collects_nothing():
    log = log_of(enabled=False)
    log.add(ks("a"), Change.STORED)
    assert taken(log) == []


# -- requests -----------------------------------------------------------------------------------


def test_deferral_adds_up_over_rounds_49829_53087():
    """49829, 53087: every failed round began a new deadline, so that none ever passed."""
    waiting = request()
    assert not waiting.defer(10.0, 3.0, counts=True)
    assert not waiting.defer(12.0, 3.0, counts=True)
    waiting.proceed()
    assert not waiting.defer(50.0, 3.0, counts=True)
    assert waiting.defer(51.0, 3.0, counts=True)
    assert waiting.is_expired
    assert not waiting.defer(60.0, 3.0, counts=True)


def test_time_behind_others_in_the_queue_is_no_deferral():
    waiting = request()
    assert not waiting.defer(10.0, 3.0, counts=True)
    assert not waiting.defer(12.0, 3.0, counts=False)
    assert not waiting.defer(90.0, 3.0, counts=True)
    assert waiting.defer(91.0, 3.0, counts=True)


def test_a_clock_that_goes_back_defers_nobody():
    waiting = request()
    waiting.defer(10.0, 1.0, counts=True)
    assert not waiting.defer(5.0, 1.0, counts=True)
    assert not waiting.defer(5.5, 1.0, counts=True)
