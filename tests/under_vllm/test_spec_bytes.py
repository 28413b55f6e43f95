"""Blocks through `KVOffloadSpec`'s manager and workers: every byte comes back where it belongs."""

import pytest
from engine_world import DEVICE_BLOCKS, EXAMPLE
from vllm.v1.kv_offload import base
from vllm_world import key_of, keys_of, shared_files


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_back_its_own_bytes_and_nothing_else_changes(pair, ranks):
    here = pair(ranks=ranks)
    assert shared_files() == []
    before = here.fill(1)
    here.store(keys_of(0, 1, 2), [[3, 5, 7]])
    here.fill(2)
    other = here.copies()
    here.load(keys_of(2, 0), [[1, 9]])
    for rank, tensors in enumerate(here.tensors):
        for index, tensor in enumerate(tensors):
            assert tensor[1].equal(before[rank][index][7])
            assert tensor[9].equal(before[rank][index][3])
            rest = [block for block in range(DEVICE_BLOCKS) if block not in {1, 9}]
            assert tensor[rest].equal(other[rank][index][rest])


def test_groups_have_their_own_tensors_and_a_chunk_may_be_loaded_from_its_middle(pair):
    here = pair(ranks=2, groups=((0, 1), (1, 2)), num_tensors=3, blocks_per_chunk=2)
    before = here.fill(1)
    keys = [key_of(0, 0), key_of(1, 0), key_of(0, 1)]
    here.store(keys, [[1, 2, 3, 4], [5, 6]])
    here.fill(2)
    other = here.copies()
    # Group 0 from its second block on, which lies inside of its first chunk.
    here.load(keys, [[7, 8, 9], [10, 11]], first=[1, 0])
    for rank, tensors in enumerate(here.tensors):
        for group, moved in (((0, 1), {7: 2, 8: 3, 9: 4}), ((1, 2), {10: 5, 11: 6})):
            for index in group:
                for target, source in moved.items():
                    assert tensors[index][target].equal(before[rank][index][source])
        assert tensors[2][7].equal(other[rank][2][7])
        assert tensors[0][10].equal(other[rank][0][10])


def test_a_replicated_layout_keeps_one_copy_that_all_ranks_read(pair):
    here = pair(ranks=2, replicated=True)
    before = here.fill(1)
    here.workers, loading = here.workers[:1], here.workers  # vLLM lets rank 0 alone write
    here.store(keys_of(0), [[3]])
    here.workers = loading
    here.load(keys_of(0), [[8]])
    for tensors in here.tensors:
        assert tensors[0][8].equal(before[0][0][3])
        assert tensors[1][8].equal(before[0][1][3])


def test_a_cell_holds_its_tensors_back_to_back_and_a_row_the_cells_of_all_ranks(pair):
    here = pair(ranks=2, blocks_per_chunk=2)
    before = here.fill(1)
    output = here.store(keys_of(0), [[3, 4]])
    (slot,) = output.store_spec.block_ids
    row = bytes(here.manager.manager.get_primary_kv_view()[slot : slot + 1].cast("B"))
    pages = [
        bytes(before[rank][tensor][block].numpy())
        for rank in range(2)
        for tensor in range(2)
        for block in (3, 4)
    ]
    assert row == b"".join(pages).ljust(4096, b"\0")


@pytest.mark.parametrize("tiers", [EXAMPLE, "fs"])
def test_blocks_come_back_from_a_tier_after_a_reset(pair, tiers, tmp_path):
    tiers = [{"type": "fs", "root_dir": str(tmp_path)}] if tiers == "fs" else tiers
    here = pair(tiers, ranks=2)
    before = here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    here.manager.reset_cache()
    if hasattr(base.OffloadingManager, "on_reset_flushed"):
        here.manager.on_reset_flushed()
    here.fill(2)
    request = here.request()
    here.load(keys_of(0, 1), [[1, 9]], request)
    source = here.manager.get_load_source(key_of(0), request).value
    assert source == ("disk" if tiers != EXAMPLE else "host")
    for rank, tensors in enumerate(here.tensors):
        assert tensors[0][1].equal(before[rank][0][3])
        assert tensors[1][9].equal(before[rank][1][5])
    here.finish_jobs()  # the step has ended, and the request's ticket with it
    here.load(keys_of(0), [[2]], request)
    assert here.manager.get_load_source(key_of(0), request).value == "host"


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_a_directory_serves_the_next_process_of_its_model_and_no_other(pair, tmp_path, kind):
    tier = {"type": kind, "root_dir": str(tmp_path), "fingerprint": "made up"}
    tier |= {"capacity_bytes": "1MiB"} if kind == "slab" else {}
    tier |= {"segment_bytes": "256KiB", "on_mismatch": "new_namespace"} if kind == "slab" else {}
    first = pair([tier])
    first.fill(1)
    first.store(keys_of(0), [[3]])
    first.finish_jobs()
    first.close()
    assert pair([tier], model="org/other").final(keys_of(0)) == ["MISS"]
    assert pair([tier]).final(keys_of(0)) == ["HIT"]


def test_eviction_makes_room_and_the_tier_still_has_what_went(pair):
    here = pair(EXAMPLE, slots=4)
    before = here.fill(1)
    for number in range(6):
        here.store(keys_of(number), [[number]])
        here.finish_jobs()
    here.fill(2)
    for number in range(6):
        request = here.request()
        here.load(keys_of(number), [[11]], request)
        assert here.tensors[0][0][11].equal(before[0][0][number])
        here.manager.on_request_finished(request)
