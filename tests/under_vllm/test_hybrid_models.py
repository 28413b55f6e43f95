"""Models with full and sliding-window attention: what vLLM's scheduler stores is checked by bytes.

vLLM 0.32 itself offers blocks that their requests no longer have; see `KVOffloadManager` and
`KVOffloadWorker`, which do not store them.
"""

import os
import random
import time

import pytest
from facade.gated_tiers import DEADLINE_S, new_gates
from hybrid_world import BLOCK, Hybrid
from sweeps import sizes
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.request import RequestStatus

from kvoffload_async.types import get_offload_block_hash, get_offload_group_idx

FULL, WINDOW = 0, 1
TEXT = range(100, 100 + 6 * BLOCK + 5)

pytestmark = pytest.mark.slow


@pytest.fixture
def hybrid(tmp_path):
    """Return what makes a `Hybrid`; all of them are closed at the end."""
    made = []

    def make(connector="KVOffloadConnector", **options):
        engine_id = f"kvoffload-test-hybrid-{os.getpid()}-{tmp_path.name}-{len(made)}"
        made.append(Hybrid(tmp_path, engine_id, connector, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=["OffloadingConnector", "KVOffloadConnector"])
def connector(request):
    """vLLM's own connector, and this package's."""
    return request.param


@pytest.fixture
def gate(monkeypatch):
    """The gate of `GATED`, shut."""
    with new_gates(monkeypatch) as (gate, _):
        gate.shut()
        yield gate


GATED = {"type": "GatedTier", "module_path": "facade.gated_tiers"}
SLOT_BYTES = 4096


def prompts(count, blocks):
    return [range(1000 * n, 1000 * n + blocks * BLOCK + 5) for n in range(1, 1 + count)]


def stored(world, group):
    """The lengths of the texts whose chunks the primary has."""
    keys = [key for key, _, _ in world.primary.resident()]
    texts = [
        world.texts[get_offload_block_hash(k)] for k in keys if get_offload_group_idx(k) == group
    ]
    return sorted(map(len, texts))


def test_a_request_loads_what_another_has_stored(hybrid, connector):
    world = hybrid(connector)
    world.run(world.arrive(TEXT))
    world.scheduler.reset_prefix_cache()
    world.run(world.arrive(TEXT))
    assert world.loaded_blocks == 8, "six of full attention, and two of the window"
    assert world.wrong_reads == 0


@pytest.mark.parametrize("retained", [BLOCK, 3 * BLOCK])
def test_a_load_fills_all_blocks_that_vllm_keeps_before_a_window(hybrid, connector, retained):
    world = hybrid(connector, retained=retained, interval=None)
    world.run(world.arrive(TEXT))
    world.scheduler.reset_prefix_cache()
    world.run(world.arrive(TEXT))
    assert world.loaded_blocks > 8
    world.run(world.arrive([*TEXT[: 4 * BLOCK], *range(400, 440)]))
    assert world.wrong_reads == 0


def test_after_a_reset_a_running_request_stores_no_block_that_its_window_has_let_go(
    hybrid, connector
):
    world = hybrid(connector)
    request = world.arrive(range(300, 300 + 6 * BLOCK), max_tokens=60)
    for _ in range(30):
        world.step()
    table = world.connector._req_status[request.request_id].group_states[WINDOW].block_ids
    before = world.device[table].copy()
    for start in range(1000, 1400, 100):
        world.run(world.arrive(range(start, start + 5 * BLOCK)))
    assert (world.device[table[:6]] != before[:6]).any(), "no block has a new owner"
    world.scheduler.reset_prefix_cache(reset_connector=True)
    world.step()
    world.step()
    assert not request.is_finished()
    assert stored(world, FULL)[:6] == [BLOCK * n for n in range(1, 7)], "full attention again"
    assert stored(world, WINDOW) == []


def test_what_begins_after_a_reset_is_stored_as_ever(hybrid):
    world = hybrid()
    world.arrive(range(300, 300 + 3 * BLOCK), max_tokens=100)
    world.step()
    world.scheduler.reset_prefix_cache(reset_connector=True)
    world.run(world.arrive(TEXT))
    assert {5 * BLOCK, 6 * BLOCK} <= set(stored(world, WINDOW))


def test_a_chunk_of_which_a_window_has_let_a_block_go_is_not_stored(hybrid, connector, caplog):
    world = hybrid(connector, blocks_per_chunk=2, interval=None)
    world.run(world.arrive(TEXT))
    assert stored(world, WINDOW) == [2 * BLOCK, 4 * BLOCK, 6 * BLOCK]
    assert world.scheduler.reset_connector_cache()
    request = world.arrive([*TEXT[: 3 * BLOCK], *range(900, 900 + 4 * BLOCK)])
    world.step()
    table = world.connector._req_status[request.request_id].group_states[WINDOW].block_ids
    assert table[0] == 0 != table[1], "the device has only the second block of the first chunk"
    world.run(request)
    assert stored(world, WINDOW) == [4 * BLOCK, 6 * BLOCK]
    assert stored(world, FULL) == [2 * BLOCK, 4 * BLOCK, 6 * BLOCK]
    assert "leave blocks_per_chunk out" in caplog.text
    assert "could not be stored" not in caplog.text


def test_all_blocks_of_four_prompts_reach_a_tier_that_is_slow_at_first(hybrid, connector, gate):
    """128 blocks of full attention, two prompts of which fit into the primary at once."""
    world = hybrid(
        connector, cpu_bytes_to_use=70 * SLOT_BYTES, num_blocks=200, secondary_tiers=[GATED]
    )
    assert world.primary.num_slots == 70
    texts = prompts(4, blocks=31)
    requests = [world.arrive(text, max_tokens=25) for text in texts]
    for _ in range(8):
        world.step()
    assert not all(map(all, (world.stored_in_tier(text, FULL) for text in texts)))
    gate.open()
    manager = world.connector.manager.manager
    while not all(request.is_finished() for request in requests):
        manager.wait_for_progress(0.1)
        world.step()
    deadline_s = time.monotonic() + DEADLINE_S
    while world.scheduler.connector.has_pending_push_work():
        assert time.monotonic() < deadline_s
        manager.wait_for_progress(0.1)
        world.step()
    assert [world.stored_in_tier(text, FULL) for text in texts] == [[True] * 31] * 4
    assert [world.stored_in_tier(text, WINDOW)[-2:] for text in texts] == [[True] * 2] * 4
    counters = manager.planner.tiers[0].counters
    assert counters.dropped_blocks == 0
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    again = [world.arrive(text) for text in texts]
    while not all(request.is_finished() for request in again):
        manager.wait_for_progress(0.01)
        world.step()
    assert world.loaded_blocks == 4 * (31 + 2)
    assert world.wrong_reads == 0


def test_what_ends_while_the_tier_hangs_takes_the_place_of_what_the_tier_lacks(hybrid, gate):
    world = hybrid(cpu_bytes_to_use=14 * SLOT_BYTES, secondary_tiers=[GATED])
    world.connector.manager.manager.planner.room.copies_each = 1
    first, second = prompts(2, blocks=12)
    world.run(world.arrive(first))
    last = world.arrive(second[: 3 * BLOCK + 5], max_tokens=10)
    while not last.is_finished():
        world.step()
        assert len(stored(world, FULL)) == 12, "it may be offered again"
    world.step()
    world.step()
    texts = [world.texts[get_offload_block_hash(key)] for key, _, _ in world.primary.resident()]
    assert {len(text) for text in texts if text[0] == second[0]} == {BLOCK, 2 * BLOCK, 3 * BLOCK}
    assert world.connector.manager.take_left_out() == {}


def test_without_vllms_private_names_the_connector_does_what_vllms_does(
    hybrid, monkeypatch, caplog
):
    monkeypatch.delattr(OffloadingConnectorScheduler, "_sliding_window_lookup")
    world = hybrid(cpu_bytes_to_use=6 * SLOT_BYTES)
    assert not world.connector.manager.offers_again
    assert "_maximal_prefix_lookup" not in vars(world.connector)
    (warned,) = [r.message for r in caplog.records if "is left out" in r.message]
    assert "offering again what had no room, and looking blocks up in batches" in warned
    monkeypatch.undo()
    world.run(world.arrive(TEXT))
    assert stored(world, FULL) == [], "a store that does not fit is refused as a whole"


@sizes("schedules", 8, 300)
def test_no_schedule_of_vllms_scheduler_stores_bytes_that_are_not_those_of_their_key(
    hybrid, schedules
):
    compared = loaded = 0
    for seed in range(schedules):
        draw = random.Random(seed)
        world = hybrid(
            retained=draw.choice((0, BLOCK, 2 * BLOCK)),
            cpu_bytes_to_use=draw.choice((12, 24, 1024)) * SLOT_BYTES,
            secondary_tiers=draw.choice(([], [{"type": "example"}])),
            interval=draw.choice((0, None, 4 * BLOCK)),
            blocks_per_chunk=draw.choice((1, 2, 4)),
            num_blocks=draw.choice((48, 80)),
        )
        stems = [[draw.randrange(1000) for _ in range(8 * BLOCK)] for _ in range(2)]
        for _ in range(60):
            if draw.random() < 0.4 and len(world.scheduler.requests) < 4:
                text = draw.choice(stems)[: draw.randrange(1, 8 * BLOCK)]
                text += [draw.randrange(1000) for _ in range(draw.choice((0, 0, 5, 40)))]
                world.arrive(text, draw.choice((1, 1, 1, 60)))
            world.step()
            if world.scheduler.requests and draw.random() < 0.1:
                victim = draw.choice(list(world.scheduler.requests))
                world.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            if draw.random() < 0.2:
                world.scheduler.reset_prefix_cache(reset_connector=draw.random() < 0.3)
        compared += world.compared
        loaded += world.loaded_blocks
        assert world.wrong_reads == 0
    assert compared
    assert loaded


def test_blocks_of_a_queued_request_are_promoted_before_its_first_lookup(hybrid, tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path / "store")}
    before = hybrid(secondary_tiers=[tier])
    before.run(before.arrive(TEXT))
    deadline_s = time.monotonic() + DEADLINE_S
    while before.connector.manager.has_pending_work() and time.monotonic() < deadline_s:
        before.step()
    before.close()
    world = hybrid(secondary_tiers=[tier])
    world.restarts(before)
    (state,) = world.connector.manager.manager.planner.tiers
    most, world.scheduler.max_num_active_reqs = world.scheduler.max_num_active_reqs, 0
    request = world.arrive(TEXT)
    while state.counters.prefetched_blocks < 8 and time.monotonic() < deadline_s:
        world.step()
    assert not world.connector.manager.manager.planner.counters.lookups
    world.scheduler.max_num_active_reqs = most
    world.run(request)
    assert world.loaded_blocks == 8, "six of full attention, and two of the window"
    assert (state.counters.prefetched_blocks, state.counters.unused_prefetched_blocks) == (8, 0)
    assert world.wrong_reads == 0
    world.scheduler.max_num_active_reqs = len(world.scheduler.running)
    other = world.arrive([*TEXT, *range(500, 540)])
    for _ in range(3):
        world.step()
    assert state.counters.prefetched_blocks == 8, "the device has the blocks"
    world.scheduler.finish_requests([other.request_id], RequestStatus.FINISHED_ABORTED)


def test_no_block_is_promoted_ahead_whose_event_vllm_could_not_describe(hybrid, tmp_path):
    world = hybrid(secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path / "store")}])
    prefetcher = world.connector.manager.manager.planner.prefetcher
    for describes in (True, False):
        world.connector._events_tracker.self_describing_enabled = describes
        request = world.arrive(TEXT)
        assert bool(prefetcher.queued) is not describes
        world.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
