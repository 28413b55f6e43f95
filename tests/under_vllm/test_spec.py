"""`KVOffloadSpec` as vLLM's connector uses it, without a model: a manager, and its workers."""

import inspect
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from engine_world import DEVICE_BLOCKS, PAGE_BYTES, Pair, canonical, strided_pages
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm_world import MODULE, key_of, keys_of, make_config

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.integrations.vllm import KVOffloadSpec, engine_metrics
from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.integrations.vllm.worker import KVOffloadWorker

EXAMPLE = ({"type": "example"},)


@pytest.fixture
def pair(request):
    made = []

    def make(tiers=(), **options):
        made.append(Pair(f"kvoffload-test-{id(request)}-{len(made)}", tiers, **options))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()
    assert shared_files() == []


def shared_files():
    return [path.name for path in Path("/dev/shm").glob("kvoffload-*")]


def faults(pair, direction):
    return [worker._copies.transport.faults[direction] for worker in pair.workers]


def failing(pair, direction, rank=0):
    def fail(_copies):
        raise OSError("drawn")

    faults(pair, direction)[rank].before_copy = fail


# -- the interface ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (KVOffloadManager, base.OffloadingManager),
        (KVOffloadWorker, base.OffloadingWorker),
        (KVOffloadSpec, base.OffloadingSpec),
    ],
)
def test_every_method_of_vllms_contract_is_there_with_its_parameters(ours, theirs):
    assert issubclass(ours, theirs)
    assert not ours.__abstractmethods__
    names = [
        name
        for name, member in vars(theirs).items()
        if inspect.isfunction(member) or isinstance(member, classmethod)
    ]
    for name in set(names) - {"__init__", "__init_subclass__"}:
        own, given = (
            list(inspect.signature(getattr(owner, name)).parameters) for owner in (ours, theirs)
        )
        assert getattr(ours, name) is not getattr(theirs, name), name
        assert own[: len(given)] == given, name


def test_vllm_finds_the_spec_by_its_json():
    found = OffloadingSpecFactory.get_spec_cls(
        {"spec_name": "KVOffloadSpec", "spec_module_path": MODULE}
    )
    assert found is KVOffloadSpec


def spec_with(tiers=(), **extra):
    config = make_config([], "kvoffload-test-config")
    given = {"cpu_bytes_to_use": "64KiB", "secondary_tiers": list(tiers), **extra}
    return KVOffloadSpec(replace(config, extra_config=given))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cpu_bytes": 1}, r"unknown key 'cpu_bytes' \(did you mean 'cpu_bytes_to_use'\?\)"),
        ({"block_bytes": 1}, "unknown key 'block_bytes'"),
        ({"cpu_bytes_to_use": 100}, "cpu_bytes_to_use: 100 bytes hold no block"),
        ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use"),
        ({"eviction_policy": "mru"}, "eviction_policy: 'mru' is unknown"),
        ({"secondary_tiers": {"type": "fs"}}, "secondary_tiers"),
        ({"secondary_tiers": [{"type": "fsx", "root_dir": "/x"}]}, "'fsx'.*did you mean 'fs'"),
        ({"secondary_tiers": [{"type": "fs"}]}, "root_dir"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x", "n": 1}]}, "unknown key 'n'"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x", "rank": 1}]}, "rank: 1 is not for"),
        ({"prefault": False}, "unknown key 'prefault'"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_anything_starts(extra, message):
    with pytest.raises(ConfigError, match=message):
        spec_with(**extra)
    assert shared_files() == []


def test_vllms_own_keys_are_allowed():
    spec_with(
        spec_name="KVOffloadSpec",
        spec_module_path=MODULE,
        offload_prompt_only=False,
        self_describing_kv_events=False,
        blocks_per_chunk=1,
    )


def test_the_canonical_layout_is_refused():
    with pytest.raises(ConfigError, match="canonical_layout"):
        KVOffloadSpec(replace(make_config([], "e"), canonical_layout=True))


def test_too_much_memory_is_refused_with_the_remedy(pair):
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: the primary takes \d+ bytes"):
        pair(slots=1 << 40)
    assert shared_files() == []


def test_tensors_that_are_no_pages_are_refused():
    spec = spec_with()
    tensors = [strided_pages().unsqueeze(2)]
    with pytest.raises(ConfigError, match="KV cache tensor 0 has shape"):
        spec.get_worker(canonical(tensors, ((0,),)))


def test_tensors_that_do_not_fit_what_vllm_announced_are_refused():
    spec = spec_with()
    with pytest.raises(ConfigError, match="vLLM announced 8192"):
        spec.get_worker(canonical([strided_pages() for _ in range(20)], (tuple(range(20)),)))
    assert shared_files() == []


# -- bytes --------------------------------------------------------------------------------------


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
    here.settle()
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
    here.load(keys_of(0), [[2]], request)
    assert here.manager.get_load_source(key_of(0), request).value == "host"


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_a_directory_serves_the_next_process_of_its_model_and_no_other(pair, tmp_path, kind):
    tier = {"type": kind, "root_dir": str(tmp_path)}
    tier |= {"capacity_bytes": "1MiB"} if kind == "slab" else {}
    tier |= {"segment_bytes": "256KiB", "on_mismatch": "new_namespace"} if kind == "slab" else {}
    first = pair([tier])
    first.fill(1)
    first.store(keys_of(0), [[3]])
    first.settle()
    first.close()
    assert pair([tier], model="org/other").final(keys_of(0)) == ["MISS"]
    assert pair([tier]).final(keys_of(0)) == ["HIT"]


def test_eviction_makes_room_and_the_tier_still_has_what_went(pair):
    here = pair(EXAMPLE, slots=4)
    before = here.fill(1)
    for number in range(6):
        here.store(keys_of(number), [[number]])
        here.settle()
    here.fill(2)
    for number in range(6):
        request = here.request()
        here.load(keys_of(number), [[11]], request)
        assert here.tensors[0][0][11].equal(before[0][0][number])
        here.manager.on_request_finished(request)


# -- what a request may do ----------------------------------------------------------------------


def test_a_request_may_shut_tiers_out(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0), [[3]])
    here.settle()
    here.manager.reset_cache()
    here.manager.on_reset_flushed()
    none = here.request(load_tier_filter=base.TierFilter(()))
    storage = here.request(
        load_tier_filter=base.TierFilter((base.TierMatcher(base.Medium.STORAGE, None),))
    )
    assert here.lookups(keys_of(0), none) == ["MISS"]
    assert here.lookups(keys_of(0), storage) == ["MISS"]
    assert here.lookups(keys_of(0)) != ["MISS"]


