import pytest
from core.terms import HIT, MISS, RETRY, k, ks

from kvoffload_async.core.index import ExactIndex, ProbedIndex
from kvoffload_async.tables.keymap import KeyMap


def answers(index, names, req_id="r"):
    return [index.lookup(k(name), req_id) for name in names]


def test_an_exact_index_knows_and_never_asks():
    index = ExactIndex()
    index.appeared(ks("ab"))
    assert answers(index, "abc") == [HIT, HIT, MISS]
    assert index.next_probe() is None
    assert not index.is_waiting
    assert index.probes_outstanding == 0
    index.answered(1, frozenset())
    index.forget_request("r")
    assert len(index) == 2


def test_an_exact_index_drops_only_what_is_surely_gone():
    index = ExactIndex()
    index.appeared(ks("ab"))
    index.vanished(ks("a"), surely=False)
    index.vanished(ks("b"), surely=True)
    assert answers(index, "ab") == [HIT, MISS]


def test_an_exact_index_keeps_the_map_of_what_a_tier_found_beside_what_it_knows():
    index = ExactIndex()
    index.appeared(ks("a"))
    found = KeyMap()
    found.update(ks("bc"), [7, 8])
    index.appeared(found)
    index.vanished(ks("c"), surely=True)
    assert answers(index, "abcd") == [HIT, HIT, MISS, MISS]
    assert len(index) == 2


def test_new_keys_are_probed_in_one_batch_a_step():
    index = ProbedIndex(concurrent_probes=2)
    assert answers(index, "aba") == [RETRY] * 3
    assert index.is_waiting
    probe = index.next_probe()
    assert probe.keys == tuple(ks("ab"))
    assert index.next_probe() is None
    assert answers(index, "ab") == [RETRY] * 2
    index.answered(probe.generation, frozenset(ks("b")))
    assert answers(index, "ab") == [MISS, HIT]
    assert not index.is_waiting


def test_two_requests_share_a_probe_55823():
    """55823: each request started its own probe of the same keys."""
    index = ProbedIndex(2)
    answers(index, "a", "A")
    probe = index.next_probe()
    assert answers(index, "a", "B") == [RETRY]
    assert index.next_probe() is None
    index.forget_request("A")
    index.answered(probe.generation, frozenset(ks("a")))
    assert answers(index, "a", "B") == [HIT]


def test_a_late_answer_is_not_taken_for_a_newer_probe_54872():
    """54872: finish A, start B, deliver A's verdict: B took it for its own."""
    index = ProbedIndex(2)
    answers(index, "a", "A")
    old = index.next_probe()
    index.answered(old.generation, frozenset())
    index.forget_request("A")
    answers(index, "a", "B")
    new = index.next_probe()
    assert new.generation != old.generation
    index.answered(old.generation, frozenset(ks("a")))
    assert answers(index, "a", "B") == [RETRY]
    index.answered(new.generation, frozenset())
    assert answers(index, "a", "B") == [MISS]


def test_a_verdict_lives_as_long_as_a_request_that_asked():
    index = ProbedIndex(2)
    answers(index, "a", "A")
    answers(index, "a", "B")
    index.answered(index.next_probe().generation, frozenset(ks("a")))
    index.forget_request("A")
    assert len(index) == 1
    index.forget_request("B")
    assert len(index) == 0


def test_a_queued_probe_is_not_sent_for_a_request_that_has_ended():
    index = ProbedIndex(2)
    answers(index, "ab", "A")
    answers(index, "b", "B")
    index.forget_request("A")
    index.forget_request("never asked")
    assert index.next_probe().keys == (k("b"),)


def test_a_probe_whose_requests_all_ended_is_forgotten_when_it_is_answered():
    index = ProbedIndex(2)
    answers(index, "a")
    probe = index.next_probe()
    index.forget_request("r")
    assert index.is_waiting
    index.answered(probe.generation, frozenset(ks("a")))
    assert len(index) == 0
    assert not index.is_waiting


def test_a_hung_probe_delays_no_other_until_the_bound():
    index = ProbedIndex(concurrent_probes=2)
    answers(index, "a")
    assert index.next_probe() is not None
    answers(index, "b")
    second = index.next_probe()
    assert index.probes_outstanding == 2
    answers(index, "c")
    assert index.next_probe() is None
    index.answered(second.generation, frozenset())
    assert index.next_probe().keys == (k("c"),)


def test_what_is_over_the_bound_of_a_batch_waits_for_the_next_step():
    index = ProbedIndex(4, keys_per_probe=2)
    answers(index, "abc")
    assert index.next_probe().keys == tuple(ks("ab"))
    assert index.next_probe().keys == (k("c"),)


@pytest.mark.parametrize("surely", [True, False])
def test_a_failed_load_flips_the_verdict_49176(surely):
    """49176, 49328: a verdict that stayed true after a failed load was promoted for ever."""
    index = ProbedIndex(2)
    answers(index, "ab")
    index.answered(index.next_probe().generation, frozenset(ks("ab")))
    index.vanished(ks("ax"), surely=surely)
    assert answers(index, "ab") == [MISS, HIT]


def test_a_store_flips_a_known_verdict_but_not_a_probe_under_way():
    index = ProbedIndex(2)
    answers(index, "a")
    probe = index.next_probe()
    index.appeared(ks("a"))
    assert answers(index, "a") == [RETRY]
    index.answered(probe.generation, frozenset())
    index.appeared(ks("a"))
    assert answers(index, "a") == [HIT]


def test_a_lookup_that_stops_at_a_miss_asks_for_nothing_behind_it():
    exact, index = ExactIndex(), ProbedIndex(1)
    exact.appeared(ks("ac"))
    assert exact.lookup_many(ks("abc"), "r", stop_at_miss=True) == [HIT, MISS]
    assert exact.lookup_many(ks("abc"), "r") == [HIT, MISS, HIT]
    assert index.lookup_many(ks("ab"), "r", stop_at_miss=True) == [RETRY, RETRY]
    index.answered(index.next_probe().generation, frozenset(ks("a")))
    assert index.lookup_many(ks("abc"), "r", stop_at_miss=True) == [HIT, MISS]
    assert index.next_probe() is None
    assert index.lookup_many(ks("abc"), "r") == [HIT, MISS, RETRY]
    assert index.next_probe().keys == tuple(ks("c"))
