"""vLLM's own scheduler and our worker for a model with full and sliding-window attention.

There is no model: the KV of a token is its group and the whole text up to it, by number. Every key
that the primary has must have the KV of its own text.
"""

import itertools

import numpy as np
import torch
from tiny_model import save_tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload import base
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvoffload_async.facade.tenants import untagged
from kvoffload_async.integrations.vllm.spec import KVOffloadSpec
from kvoffload_async.types import (
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

BLOCK = 16
WINDOW = 2 * BLOCK
MODULE = "kvoffload_async.integrations.vllm"
PAGE_BYTES = 2 * BLOCK * 16 * 4
PAGE_TOKENS = PAGE_BYTES // 8
GARBAGE = "garbage"


class Hybrid:
    """A scheduler with its connector; the workers are in `step`.

    Attributes:
        device: Numbers of contents, shape `[num_blocks, PAGE_TOKENS]`, shared by the groups.
        texts: The text of each block hash.
        wrong_reads: How often a request has computed from wrong bytes.
    """

    def __init__(
        self, folder, engine_id, connector, *, num_blocks=40, retained=0, interval=0, **extra
    ):
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": engine_id,
            "kv_connector_extra_config": {
                "spec_name": "KVOffloadSpec",
                "spec_module_path": MODULE,
                "cpu_bytes_to_use": 64 * 65536,
                "check_invariants": True,
                **extra,
            },
        }
        if connector == "KVOffloadConnector":
            transfer["kv_connector_module_path"] = MODULE
        config = EngineArgs(
            model=str(save_tiny_model(folder)),
            max_model_len=512,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK,
            max_num_batched_tokens=512,
            kv_transfer_config=transfer,
            async_scheduling=False,
            prefix_cache_retention_interval=interval,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
        groups = [
            KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)),
            KVCacheGroupSpec(
                ["window"],
                SlidingWindowSpec(**shape, sliding_window=WINDOW, extra_retained_tokens=retained),
            ),
        ]
        self.windows = [None, WINDOW]
        self.per_chunk = extra.get("blocks_per_chunk", 1)
        cache = KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=interval)
        pages = torch.zeros((num_blocks, PAGE_BYTES), dtype=torch.int8)
        self.device = pages.numpy().view(np.int64)
        self.worker = _worker_of(config, cache, pages)
        self._rows = np.asarray(self.worker._buffer.view)
        self.scheduler = Scheduler(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._numbers = itertools.count()
        self._contents = [GARBAGE]
        self._numbers_of = {GARBAGE: 0}
        self.texts = {}
        self.deferred = {}
        self._loading = {}
        self.wrong_reads = 0
        self.loaded_blocks = 0
        self.compared = 0

    @property
    def connector(self):
        return self.scheduler.connector.connector_scheduler

    @property
    def primary(self):
        return self.connector.manager.manager.planner.primary

    def restarts(self, before):
        """Number texts as another world did, whose tiers this one shares."""
        self.texts, self._contents = before.texts, before._contents
        self._numbers_of = before._numbers_of

    def arrive(self, tokens, max_tokens=1, *, salt=None, params=None):
        extra = None if params is None else {"kv_transfer_params": params}
        request = Request(
            f"r{next(self._numbers)}",
            list(tokens),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
            None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self):
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        for job_id, job in self.deferred.items():
            self.worker.submit_store(job_id, job.src_spec, job.dst_spec)
        for job_id, job in meta.load_jobs.items():
            self.worker.submit_load(job_id, job.src_spec, job.dst_spec)
            self.loaded_blocks += len(job.dst_spec.block_ids)
            self._loading[job_id] = job.req_id
        self.worker.wait(self.deferred)
        ended = {result.job_id: 1 for result in self.worker.get_finished()}
        received = {self._loading.pop(job_id) for job_id in ended if job_id in self._loading}
        self.deferred = dict(meta.store_jobs)
        sampled = {}
        for req_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            self._compute(request, request.num_computed_tokens - count, count)
            is_last = request.num_computed_tokens >= request.num_tokens
            sampled[req_id] = [sum(request.all_token_ids) % 97] if is_last else []
        req_ids = list(sampled)
        report = KVConnectorOutput(
            finished_recving=received,
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=ended),
        )
        index = {req_id: at for at, req_id in enumerate(req_ids)}
        result = ModelRunnerOutput(
            req_ids, index, list(sampled.values()), kv_connector_output=report
        )
        self.scheduler.update_from_output(output, result)
        self.check()

    def run(self, *requests, max_steps=100):
        """Step until the requests have ended and their copies, too."""
        for _ in range(max_steps):
            self.step()
            if all(r.is_finished() for r in requests) and not self.deferred:
                self.step()
                return
        raise AssertionError("not at rest")

    def check(self):
        for key, slot, refs in self.primary.resident():
            if refs >= 0:
                group = get_offload_group_idx(key)
                text = self.texts[get_offload_block_hash(self.vllms(key))]
                size = BLOCK * self.per_chunk
                pages = self._rows[slot].view(np.int64)[: self.per_chunk * PAGE_TOKENS]
                numbers = pages.reshape(self.per_chunk, PAGE_TOKENS)[:, :BLOCK].flatten()
                assert [self._contents[number] for number in numbers] == [
                    (group, text[: at + 1]) for at in range(len(text) - size, len(text))
                ], f"wrong bytes of group {group}"
                self.compared += 1

    def vllms(self, key):
        """Return a key of the primary as vLLM has it."""
        return key if self.connector.manager.manager.tenants is None else untagged(key)

    def _compute(self, request, start, count):
        tokens = tuple(request.all_token_ids)
        for end, name in enumerate(request.block_hashes, 1):
            self.texts[bytes(name)] = tokens[: end * BLOCK]
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        is_right = all(
            self._contents[self.device[table[at // BLOCK], at % BLOCK]] == (group, tokens[: at + 1])
            for group, (table, window) in enumerate(zip(tables, self.windows, strict=True))
            for at in range(0 if window is None else max(0, start + 1 - window), start)
        )
        self.wrong_reads += not is_right
        for group, table in enumerate(tables):
            for at in range(start, start + count):
                content = (group, tokens[: at + 1] if is_right else GARBAGE)
                self.device[table[at // BLOCK], at % BLOCK] = self._number(content)

    def _number(self, content):
        if content not in self._numbers_of:
            self._numbers_of[content] = len(self._contents)
            self._contents.append(content)
        return self._numbers_of[content]

    def stored_in_tier(self, text, group):
        """Tell which of a text's whole blocks the first tier has, first block first."""
        (tier, *_) = self.connector.manager.manager.planner.tiers
        names = {known: name for name, known in self.texts.items()}
        ends = range(BLOCK, len(text) + 1, BLOCK)
        keys = [make_offload_key(names[tuple(text[:end])], group) for end in ends]
        return [not tier.index.lacks([key]) for key in keys]

    def close(self):
        self._rows = None
        self.worker.shutdown()
        self.scheduler.shutdown()


def _worker_of(vllm_config, kv_cache_config, tensor):
    """A worker as vLLM's connector creates it, from a frame with these arguments."""
    spec = KVOffloadSpec(build_offloading_config(vllm_config, kv_cache_config))
    tensors = [base.CanonicalKVCacheTensor(tensor, tensor.shape[1])]
    shared = [
        [base.CanonicalKVCacheRef(0, tensor.shape[1])] for _ in kv_cache_config.kv_cache_groups
    ]
    return spec.get_worker(base.CanonicalKVCaches(tensors, shared))
