"""Requests of the adapter stay in the generation in which they began."""

from connector.worlds import Desk, Request, only

from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.tiering import TieringOffloadingManager


def test_a_request_of_an_old_generation_is_offered_nothing_and_stores_nothing():
    with_tiers = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(16), [], generation=1)
    desk = Desk(manager=with_tiers)
    desk.store("ab", [1, 2, 3])
    old = Request("old", "abcd", extra=1)
    assert desk.ask(old) == (8, True)
    with_tiers.invalidate(2)
    assert desk.ask(old) == (0, False)
    assert not desk.prefill(old, [4, 5, 6, 7, 8]).store_jobs

    new = Request("new", "abcd", extra=1)
    assert desk.ask(new) == (0, False)
    job_id, _ = only(desk.prefill(new, [9, 10, 11, 12, 13]).store_jobs)
    desk.report(job_id)
    assert desk.ask(Request("later", "abcd", extra=1)) == (16, True)
    with_tiers.shutdown()