def test_eviction_follows_the_positions_that_vllm_gives(pair):
    here = pair(slots=4)
    here.fill(1)
    request = here.request()
    keys = keys_of(3, 2, 1, 0)  # offered tail first
    for position, key in enumerate(reversed(keys)):
        request.set_offload_key_position(key, 16 * (position + 1))
    here.store(keys, [[1, 2, 3, 4]], request)
    here.manager.on_request_finished(request)
    output = here.store(keys_of(9), [[5]])
    assert output.evicted_keys == keys_of(3)


def test_a_batch_that_does_not_fit_changes_nothing(pair):
    here = pair(slots=2)
    assert here.store(keys_of(0, 1, 2), [[1, 2, 3]]) is None
    assert here.lookups(keys_of(0, 1, 2)) == ["MISS"] * 3


# -- what fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_in_one_rank_is_forgotten(pair, rank):
    here = pair(EXAMPLE, ranks=2)
    here.fill(1)
    failing(here, Direction.STORE, rank)
    here.store(keys_of(0, 1), [[3, 5]])
    here.settle()
    assert here.final(keys_of(0, 1)) == ["MISS", "MISS"]
    names = here.manager.get_stats().reduce()
    assert names["vllm:kvoffload_async_failed_stores"] == 2
    faults(here, Direction.STORE)[rank].before_copy = None
    before = here.copies()
    here.store(keys_of(0, 1), [[3, 5]])
    here.load(keys_of(0, 1), [[6, 7]])
    assert here.tensors[rank][0][6].equal(before[rank][0][3])


def test_a_failed_store_does_not_mark_its_slots_for_good(pair):
    here = pair(slots=1)
    here.fill(1)
    failing(here, Direction.STORE)
    here.store(keys_of(0), [[3]])
    faults(here, Direction.STORE)[0].before_copy = None
    for number in (1, 2):
        here.store(keys_of(number), [[4]])
        assert here.final(keys_of(number)) == ["HIT"]


def test_a_load_that_fails_ends_the_engine_of_vllms_connector_with_the_remedy(pair):
    here = pair()
    here.fill(1)
    here.store(keys_of(0), [[3]])
    failing(here, Direction.LOAD)
    with pytest.raises(TransportError, match="KVOffloadConnector"):
        here.load(keys_of(0), [[4]])


