"""vLLM's own scheduler, connector and worker, with a model that sleeps instead of computing.

The copies between device, primary and tiers are real. A tier's jobs can be given a latency, and
loads can be made to fail for a while: `Disturbance`.
"""

import asyncio
import os
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from itertools import count

import torch
from tiny_model import save_tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.fs import manager as vllms_fs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.integrations.vllm.host_tiering import HostTieringOffloadingSpec
from kvoffload_async.integrations.vllm.spec import KVOffloadSpec
from kvoffload_async.tiers.fs.tier import FsTier
from kvoffload_async.tiers.slab.tier import SlabTier

BLOCK = 32
PAGE_BYTES = 2 * BLOCK * 16 * 4
DEVICE_BLOCKS = 400
DEADLINE_S = 120.0
MODULE = "kvoffload_async.integrations.vllm"
PREFETCH, WITHOUT, VLLMS = "prefetch", "without", "vLLM's"
SIDES = (PREFETCH, WITHOUT, VLLMS)
_numbers = count()


class Disturbance:
    """What the tiers of this process suffer; shared, because hosts create tiers by name."""

    job_s = 0.0
    loads_fail_until_s = 0.0
    promoted: list = []  # noqa: RUF012 - one process, one engine at a time
    """The keys of each load that has ended well."""

    @classmethod
    def clear(cls):
        cls.job_s = cls.loads_fail_until_s = 0.0
        cls.promoted = []

    @classmethod
    def check_load(cls):
        if time.monotonic() < cls.loads_fail_until_s:
            raise OSError("drawn")


def disturbed(tier_class):
    class Disturbed(tier_class):
        async def store(self, job):
            await asyncio.sleep(Disturbance.job_s)
            return await super().store(job)

        async def load(self, job):
            await asyncio.sleep(Disturbance.job_s)
            Disturbance.check_load()
            failures = await super().load(job)
            Disturbance.promoted += [key for key in job.keys if key not in failures]
            return failures

    Disturbed.__name__ = Disturbed.__qualname__ = f"Disturbed{tier_class.__name__}"
    return Disturbed


_TIERS = {"disturbed_fs": disturbed(FsTier), "disturbed_slab": disturbed(SlabTier)}


class DisturbedPool(vllms_fs.DualQueueThreadPool):
    """The threads of vLLM's `fs` tier."""

    def enqueue_load(self, job_id, n_tasks, tasks):
        super().enqueue_load(job_id, n_tasks, [self._late(task, is_load=True) for task in tasks])

    def enqueue_store(self, job_id, n_tasks, tasks):
        super().enqueue_store(job_id, n_tasks, [self._late(task, is_load=False) for task in tasks])

    @staticmethod
    def _late(task, *, is_load):
        def run():
            if Disturbance.job_s:
                threading.Event().wait(Disturbance.job_s)
            if is_load:
                Disturbance.check_load()
            task()

        return run


class CountingFsTier(vllms_fs.FileSystemTierManager):
    """vLLM's `fs` tier; it notes what it has loaded."""

    stored = 0

    def submit_store(self, job_metadata):
        self.stored += len(job_metadata.keys)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata):
        super().submit_load(job_metadata)
        self._loading = {**getattr(self, "_loading", {}), job_metadata.job_id: job_metadata.keys}

    def get_finished_jobs(self):
        results = list(super().get_finished_jobs())
        for result in results:
            keys = getattr(self, "_loading", {}).pop(result.job_id, ())
            landed = keys if result.success else getattr(result, "successful_keys", None) or ()
            Disturbance.promoted += landed
        return results


def install(monkeypatch):
    """Let configurations name the tiers above; vLLM's `fs` is replaced."""
    ours = SecondaryTierFactory._registry
    loaders = {name: lambda tier=tier: tier for name, tier in _TIERS.items()}
    monkeypatch.setattr(ours, "_loaders", {**ours._loaders, **loaders})
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory as Theirs

    monkeypatch.setattr(Theirs, "_registry", {**Theirs._registry, "fs": lambda: CountingFsTier})
    monkeypatch.setattr(vllms_fs, "DualQueueThreadPool", DisturbedPool)
    monkeypatch.setattr(Disturbance, "promoted", [])


@dataclass
class Chat:
    """A request, and what became of it; times in seconds since the chats came."""

    request: Request
    known: int = 0
    first_token_s: float | None = None
    external: int = 0


