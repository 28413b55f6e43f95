"""Stores of which a head fits: what is accepted, offered again, and lost; and who goes on alone."""

from connector.worlds import Desk, Request, Scripted, blocks_of, key, keys, only
from core.terms import state_of
from facade.worlds import EXCLUSIVE
from facade.worlds import World as TieredWorld

from kvoffload_async.facade.connector.protocol import KVGroup
from kvoffload_async.types import PrepareStoreOutput

FULL, WIDE = KVGroup(4), KVGroup(8)
LONG = "abcdefgh"


def resident(desk):
    return {k for k, _, refs in desk.primary.resident() if refs >= 0}


def test_the_adapter_advances_past_what_was_accepted_and_offers_the_tail_again():
    """It moved on past all of it, and the tail was never stored."""
    desk = Desk(num_slots=8)
    busy = desk.prefill(Request("busy", "stuvw"), [11, 12, 13, 14, 15, 16])
    request = Request("r", LONG)
    job_id, job = only(desk.prefill(request, [1, 2, 3, 4, 5, 6, 7, 8, 9]).store_jobs)
    assert blocks_of(job) == [1, 2, 3]
    assert desk.table["r"].groups[0].next_chunk == 3
    assert desk.connector.counters.stores_cut == 1
    desk.report(*busy.store_jobs)
    again, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [4, 5, 6, 7, 8]
    assert job.device.block_indices == (3,)
    desk.report(job_id, again)
    assert resident(desk) == set(keys(LONG))
    assert desk.connector.counters.lost_blocks == 0


def test_a_hybrid_models_store_is_cut_at_one_token_over_all_groups():
    """Its first group's blocks took all the room, and none of them could ever be used."""
    desk = Desk(num_slots=7, groups=(FULL, WIDE))
    request = Request("r", LONG)
    _, job = only(desk.prefill(request, range(1, 10), range(21, 26)).store_jobs)
    assert blocks_of(job) == [1, 2, 3, 4, 5, 21, 22]
    assert job.device.group_sizes == (5, 2)
    assert [group.next_chunk for group in desk.table["r"].groups] == [5, 2]


def test_room_that_was_too_small_for_all_groups_is_used_once_more_is_made():
    """The offer took more slots than were made, and the next step failed with a ValueError."""
    desk = Desk(num_slots=11, groups=(FULL, WIDE))
    busy = [
        desk.prefill(Request(name, name), [block], [])
        for name, block in zip("xyz", (1, 2, 3), strict=True)
    ]
    request = Request("r", LONG)
    _, job = only(desk.prefill(request, range(11, 20), range(21, 26)).store_jobs)
    assert blocks_of(job) == [11, 12, 13, 14, 15, 21, 22]
    desk.report(*busy[0].store_jobs)
    _, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [16, 23], "one slot was left, and one was made"
    assert not desk.step({request: 1}).store_jobs
    desk.report(*busy[1].store_jobs)
    _, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [17]


def test_a_prompt_larger_than_the_primary_keeps_its_head_however_long_it_decodes():
    desk = Desk(num_slots=4)
    request = Request("r", LONG, extra=0)
    meta = desk.prefill(request, list(range(1, 9)))
    desk.report(*meta.store_jobs)
    for _ in range(5):
        assert not desk.step({request: 1}).store_jobs
    assert resident(desk) == set(keys(LONG)[:4])
    desk.end(request)
    assert not desk.step().store_jobs
    assert desk.connector.counters.lost_blocks == 4
    assert not desk.table


def test_chunks_without_room_are_offered_again_only_as_far_as_room_was_made():
    """Each step of a decode offered all of them: 11 ms at 20,000 chunks."""
    text = "abcdefghijklmnopqrstuvwx"
    desk = Desk(manager=Scripted(num_blocks=8))
    busy = [desk.store(letter, [1, 2], req_id=f"busy{letter}") for letter in "ABCD"]
    readers = [Request(f"reader{letter}", letter + "_") for letter in "ABCD"]
    loads = [desk.load(reader, [3, 4, 5]) for reader in readers]
    request = Request("r", text, extra=0)
    job_id, job = only(desk.prefill(request, list(range(10, 34))).store_jobs)
    assert len(busy) == len(job.device.block_ids) == 4
    offered = desk.manager.offered
    del offered[:]
    for _ in range(10):
        assert not desk.step({request: 1}).store_jobs
    assert offered == [], "no room was made"
    for _, load_id, _ in loads[:2]:
        desk.report(load_id)
    again, job = only(desk.step({request: 1}).store_jobs)
    assert offered == [keys(text)[4:6]]
    assert blocks_of(job) == [14, 15]
    for _ in range(10):
        assert not desk.step({request: 1}).store_jobs
    assert len(offered) == 1, "the room that was made is used up"
    desk.report(job_id, again)
    desk.step({request: 1})
    assert offered[1] == keys(text)[6:12], "as many as have become evictable"
    desk.end(request)
    desk.step()
    assert offered[2] == keys(text)[6:], "the last chance of all of them"
    assert desk.connector.counters.lost_blocks == 18


def test_a_manager_may_leave_out_what_it_likes_from_some_token_on():
    class Choosy(Scripted):
        def prepare_store(self, keys, req_context, *, is_last=False):
            granted = super().prepare_store(keys[:-1], req_context)
            return PrepareStoreOutput(
                granted.keys_to_store, granted.store_spec, granted.evicted_keys, keys[-1:]
            )

    desk = Desk(manager=Choosy())
    request = Request("r", "abcd")
    job_id, job = only(desk.prefill(request, [1, 2, 3, 4, 5]).store_jobs)
    assert blocks_of(job) == [1, 2, 3]
    assert not desk.step({request: 1}).store_jobs
    assert desk.manager.offered == [keys("abc")], "no room was made since"
    desk.report(job_id)
    assert not desk.step({request: 1}).store_jobs
    assert desk.manager.offered == [keys("abc"), []]


def tiered():
    world = TieredWorld(EXCLUSIVE, num_slots=8)
    return world, Desk(manager=world.manager)


def promoted(world, desk, request):
    """Blocks that were promoted for a request, and are retained for it."""
    desk.store(request.text, [1, 2, 3, 4])
    world.evict_everything()
    assert desk.ask(request) == (None, False)
    desk.step()
    world.runner.run_ready()
    world.finish_all()


def test_a_request_that_takes_no_tokens_lets_go_of_what_was_promoted_for_it():
    world, desk = tiered()
    try:
        request = Request("r", "abc")
        promoted(world, desk, request)
        assert desk.ask(request) == (12, True)
        assert state_of(desk.primary, key("a")) == "pinned"
        desk.allocate(request, [1, 2, 3, 4])
        desk.step({request: 13})
        assert state_of(desk.primary, key("a")) == "idle"
    finally:
        world.end()
