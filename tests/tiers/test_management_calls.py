"""Calls of a tier that are no jobs: in order with the jobs, each answered once."""

import pytest
from scripted_tier import Operation
from tiers.actors import IO_TIMEOUT_S, World

from kvoffload_async.abc.events import BlocksAppeared, CallEnded
from kvoffload_async.errors import TierBusyError, TierClosedError, TierTimeoutError
from kvoffload_async.testing.harness import key_of

DELETE, CONTAINS = Operation.DELETE, Operation.CONTAINS


@pytest.fixture
def world():
    world = World()
    world.open()
    yield world
    world.tier.finish_all()
    world.close()
    world.runner.close()


def call(world, call_id, numbers=(1,), operation="delete"):
    keys = tuple(key_of(number) for number in numbers)
    world.runner.call_soon(world.actor.call, call_id, operation, keys)
    world.runner.run_ready()


def parked(world, kind=DELETE):
    return [operation.keys for operation in world.tier.parked if operation.kind is kind]


def ended(world):
    return {event.call_id: event for event in world.events if isinstance(event, CallEnded)}


def test_blocks_are_deleted_after_the_jobs_on_them(world):
    world.start(0, (1, 2))
    world.start(1, (3,), is_promotion=True)
    call(world, 7, (2,))
    call(world, 8, (4,))
    assert parked(world) == [(key_of(4),)]
    world.finish_job()
    assert parked(world) == [(key_of(4),), (key_of(2),)]
    world.tier.finish_all()
    world.runner.run_ready()
    assert key_of(2) not in world.tier.blocks
    assert ended(world)[7] == CallEnded(7, "delete", frozenset({key_of(2)}))


def test_blocks_that_a_tier_keeps_are_reported_with_their_error(world):
    call(world, 7, (1, 2))
    world.tier.finish(world.tier.parked[0], {1: TierBusyError("pinned")})
    world.runner.run_ready()
    (event,) = ended(world).values()
    assert event.keys == {key_of(1)}
    assert str(event.error) == "pinned"


def test_an_answer_to_contains_from_before_a_deletion_is_outdated(world):
    world.start(0, (1,))
    world.tier.land(world.tier.parked[0], 0)
    world.runner.call_soon(world.tier.evict, [key_of(1)])
    world.runner.run_ready()
    world.tier.blocks[key_of(1)] = None  # stored again: the tier is asked
    world.finish_job()
    (question,) = [p for p in world.tier.parked if p.kind is CONTAINS]
    call(world, 7, (1,))
    (deletion,) = [p for p in world.tier.parked if p.kind is DELETE]
    world.tier.finish(deletion)
    world.runner.run_ready()
    world.tier.blocks[key_of(1)] = None  # as the question has seen it
    world.tier.finish(question)
    world.runner.run_ready()
    assert not [event for event in world.events if isinstance(event, BlocksAppeared)]


def test_a_call_that_does_not_end_is_answered_at_its_deadline(world, caplog):
    world.start(0, (1,))
    call(world, 7, (1,))
    world.runner.advance(IO_TIMEOUT_S + 1)
    assert isinstance(ended(world)[7].error, TierTimeoutError)
    assert "t: delete failed: delete of 1 blocks timed out after 30.0 s" in caplog.text
    world.finish_job()
    assert not parked(world), "it is no longer wanted"


def test_a_tier_that_breaks_its_contract_has_deleted_nothing(world):
    async def broken(_keys):
        return None

    world.tier.delete = broken
    call(world, 7)
    assert not ended(world)[7].keys
    assert "broke its contract" in str(ended(world)[7].error)


@pytest.mark.parametrize(
    "answer",
    [(["ab"], None), ([key_of(1), 5], None), ([key_of(1)], b"ab"), (map(key_of, range(513)), None)],
)
def test_an_answer_that_is_no_page_of_keys_lists_nothing(world, answer):
    async def broken(_cursor, _count):
        return answer

    world.tier.list_keys = broken
    call(world, 7, (), operation="list")
    assert not ended(world)[7].keys
    assert "broke its contract" in str(ended(world)[7].error)


def test_what_a_tier_answers_beside_the_question_is_left_out(world):
    async def contains(keys):
        return [*keys, key_of(9), None]

    async def list_keys(_cursor, _count):
        return [b"ab", key_of(1), bytes(97)], None  # two that no block can have

    world.tier.contains, world.tier.list_keys = contains, list_keys
    call(world, 7, (1, 2), operation="contains")
    call(world, 8, (), operation="list")
    assert ended(world)[7] == CallEnded(7, "contains", frozenset({key_of(1), key_of(2)}))
    assert ended(world)[8] == CallEnded(8, "list", frozenset({key_of(1)}))


def test_closing_answers_every_call(world):
    world.start(0, (1,))
    call(world, 7, (1,))
    world.close()
    call(world, 8, (1,))
    assert isinstance(ended(world)[8].error, TierClosedError)
    assert ended(world)[7].error is not None
