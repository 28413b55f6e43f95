"""Specs that spoil bytes or fail copies on purpose, as `spec_module_path` of an engine run."""

import numpy as np

from kvoffload_async.abc.tier import Direction
from kvoffload_async.integrations.vllm import KVOffloadSpec


class ZeroingSpec(KVOffloadSpec):
    """Loads zeros instead of a prompt's blocks."""

    def get_worker(self, kv_caches):
        worker = super().get_worker(kv_caches)
        rows = np.asarray(worker._buffer.view)
        load = worker.submit_load

        def load_zeros(job_id, src_spec, dst_spec, expedited=False):
            rows[self.spoiled(src_spec.block_ids)] = 0
            return load(job_id, src_spec, dst_spec, expedited)

        worker.submit_load = load_zeros
        return worker

    def spoiled(self, slots):
        return slots


class ZeroingOneSpec(ZeroingSpec):
    """Loads zeros instead of one block of a prompt."""

    def spoiled(self, slots):
        return slots[len(slots) // 2 : len(slots) // 2 + 1]


class FailingLoadSpec(KVOffloadSpec):
    """Its first load fails."""

    direction = Direction.LOAD

    def get_worker(self, kv_caches):
        worker = super().get_worker(kv_caches)
        failed = []

        def fail_once(_copies):
            if not failed:
                failed.append(True)
                raise OSError("drawn")

        worker._copies.transport.before_copy[self.direction] = fail_once
        return worker


class FailingStoreSpec(FailingLoadSpec):
    """Its first store fails."""

    direction = Direction.STORE
