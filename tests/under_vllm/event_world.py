"""A consumer of KV cache events behind vLLM's own tracker, over a manager that stores and evicts.

Requests are vLLM's; `Tracked` records in the tracker what vLLM's scheduler records there, and when.
"""

from collections import Counter

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_offload import base
from vllm.v1.request import Request

BLOCK_TOKENS = 4
CHUNKS = 2
"""Chunks of each request."""
HAS_METADATA_ONLY = "metadata_only" in base.OffloadingEvent.__dataclass_fields__


class Router:
    """A consumer: counts how often each hash is announced in each location."""

    def __init__(self):
        self.counts = Counter()

    def read(self, events):
        for event in events:
            for block_hash in event.block_hashes:
                location = (event.medium, event.ownership, block_hash)
                if isinstance(event, BlockStored):
                    assert event.token_ids, "a placeholder"
                    self.counts[location] += 1
                else:
                    assert self.counts[location] > 0, "removed, and was never stored"
                    self.counts[location] -= 1

    def hashes(self, medium, ownership=None):
        """Return the hashes that are at a location, each as often as it is announced."""
        return self.hashes_by_location().get((medium, ownership), [])

    def hashes_by_location(self):
        """Return the same for every location that has any."""
        found = {}
        for medium, ownership, block_hash in self.counts.elements():
            found.setdefault((medium, ownership), []).append(block_hash)
        return {location: sorted(hashes) for location, hashes in found.items()}

    def has_lost(self, medium):
        """Tell whether something was removed from a medium."""
        return any(location[0] == medium and not count for location, count in self.counts.items())


class Tracked:
    """A manager, vLLM's tracker, and a router behind them."""

    def __init__(self, manager, until, blocks_per_chunk):
        init_none_hash(sha256)
        self.manager = manager
        self.tracker = OffloadingEventsTracker(
            base.OffloadingKVEventsConfig(
                enable_kv_cache_events=True, self_describing_kv_events=True
            )
        )
        self.router = Router()
        self.hashes_of = {}
        self._until = until
        self._blocks_per_chunk = blocks_per_chunk
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._group = GroupOffloadConfig(
            group_idx=0,
            tokens_per_block=BLOCK_TOKENS,
            tokens_per_chunk=BLOCK_TOKENS * blocks_per_chunk,
            hashes_per_chunk=blocks_per_chunk,
            kv_event_group_spec=OffloadingEventGroupSpec(None, None),
            sliding_window_size_in_chunks=None,
            kv_cache_spec=None,
            manager_cls=None,
        )
        self._born = 0

    # -- what a scheduler does ------------------------------------------------------------------

    def keys_of(self, number):
        """Return the keys of the `number`-th prompt's chunks."""
        return self._prompt(number)[1]

    def request(self, number):
        """Begin a request whose prompt is the `number`-th; return it, its context and its keys."""
        request, keys = self._prompt(number)
        context = base.ReqContext(req_id=request.request_id)
        self.manager.on_new_request(context)
        return request, context, keys

    def _prompt(self, number):
        self._born += 1
        per_chunk = self._blocks_per_chunk
        tokens = [1000 + number] * (BLOCK_TOKENS * per_chunk * CHUNKS)
        request = Request(
            f"r{self._born}", tokens, SamplingParams(max_tokens=1), None, block_hasher=self._hasher
        )
        keys = []
        for chunk in range(CHUNKS):
            hashes = request.block_hashes[chunk * per_chunk : (chunk + 1) * per_chunk]
            keys.append(base.make_offload_key(hashes[-1], 0))
            self.hashes_of[keys[-1]] = [maybe_convert_block_hash(h) for h in hashes]
        return request, keys

    def begin_store(self, number):
        """Reserve what is missing of a prompt; return how to end that."""
        request, context, keys = self.request(number)
        output = self.manager.prepare_store(keys, context)
        granted = list(output.keys_to_store) if output is not None else []
        for key in granted:
            self.tracker.record_store(request, self._group, keys.index(key), key)

        def end(success=True):
            if granted:
                self.manager.complete_store(granted, context, success)
            self.manager.on_request_finished(context)

        return end

    def store(self, number):
        self.begin_store(number)()

    def load(self, number):
        """Look a prompt up until every answer is final, and load what is there."""
        request, context, keys = self.request(number)
        hits = []

        def is_final():
            hits.clear()
            for index, key in enumerate(keys):
                answer = self.manager.lookup(key, context)
                is_hit = answer is base.LookupResult.HIT
                if is_hit or (answer is base.LookupResult.HIT_PENDING and HAS_METADATA_ONLY):
                    self.tracker.record_lookup(request, self._group, index, key)
                if answer is base.LookupResult.MISS:
                    break
                if not is_hit:
                    return False
                hits.append(key)
            return True

        self._until(is_final)
        if hits:
            self.manager.prepare_load(hits, context)
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return len(hits)

    def finish_jobs(self):
        self._until(self._is_at_rest)

    def _is_at_rest(self):
        if self.manager.has_pending_work():
            self.publish()  # as vLLM's scheduler does in each step
        return not self.manager.has_pending_work()

    def publish(self):
        """End a step: what the manager tells goes through the tracker to the router."""
        self.router.read(self.tracker.take_events(list(self.manager.take_events())))

    def reset(self):
        """Reset as the scheduler does; vLLM tells consumers that everything is gone."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()
        self.tracker.reset()
        self.router.counts.clear()

    # -- what must be true ----------------------------------------------------------------------

    def expected(self, keys):
        """Return the hashes of blocks that are at a location."""
        return sorted(block_hash for key in keys for block_hash in self.hashes_of[key])

    def tracked(self):
        """Return the blocks that vLLM's tracker keeps metadata of."""
        return set(self.tracker._pending_event_metadata)
