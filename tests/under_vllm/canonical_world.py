"""Engines of several ranks with canonical pages, whose contents are slices of one plain array.

vLLM registers the tensors and derives the mappings, as in a worker's process.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from engine_world import Pair
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_offload import config as vllm_config
from vllm_world import make_config

from kvoffload_async.integrations.vllm.spec import KVOffloadSpec

DEVICE_BLOCKS = 12
TOKENS = 16
LATENT = "latent"


@dataclass(frozen=True)
class Model:
    """The shape of a model's KV cache.

    `kind`: "packed" (K and V of a head together), "split" (all K before all V), or `LATENT`.
    `order`: "NHD" (tokens before heads) or "HND".
    """

    kind: str = "packed"
    order: str = "NHD"
    heads: int = 8
    head_size: int = 4
    layers: int = 2

    @property
    def names(self):
        return tuple(f"layer.{number}" for number in range(self.layers))

    @property
    def axes(self):
        """The order in a page of the axes of `contents`: block, K or V, token, head, dimension."""
        inner = (0, 2, 3) if self.order == "NHD" else (0, 3, 2)
        if self.kind == "packed":
            return (*inner, 1, 4)
        return (0, 1, *inner[1:], 4)

    def contents(self, seed, device_blocks=DEVICE_BLOCKS):
        """Return the KV cache of each layer without parallelism, float16."""
        sides = 1 if self.kind == LATENT else 2
        shape = (device_blocks, sides, TOKENS, self.heads, self.head_size)
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 1 << 15, shape, np.uint16) for _ in range(self.layers)]

    def pages(self, content):
        """Return the bytes of contents as they lie in pages: `[blocks, page_bytes]`."""
        laid = np.ascontiguousarray(content.transpose(self.axes))
        return laid.view(np.uint8).reshape(len(content), -1)

    def heads_of(self, rank, ranks):
        """Return the heads that a rank has; ranks beyond the heads have equal ones."""
        if self.kind == LATENT:
            return slice(None)
        count = max(1, self.heads // ranks)
        first = rank * self.heads // ranks
        return slice(first, first + count)

    def tensor(self, content):
        """Return a rank's KV cache as vLLM's attention sees it; a view of other strides."""
        laid = np.ascontiguousarray(content.transpose(self.axes))
        tensor = torch.from_numpy(laid.view(np.float16))
        if self.kind == LATENT:
            return tensor.squeeze(3).squeeze(1)
        if self.kind == "packed":  # [block, head, token, K and V]
            tensor = tensor.flatten(3)
            return tensor.transpose(1, 2) if self.order == "NHD" else tensor
        return tensor if self.order == "NHD" else tensor.transpose(2, 3)

    def cache_spec(self, ranks):
        if self.kind == LATENT:
            return MLAAttentionSpec(
                block_size=TOKENS, num_kv_heads=1, head_size=self.head_size, dtype=torch.float16
            )
        return FullAttentionSpec(
            block_size=TOKENS,
            num_kv_heads=max(1, self.heads // ranks),
            head_size=self.head_size,
            dtype=torch.float16,
        )


class CanonicalPair(Pair):
    """A `Pair` whose ranks share rows of canonical pages.

    Attributes:
        row_bytes: Bytes of a row's canonical pages.
    """

    def __init__(
        self, engine_id, model, ranks, tiers=(), *, blocks_per_chunk=1, slots=8, **changes
    ):
        self.model, self.ranks, self.blocks_per_chunk = model, ranks, blocks_per_chunk
        spec = model.cache_spec(ranks)
        config = make_config(list(tiers), engine_id, tp_size=ranks, world_size=ranks)
        parallel = replace(config.parallel, is_parallelism_agnostic=True)
        whole = model.pages(model.contents(0, 1)[0]).shape[1] * model.layers
        self.row_bytes = whole * blocks_per_chunk
        self.config = replace(
            config,
            groups=(vllm_config.OffloadingGroupConfig(TOKENS, model.names, 0),),
            cache=replace(config.cache, blocks_per_chunk=blocks_per_chunk),
            worker_kv_bytes_per_block=spec.page_size_bytes * model.layers,
            parallel=parallel,
            replicated_layout=model.kind == LATENT,
            canonical_layout=True,
            kv_cache_layout={"NHD": "LBNHC", "HND": "LBHNC"}[model.order],
            extra_config={
                "cpu_bytes_to_use": slots * -(-self.row_bytes // 4096) * 4096,
                "secondary_tiers": list(tiers),
                "check_invariants": True,
                "canonical_layout": True,
            },
        )
        self.config = replace(self.config, **changes)
        self.cache_config = KVCacheConfig(
            num_blocks=DEVICE_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(model.names), spec)],
        )
        self.tensors = [self.parts_of(rank, model.contents(0)) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as threads:  # the ranks wait for each other
            self.workers = list(threads.map(self.worker, range(ranks)))
        self.spec = KVOffloadSpec(self.config)
        try:
            self.manager = self.spec.get_manager()
        except BaseException:
            for worker in self.workers:
                worker.shutdown()
            raise
        self._requests = self._jobs = 0

    def worker(self, rank):
        """Let vLLM register a rank's tensors, and return the rank's worker."""
        parallel = SimpleNamespace(
            tensor_parallel_size=self.ranks,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=self.ranks,
            rank=rank,
        )
        total = 1 if self.model.kind == LATENT else self.model.heads
        around = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total),
        )
        spec = KVOffloadSpec(
            replace(self.config, parallel=replace(self.config.parallel, rank=rank))
        )
        registering = OffloadingConnectorWorker(spec, around, self.cache_config)
        caches = dict(zip(self.model.names, self.tensors[rank], strict=True))
        registering.register_kv_caches(caches)
        return registering.worker

    def fill(self, seed):
        """Give every rank its part of new contents; return the contents of each layer."""
        contents = self.model.contents(seed)
        for rank, tensors in enumerate(self.tensors):
            for tensor, part in zip(tensors, self.parts_of(rank, contents), strict=True):
                tensor.copy_(part)
        return contents

    def parts_of(self, rank, contents):
        """Return the tensors of a rank that has its part of contents."""
        heads = self.model.heads_of(rank, self.ranks)
        return [self.model.tensor(content[:, :, :, heads]) for content in contents]

    def rows(self):
        """Return the canonical pages of all slots, uint8 `[slots, row_bytes]`."""
        return np.asarray(self.workers[0]._buffer.view)[:, : self.row_bytes]

    def row_of(self, contents, blocks):
        """Return a row as anybody would write it down: tensor after tensor, block after block."""
        pages = [self.model.pages(content[list(blocks)]) for content in contents]
        return np.concatenate([page.reshape(-1) for page in pages])

    def has(self, contents, blocks):
        """Tell whether every rank has its part of contents in device blocks."""
        blocks = list(blocks)
        return all(
            torch.equal(tensor[blocks].view(torch.int16), part[blocks].view(torch.int16))
            for rank, tensors in enumerate(self.tensors)
            for tensor, part in zip(tensors, self.parts_of(rank, contents), strict=True)
        )
