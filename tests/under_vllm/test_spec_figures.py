"""What `KVOffloadSpec` tells people: figures, events, and the length of copies."""

import socket

import pytest
from engine_world import EXAMPLE, PAGE_BYTES
from vllm.v1.kv_offload import base
from vllm_world import keys_of

from kvoffload_async.integrations.vllm import KVOffloadSpec, engine_metrics
from kvoffload_async.statistics import DROP_REASONS
from kvoffload_async.status.client import ask, parse_report


def test_every_figure_has_a_definition(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    stats = here.manager.get_stats()
    definitions = KVOffloadSpec.build_metric_definitions({})
    assert definitions.keys() >= stats.data["data"].keys()
    for name, values in stats.data["data"].items():
        for labels in values:
            assert len(labels) == len(definitions[name].labelnames)
    figures = stats.reduce()
    assert figures["vllm:kvoffload_async_stored_blocks:('1:example',)"] == 2
    assert figures["vllm:kv_offload_tiering_write_bytes:('1:example',)"] == 2 * 4096
    assert figures["vllm:kv_offload_cpu_allocation_size_sum"] == 2
    assert "vllm:kvoffload_async_stored_blocks" not in str(here.manager.get_stats().reduce())
    (info,) = here.manager.config_info()
    assert tuple(info) == engine_metrics.CONFIG_INFO_KEYS == KVOffloadSpec.config_info_keys({})


TIERING = "vllm:kv_offload_tiering_"


def figures_of(here, *names):
    """Return figures by label, of those that vLLM counts a tier."""
    data = here.manager.get_stats().data["data"]
    return [{labels[0]: v for labels, v in data.get(TIERING + name, {}).items()} for name in names]


def test_tiers_of_one_type_are_told_apart(pair):
    here = pair([*EXAMPLE, *EXAMPLE])
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    assert figures_of(here, "write_bytes") == [{"1:example": 8192, "2:example": 8192}]


def test_chunks_are_counted_as_vllm_counts_them(pair):
    """Once a request, tier and key, and only until the request is scheduled."""
    here = pair([*EXAMPLE, *EXAMPLE])
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    here.manager.reset_cache()
    here.manager.on_reset_flushed()
    here.manager.get_stats()
    request = here.request()
    for _ in range(2):
        here.until(lambda: here.lookups(keys_of(0, 1, 2), request) == ["HIT", "HIT", "MISS"])
    queries, hits = figures_of(here, "chunk_queries", "chunk_hits")
    assert (queries, hits) == ({"0:primary": 3, "1:example": 3, "2:example": 1}, {"1:example": 2})


def test_chunks_are_counted_until_their_request_is_scheduled(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    request = here.request()
    assert here.lookups(keys_of(0, 2), request) == ["HIT", "MISS"]
    here.manager.on_schedule_end(base.ScheduleEndContext([request.req_id], ()))
    assert here.lookups(keys_of(1), request) == ["HIT"]
    data = here.manager.get_stats().data["data"]
    assert data[TIERING + "chunk_queries"] == {("0:primary",): 2, ("1:example",): 1}
    assert data[TIERING + "chunk_hits"] == {("0:primary",): 1}


def test_chunks_of_a_request_that_waits_for_the_device_are_counted_once(pair):
    """vLLM asks again in each step until the device has room for the request."""
    here = pair(EXAMPLE)
    first, second = here.request(), here.request()
    for _ in range(3):
        assert here.lookups(keys_of(0, 1), first) == ["MISS", "MISS"]
        assert here.manager.lookup_prefix(keys_of(2, 3), second) == (0, False)
        here.manager.on_schedule_end(base.ScheduleEndContext((), ()))
    queries, hits = figures_of(here, "chunk_queries", "chunk_hits")
    assert (queries, hits) == ({"0:primary": 3, "1:example": 3}, {})


def test_chunks_of_a_prompt_that_is_looked_up_at_once_are_counted_likewise(pair):
    here = pair([*EXAMPLE, *EXAMPLE])
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    here.manager.reset_cache()
    here.manager.on_reset_flushed()
    here.manager.get_stats()
    here.store(keys_of(7), [[6]])
    request = here.request()
    for _ in range(2):
        here.until(lambda: here.manager.lookup_prefix(keys_of(7, 0, 1, 2), request) == (3, False))
    queries, hits = figures_of(here, "chunk_queries", "chunk_hits")
    assert queries == {"0:primary": 4, "1:example": 3, "2:example": 1}
    assert hits == {"0:primary": 1, "1:example": 2}
    other = here.request()
    answers = here.manager.lookup_many(keys_of(7, 3), other)
    assert [answer.name for answer in answers] == ["HIT", "MISS"]
    queries, hits = figures_of(here, "chunk_queries", "chunk_hits")
    assert (queries["0:primary"], hits["0:primary"]) == (2, 1)


def test_what_is_still_being_written_is_neither_hit_nor_miss(pair):
    here = pair()
    assert here.manager.prepare_store(keys_of(0), here.request()) is not None
    assert here.lookups(keys_of(0)) == ["HIT_PENDING"]
    assert figures_of(here, "chunk_queries") == [{}]


def test_the_requests_whose_lookups_count_are_forgotten(pair):
    here = pair(EXAMPLE)
    first, second = here.request(), here.request()
    here.lookups(keys_of(0), first)
    here.manager.on_request_finished(first)
    here.manager.on_schedule_end(base.ScheduleEndContext([second.req_id], ()))
    assert here.manager._counts.lookups._open == {}


def test_jobs_under_way_and_failed_jobs_are_told_by_tier_and_direction(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    names = ("active_cascade_jobs", "active_promotion_jobs", "primary_read_usage_perc")
    data = here.manager.get_stats().data["data"]
    assert [data[TIERING + name]["1:example",] for name in names] == [1, 0, 0.25]
    here.finish_jobs()
    data = here.manager.get_stats().data["data"]
    assert [data[TIERING + name]["1:example",] for name in names] == [0, 0, 0.0]
    counters = here.manager.manager.planner.tiers[0].counters
    counters.failed_jobs, counters.failed_loads = 5, 2
    failures = figures_of(here, "promotion_job_failures", "cascade_job_failures")
    assert failures == [{"1:example": 2}, {"1:example": 3}]


def test_events_tell_of_both_tiers(pair):
    here = pair([{"type": "example", "enable_kv_events": True}], events=True, slots=1)
    here.fill(1)
    here.store(keys_of(0), [[3]])
    here.finish_jobs()
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


def test_what_tiers_hold_and_whether_they_are_left_alone_is_told(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    ours = "vllm:kvoffload_async_"
    data = here.manager.get_stats().data["data"]
    assert data[f"{ours}used_bytes"] == {("1:example",): 2 * 4096}
    assert f"{ours}capacity_bytes" not in data, "the tier has none"
    assert data[f"{ours}suspended_directions"] == {("1:example",): 0}
    here.manager.manager.planner.tiers[0].counters.corrupt_blocks = 3
    for _ in range(3):
        here.manager.manager.planner.tiers[0].health.lookup_failed(OSError("down"))
    data = here.manager.get_stats().data["data"]
    assert data[f"{ours}corrupt_blocks"] == {("1:example",): 3}
    assert data[f"{ours}suspended_directions"] == {("1:example",): 1}


def test_a_tier_that_never_opened_is_shown_beside_an_open_one(pair):
    pytest.importorskip("redis")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        url = f"valkey://127.0.0.1:{closed.getsockname()[1]}/0"
        here = pair([*EXAMPLE, {"type": "valkey", "url": url, "required": False}])
        data = here.manager.get_stats().data["data"]
    assert data["vllm:kvoffload_async_open"] == {("1:example",): 1, ("2:valkey",): 0}


def test_the_help_of_dropped_blocks_names_every_reason():
    text = KVOffloadSpec.build_metric_definitions({})[
        "vllm:kvoffload_async_dropped_blocks"
    ].documentation
    assert not [reason for reason in DROP_REASONS if reason not in text]


@pytest.mark.parametrize(("index", "name"), [(0, "kv.sock"), (2, "kv.sock-2")])
def test_the_status_socket_shows_the_engine_one_for_each_replica(
    pair, tmp_path_factory, index, name
):
    folder = tmp_path_factory.mktemp("s")
    given = {"status_socket": str(folder / "kv.sock")}
    here = pair(EXAMPLE, extra=given, data_parallel_index=index)
    here.fill(1)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    path = str(folder / name)
    report = parse_report(ask(path), path)
    assert report.statistics == here.manager.manager.stats()
    assert report.model == "org/model"
    assert [file.name for file in folder.iterdir()] == [name]
    here.manager.shutdown()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("index", "name"), [(0, "trace"), (2, "trace-2")])
def test_each_replica_records_a_trace_of_its_own(pair, tmp_path, index, name):
    given = {"record_trace": str(tmp_path / "trace")}
    here = pair(EXAMPLE, extra=given, data_parallel_index=index)
    here.manager.shutdown()
    assert [file.name for file in tmp_path.iterdir()] == [name]
