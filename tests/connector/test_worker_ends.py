"""How a worker ends, and how a spec makes one."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from connector.workers import Broken, Computing, ended, job, meta
from transport.worlds import DEADLINE_S, MOMENT_S, STORE

from kvoffload_async.abc.transport import Transfer, TransferOutcome
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.connector.protocol import ConnectorOutput
from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker, summed
from kvoffload_async.facade.spec import CPUOffloadingSpec, TieringOffloadingSpec

# -- the end ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("each_device")
def test_shutting_down_ends_every_job_deferred_ones_included():
    world = Computing()
    world.worker.submit_load(1, job((1,), (1,)))
    world.worker.prepare_store_kv(meta(stores={2: job((2,), (2,))}))
    assert world.worker.shutdown(DEADLINE_S)
    assert ended(world.worker.get_finished()) == {1: True, 2: True}
    assert world.worker.shutdown(DEADLINE_S)
    assert world.worker.get_finished() == []


@pytest.mark.usefixtures("each_device")
def test_a_job_after_the_shutdown_fails():
    world = Computing()
    assert world.worker.shutdown(DEADLINE_S)
    world.worker.submit_store(1, job((1,), (1,)))
    world.worker.submit_load(2, job((1,), (1,)), expedited=True)
    assert ended(world.worker.get_finished()) == {1: False, 2: False}


@pytest.mark.usefixtures("each_device")
def test_a_hung_copy_is_given_up_in_time_and_reported_once():
    world = Computing()
    hung = threading.Event()

    def hang(_copies):
        hung.wait(DEADLINE_S)

    world.transport.before_copy[STORE] = hang
    world.worker.submit_store(1, job((1,), (1,)))
    world.worker.submit_load(2, job((2,), (2,)))
    assert world.worker.wait({2}, DEADLINE_S)
    assert not world.worker.shutdown(MOMENT_S), "memory must stay"
    assert ended(world.worker.get_finished()) == {1: False, 2: True}
    hung.set()
    assert world.worker.shutdown(DEADLINE_S), "now it may go"
    assert world.worker.get_finished() == []


def test_ends_that_nobody_published_are_given_up_too_in_the_order_of_the_jobs():
    class Silent(Broken):
        class Never(Transfer):
            async def outcome(self):
                await asyncio.Event().wait()
                return TransferOutcome(0)

            def synchronize(self, timeout_s):
                return False

        def submit(self, copies, after):
            return self.Never()

    worker = OffloadingConnectorWorker(Silent())
    jobs = range(1, 21)
    for job_id in jobs:
        worker.submit_store(job_id, job((job_id,), (job_id,)))
    assert not worker.wait(jobs, 0)
    assert worker.shutdown(0)
    assert list(ended(worker.get_finished()).items()) == [(job_id, False) for job_id in jobs]


# -- made by a spec -----------------------------------------------------------------------------

CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 64}


def caches(value=0, blocks=8):
    return {f"l{i}": torch.full((blocks, 16), value + i, dtype=torch.int8) for i in range(2)}


@pytest.mark.parametrize("spec_class", [CPUOffloadingSpec, TieringOffloadingSpec])
def test_handlers_copy_into_the_managers_buffer(spec_class):
    spec = spec_class(CONFIG)
    tensors = caches(3)
    worker = spec.create_handlers(tensors)
    rows = np.asarray(spec.get_manager().get_primary_kv_view())
    worker.submit_store(1, job((2,), (5,)))
    assert worker.wait({1}, DEADLINE_S)
    assert rows[5, :32].tolist() == [3] * 16 + [4] * 16
    rows[6, :32] = 9
    worker.submit_load(2, job((0,), (6,)))
    assert worker.wait({2}, DEADLINE_S)
    assert tensors["l1"][0].tolist() == [9] * 16
    assert ended(worker.get_finished()) == {1: True, 2: True}
    assert worker.shutdown(DEADLINE_S)
    manager = spec.get_manager()
    del rows
    manager.shutdown()
    if spec_class is TieringOffloadingSpec:
        spec.shutdown()


def test_each_worker_has_its_cell_of_a_slot():
    spec = CPUOffloadingSpec({**CONFIG, "num_workers": 2})
    workers = [spec.create_handlers(caches(10 * i), worker_index=i) for i in range(2)]
    for worker in workers:
        worker.submit_store(1, job((0,), (3,)))
    assert all(worker.wait({1}, DEADLINE_S) for worker in workers)
    row = np.asarray(spec.get_manager().get_primary_kv_view())[3]
    assert row[:32].tolist() == [0] * 16 + [1] * 16
    assert row[64:96].tolist() == [10] * 16 + [11] * 16
    output = summed([worker.build_output()[0] for worker in workers])
    assert output == ConnectorOutput({1: 2}, frozenset())
    assert all(worker.shutdown(DEADLINE_S) for worker in workers)
    del row
    spec.get_manager().shutdown()


def test_handlers_take_groups_and_other_block_dimensions():
    spec = CPUOffloadingSpec({**CONFIG, "blocks_per_chunk": 2})
    tensors = {
        "a": torch.ones(2, 4, 8, dtype=torch.uint8),
        "b": torch.ones(2, 4, 4, dtype=torch.uint8),
    }
    layout = spec.transport_maker(tensors, [["a"], ["b"]], block_dim=1).args[0]
    assert [len(group) for group in layout.groups] == [2, 2]
    assert (layout.blocks_per_chunk, layout.chunk_bytes) == (2, 32)
    worker = spec.create_handlers(tensors, [["a"], ["b"]], block_dim=1)
    assert worker.shutdown(DEADLINE_S)
    spec.get_manager().shutdown()


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"l": torch.zeros(4, 65, dtype=torch.uint8)}, {}, "block_bytes: 64 bytes do not hold"),
        (caches(), {"worker_index": 1}, "worker_index: 1 is not valid; num_workers is 1"),
        (caches(), {"worker_index": -1}, "worker_index: -1"),
        (caches(), {"groups": [["m"]]}, "'m'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_memory_is_mapped(tensors, options, message):
    spec = CPUOffloadingSpec(CONFIG)
    with pytest.raises(ConfigError, match=message):
        spec.create_handlers(tensors, **options)
    assert spec._manager is None
