"""What `KVOffloadSpec` tells people: figures, events, and the length of copies."""

from engine_world import EXAMPLE, PAGE_BYTES
from vllm_world import keys_of

from kvoffload_async.integrations.vllm import KVOffloadSpec, engine_metrics


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
