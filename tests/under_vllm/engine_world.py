"""The whole engine without a model: `KVOffloadSpec` for a scheduler and for each of its workers.

Each worker has KV-cache tensors of its own; what is written into a device block there comes back
from the primary, or does not.
"""

import threading
import time
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.kv_offload import base
from vllm_world import DEADLINE_S, make_config

from kvoffload_async.integrations.vllm.spec import KVOffloadSpec

DEVICE_BLOCKS = 12
PAGE_BYTES = 512
EXAMPLE = ({"type": "example"},)


class Pair:
    """A scheduler's manager and its workers, each with a spec and a mapping of its own.

    Attributes:
        manager: The scheduler's.
        workers: One a rank.
        tensors: The device tensors of each rank, uint8 `[DEVICE_BLOCKS, PAGE_BYTES]`.
    """

    def __init__(
        self,
        engine_id,
        tiers=(),
        *,
        ranks=1,
        groups=((0, 1),),
        num_tensors=2,
        blocks_per_chunk=1,
        slots=8,
        replicated=False,
        extra=(),
        events=False,
        model="org/model",
        **parallel,
    ):
        config = make_config(list(tiers), engine_id, events=events, groups=len(groups), **parallel)
        row = num_tensors * PAGE_BYTES * blocks_per_chunk * (1 if replicated else ranks)
        stride = -(-row // 4096) * 4096
        self.config = replace(
            config,
            worker_kv_bytes_per_block=num_tensors * PAGE_BYTES,
            cache=replace(config.cache, blocks_per_chunk=blocks_per_chunk),
            model=replace(config.model, name=model),
            replicated_layout=replicated,
            extra_config={
                "cpu_bytes_to_use": slots * stride,
                "secondary_tiers": list(tiers),
                "check_invariants": True,
                **dict(extra),
            },
        )
        self.blocks_per_chunk = blocks_per_chunk
        self.groups = groups
        self.tensors = []
        self.workers = []
        self.specs = []
        for rank in range(ranks):
            parallel = replace(config.parallel, rank=rank, world_size=ranks, tp_size=ranks)
            spec = KVOffloadSpec(replace(self.config, parallel=parallel))
            tensors = [strided_pages() for _ in range(num_tensors)]
            self.specs.append(spec)
            self.tensors.append(tensors)
            self.workers.append(spec.get_worker(canonical(tensors, groups)))
        scheduler = replace(config.parallel, rank=0, world_size=ranks, tp_size=ranks)
        self.spec = KVOffloadSpec(replace(self.config, parallel=scheduler))
        try:
            self.manager = self.spec.get_manager()
        except BaseException:
            for worker in self.workers:
                worker.shutdown()
            raise
        self._requests = 0
        self._jobs = 0

    def request(self, **context):
        self._requests += 1
        request = base.ReqContext(req_id=f"r{self._requests}", **context)
        self.manager.on_new_request(request)
        return request

    def device(self, blocks, first=None):
        """Return device blocks, one list a group, as vLLM names them."""
        return base.GPULoadStoreSpec(
            [block for group in blocks for block in group],
            group_sizes=[len(group) for group in blocks],
            block_indices=first or [0] * len(blocks),
        )

    def store(self, keys, blocks, request=None, **device):
        """Store device blocks under keys; return what the primary granted."""
        request = request or self.request()
        output = self.manager.prepare_store(keys, request)
        if output is None or not output.keys_to_store:
            return output
        job_id = self.next_job()
        for worker in self.workers:
            assert worker.submit_store(job_id, self.device(blocks, **device), output.store_spec)
        self.ended(job_id)
        self.manager.complete_store(set(output.keys_to_store), request)
        return output

    def load(self, keys, blocks, request=None, **device):
        """Look keys up until they are hits, and load them into device blocks."""
        request = request or self.request()
        self.until(lambda: self.lookups(keys, request) == ["HIT"] * len(keys))
        spec = self.manager.prepare_load(keys, request)
        job_id = self.next_job()
        for worker in self.workers:
            assert worker.submit_load(job_id, spec, self.device(blocks, **device))
        self.ended(job_id)
        self.manager.complete_load(set(keys), request)

    def lookups(self, keys, request=None):
        request = request or self.request()
        return [self.manager.lookup(key, request).name for key in keys]

    def final(self, keys):
        """Look keys up until no answer is pending; return the answers."""
        request = self.request()
        answers = []

        def is_final():
            answers[:] = self.lookups(keys, request)
            return set(answers) <= {"HIT", "MISS"}

        self.until(is_final)
        return answers

    def next_job(self):
        self._jobs += 1
        return self._jobs

    def ended(self, job_id):
        """Wait for a job of every worker; its results are taken."""
        for worker in self.workers:
            worker.wait({job_id})
            assert [result.job_id for result in worker.get_finished()] == [job_id]

    def step(self):
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))

    def finish_jobs(self):
        self.step()
        self.until(lambda: not self.manager.has_pending_work())

    def until(self, is_done):
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.002)  # paces the polling; nothing depends on its length
            self.step()

    def fill(self, seed):
        """Give every device byte of every rank a value of its own; return copies."""
        for rank, tensors in enumerate(self.tensors):
            for index, tensor in enumerate(tensors):
                noise = np.random.default_rng([seed, rank, index])
                tensor.copy_(torch.from_numpy(noise.integers(-128, 128, tensor.shape, np.int8)))
        return self.copies()

    def copies(self):
        return [[tensor.clone() for tensor in tensors] for tensors in self.tensors]

    def close(self):
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


def strided_pages():
    """Return int8 pages with something between them, as in vLLM's packed layouts."""
    backing = torch.zeros((DEVICE_BLOCKS, PAGE_BYTES + 64), dtype=torch.int8)
    return backing[:, :PAGE_BYTES]


def canonical(tensors, groups):
    """Return vLLM's description of tensors; `groups` name theirs by index."""
    return base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in tensors],
        [[base.CanonicalKVCacheRef(index, PAGE_BYTES) for index in group] for group in groups],
    )


def hooks(pair):
    return [worker._copies.transport.before_copy for worker in pair.workers]


def failing(pair, direction, rank=0):
    def fail(_copies):
        raise OSError("drawn")

    hooks(pair)[rank][direction] = fail