def test_a_load_that_fails_is_told_to_who_asks(pair):
    here = pair()
    here.fill(1)
    here.store(keys_of(0), [[3]])
    failing(here, Direction.LOAD)
    here.workers[0].reports_failed_loads = True
    here.load(keys_of(0), [[4]])
    assert here.workers[0].take_failed_loads() == {2}
    assert here.workers[0].take_failed_loads() == set()


def test_an_expedited_load_that_fails_is_an_error_before_the_forward_pass(pair):
    here = pair()
    here.fill(1)
    here.store(keys_of(0), [[3]])
    failing(here, Direction.LOAD)
    worker = here.workers[0]
    worker.reports_failed_loads = True
    spec = here.manager.prepare_load(keys_of(0), here_request(here))
    assert worker.submit_load(9, spec, here.device([[4]]), expedited=True)
    with pytest.raises(TransportError, match="load job 9 has failed"):
        worker.wait({9})


def here_request(here):
    request = here.request()
    assert here.lookups(keys_of(0), request) == ["HIT"]
    return request


def test_waiting_for_a_copy_that_hangs_ends_with_an_error(pair):
    here = pair(extra={"drain_timeout_s": 0.05})
    gate = threading.Event()
    faults(here, Direction.STORE)[0].before_copy = lambda _copies: gate.wait(20)
    output = here.manager.prepare_store(keys_of(0), here.request())
    worker = here.workers[0]
    worker.submit_store(1, here.device([[3]]), output.store_spec)
    with pytest.raises(TransportError, match=r"jobs \[1\] have not ended within 0.05 s"):
        worker.wait({1})
    worker.wait({77})  # unknown: nothing to wait for
    gate.set()


def test_after_a_reset_promotions_wait_until_no_old_copy_can_touch_the_primary(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0), [[3]])
    here.settle()
    request = here.request()
    here.manager.prepare_store(keys_of(1), request)  # under way when the reset comes
    here.manager.reset_cache()
    assert here.final(keys_of(0)) == ["MISS"]
    here.store(keys_of(2), [[5]])  # its workers have ended everything older
    if hasattr(base.OffloadingManager, "on_reset_flushed"):
        here.manager.on_reset_flushed()
    assert here.final(keys_of(0)) == ["HIT"]


# -- what people see ----------------------------------------------------------------------------


def test_every_figure_has_a_definition(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.settle()
    stats = here.manager.get_stats()
    definitions = KVOffloadSpec.build_metric_definitions({})
    assert definitions.keys() >= stats.data["data"].keys()
    for name, values in stats.data["data"].items():
        for labels in values:
            assert len(labels) == len(definitions[name].labelnames)
    figures = stats.reduce()
    assert figures["vllm:kvoffload_async_stored_blocks:('example',)"] == 2
    assert figures["vllm:kv_offload_tiering_write_bytes:('example',)"] == 2 * 4096
    assert figures["vllm:kv_offload_cpu_allocation_size_sum"] == 2
    assert "vllm:kvoffload_async_stored_blocks" not in str(here.manager.get_stats().reduce())
    (info,) = here.manager.config_info()
    assert tuple(info) == engine_metrics.CONFIG_INFO_KEYS == KVOffloadSpec.config_info_keys({})


def test_events_tell_of_both_tiers(pair):
    here = pair([{"type": "example", "enable_kv_events": True}], events=True, slots=1)
    here.fill(1)
    here.store(keys_of(0), [[3]])
    here.settle()
    here.store(keys_of(1), [[3]])
    told = [(event.keys, event.medium.name, event.removed) for event in here.manager.take_events()]
    assert (keys_of(0), "CPU", False) in told
    assert (keys_of(0), "CPU", True) in told
    assert list(here.manager.take_events()) == []


def test_pages_are_counted(pair):
    here = pair()
    here.fill(1)
    output = here.manager.prepare_store(keys_of(0), here.request())
    worker = here.workers[0]
    worker.submit_store(4, here.device([[3]]), output.store_spec)
    worker.wait({4})
    (result,) = worker.get_finished()
    assert result.success
    assert result.transfer_size == 2 * PAGE_BYTES
    assert result.transfer_time >= 0
    assert worker.get_finished() == []


def test_shutdown_is_idempotent_and_later_ends_are_ignored(pair):
    here = pair(EXAMPLE)
    request = here.request()
    output = here.manager.prepare_store(keys_of(0), request)
    here.close()
    here.close()
    here.manager.complete_store(output.keys_to_store, request)
