"""An id may be used again as soon as its request has ended, whatever of that still runs."""

from connector.worlds import Desk, Request
from facade.worlds import REQUEST_LEVEL, World


def test_an_id_may_be_used_again_while_the_manager_waits_for_anothers_block():
    """The first request has parked a block that another one writes: the manager still knows it."""
    world = World(REQUEST_LEVEL, num_slots=4)
    desk = Desk(manager=world.manager)
    writer, first, second = Request("w", "a"), Request("r", "a"), Request("r", "a")
    busy = desk.prefill(writer, [1, 2])
    desk.prefill(first, [3, 4])
    desk.end(first)
    desk.step()
    assert not desk.table.keys() & {"r"}
    assert len(world.manager.planner.requests) == 2
    assert desk.ask(second) == (None, False), "its block is on the way"
    desk.report(*busy.store_jobs)
    assert desk.ask(second) == (4, True)
    for request in writer, second:
        desk.end(request)
    desk.step()
    world.rest()
    world.end()