@dataclass
class Outcome:
    """The figures of a run."""

    first_tokens_s: list = field(default_factory=list)
    total_s: float = 0.0
    share: float = 0.0
    prefetched: int = 0
    unused: int = 0
    in_vain: int = 0
    stores: int = 0
    fullness: float = 0.0
    expired: int = 0

    @property
    def p50(self):
        return statistics.median(self.first_tokens_s)

    @property
    def p95(self):
        times = sorted(self.first_tokens_s)
        return times[min(len(times) - 1, round(0.95 * len(times) - 0.5))]


def words(number, length):
    rng = random.Random(number)
    return [rng.randrange(400) for _ in range(length)]


class Queued:
    """An engine over a tier in a folder.

    Attributes:
        token_s: What the model takes for a token, and `overhead_s` for a step besides.
    """

    def __init__(self, folder, model, side, tier, *, host_blocks, seqs, token_s, overhead_s):
        self.side, self.seqs, self.token_s, self.overhead_s = side, seqs, token_s, overhead_s
        name = {"type": f"disturbed_{tier}" if side != VLLMS else "fs"}
        if side != VLLMS and tier == "slab":
            name["capacity_bytes"] = 64 << 20
        transfer = {
            "kv_connector": "OffloadingConnector" if side == VLLMS else "KVOffloadConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": f"kvoffload-test-queued-{os.getpid()}-{next(_numbers)}",
            "kv_connector_extra_config": {
                "spec_name": "HostTieringOffloadingSpec" if side == VLLMS else "KVOffloadSpec",
                "spec_module_path": MODULE,
                "cpu_bytes_to_use": host_blocks * PAGE_BYTES,
                "secondary_tiers": [{**name, "root_dir": str(folder)}],
            },
        }
        if side != VLLMS:
            transfer["kv_connector_module_path"] = MODULE
        config = EngineArgs(
            model=str(model),
            max_model_len=2048,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK,
            max_num_batched_tokens=2048,
            max_num_seqs=seqs,
            kv_transfer_config=transfer,
            async_scheduling=False,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = DEVICE_BLOCKS
        attention = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        cache = KVCacheConfig(DEVICE_BLOCKS, [], [KVCacheGroupSpec(["full"], attention)])
        spec_class = HostTieringOffloadingSpec if side == VLLMS else KVOffloadSpec
        spec = spec_class(build_offloading_config(config, cache))
        pages = torch.zeros((DEVICE_BLOCKS, PAGE_BYTES), dtype=torch.int8)
        self.worker = OffloadingConnectorWorker(spec, config, cache)
        self.worker._init_worker(
            base.CanonicalKVCaches(
                [base.CanonicalKVCacheTensor(pages, PAGE_BYTES)],
                [[base.CanonicalKVCacheRef(0, PAGE_BYTES)]],
            )
        )
        self.scheduler = Scheduler(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.manager = self.scheduler.connector.connector_scheduler.manager
        if side == WITHOUT:
            self.manager.prefetch = lambda *_: None
        self._watch()
        self.chats = {}
        self._start_s = time.perf_counter()
        self._places = []

    def _watch(self):
        """Note what is loaded to the device, and of which request."""
        self.loaded = []
        """Pairs: the number of promoted keys until then, and the keys loaded."""
        connector, manager = self.scheduler.connector, self.manager
        prepare_load, place = manager.prepare_load, connector.update_state_after_alloc

        def load(keys, context):
            self.loaded.append((len(Disturbance.promoted), frozenset(keys)))
            return prepare_load(keys, context)

        def placed(request, blocks, tokens):
            if request.request_id in self.chats:
                self.chats[request.request_id].external += tokens  # 0 once they are loaded
            return place(request, blocks, tokens)

        manager.prepare_load, connector.update_state_after_alloc = load, placed

    # -- what comes -----------------------------------------------------------------------------

    def arrive(self, tokens, max_tokens=1, known=0):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            f"r{next(_numbers)}", list(tokens), sampling, None, block_hasher=self._hasher
        )
        self.chats[request.request_id] = Chat(request, known)
        self.scheduler.add_request(request)
        return request

    def abort(self, request):
        del self.chats[request.request_id]
        self.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)

    # -- steps ----------------------------------------------------------------------------------

    def step(self):
        output = self.scheduler.schedule()
        meta, worker = output.kv_connector_metadata, self.worker
        worker.handle_preemptions(meta)
        worker.start_kv_transfers(meta)
        tokens = output.total_num_scheduled_tokens
        if tokens:
            wait(self.overhead_s + tokens * self.token_s)
            self._places.append(len(output.num_scheduled_tokens))
        worker.prepare_store_kv(meta)
        _, received = worker.get_finished(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_recving=received,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        sampled = {}
        for req_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[req_id]
            is_last = request.num_computed_tokens >= request.num_tokens
            sampled[req_id] = [7] if is_last else []
        req_ids = list(sampled)
        result = ModelRunnerOutput(
            req_ids,
            {req_id: at for at, req_id in enumerate(req_ids)},
            list(sampled.values()),
            kv_connector_output=report,
        )
        self.scheduler.update_from_output(output, result)
        now_s = time.perf_counter() - self._start_s
        for req_id, tokens_of in sampled.items():
            chat = self.chats.get(req_id)
            if tokens_of and chat is not None and chat.first_token_s is None:
                chat.first_token_s = now_s
        if not tokens:
            wait(0.001)  # as vLLM's engine does

    def step_until(self, is_done):
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < deadline_s, f"not done within {DEADLINE_S} s"
            self.step()

    def rest(self):
        """Step until nothing is under way."""
        self.step_until(
            lambda: (
                not self.scheduler.has_unfinished_requests()
                and not self.scheduler.connector.has_pending_push_work()
                and not self.manager.has_pending_work()
            )
        )

    # -- a run ----------------------------------------------------------------------------------

    def fill(self, chats):
        """Compute chats, one after another, until the tier has them."""
        for tokens in chats:
            self.arrive(tokens)
            self.rest()

    def serve(self, chats, *, busy=False, failing_s=0.0, abort_after_s=None):
        """Serve chats that return at once; return the figures.

        Args:
            chats: Pairs: the tokens, and how many of them the tier has.
            busy: Whether all places are taken when they come.
            failing_s: Seconds from then on during which all loads fail.
            abort_after_s: Seconds after which every third chat that waits is aborted.
        """
        for place in range(self.seqs if busy else 0):
            self.arrive(words(f"busy {place}", 64), max_tokens=120 + 20 * place)
        self.step_until(lambda: len(self.scheduler.running) == (self.seqs if busy else 0))
        stored = self._stored()
        self.chats.clear()
        self.loaded.clear()
        self._places.clear()
        Disturbance.promoted = []
        self._start_s = time.perf_counter()
        if failing_s:
            Disturbance.loads_fail_until_s = time.monotonic() + failing_s
        requests = [self.arrive(tokens, 8, known) for tokens, known in chats]
        if abort_after_s is not None:
            self.step_until(lambda: time.perf_counter() - self._start_s > abort_after_s)
            for request in requests[::3]:
                if request.status is not RequestStatus.RUNNING and not request.is_finished():
                    self.abort(request)
        self.step_until(lambda: not self.scheduler.has_unfinished_requests())
        total_s = time.perf_counter() - self._start_s
        places = list(self._places)
        self.rest()
        served = list(self.chats.values())
        outcome = Outcome(
            first_tokens_s=[chat.first_token_s for chat in served],
            total_s=total_s,
            share=sum(c.external for c in served) / max(1, sum(c.known for c in served)),
            in_vain=self._in_vain(),
            stores=self._stored() - stored,
            fullness=statistics.mean(places) / self.seqs,
        )
        if self.side != VLLMS:
            planner = self.manager.manager.planner
            counters = planner.tiers[0].counters
            outcome.prefetched = counters.prefetched_blocks
            outcome.unused = counters.unused_prefetched_blocks
            outcome.expired = planner.counters.deferrals_expired
        return outcome

    def _stored(self):
        if self.side == VLLMS:
            return self.manager.secondary_tiers[0].stored
        return self.manager.manager.planner.tiers[0].counters.stored_blocks

    def _in_vain(self):
        """Count the promoted blocks that no request has loaded before they were promoted again."""
        waiting, in_vain, done = set(), 0, 0
        for until, keys in [*self.loaded, (len(Disturbance.promoted), frozenset())]:
            for key in Disturbance.promoted[done:until]:
                in_vain += key in waiting
                waiting.add(key)
            waiting -= keys
            done = until
        return in_vain + len(waiting)

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


def wait(seconds):
    """Sleep: that is what the model does."""
    if seconds > 0:
        threading.Event().wait(seconds)


def tiny_model(folder):
    return save_tiny_model(folder / "model")
