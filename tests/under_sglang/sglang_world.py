"""SGLang's own controller over a host pool, as a rank's scheduler drives it, without a model."""

import threading
from types import SimpleNamespace

import stand_ins

stand_ins.install()

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

DEADLINE_S = 60.0
PAGE_SIZE, LAYERS = 16, 4
CPU = torch.device("cpu")
OURS = {
    "backend_name": "kvoffload",
    "module_path": "kvoffload_async.integrations.sglang",
    "class_name": "KVOffloadHiCache",
    "interface_v1": 1,
}
ALONE = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_dcp_rank": 0,
    "attn_dcp_size": 1,
}


def mha_pool(pages, layout, *, heads=2, dim=64, dtype=torch.bfloat16):
    """Return SGLang's host pool for multi-head attention."""
    layers = tuple(torch.empty(PAGE_SIZE, heads, dim, dtype=dtype) for _ in range(LAYERS))
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    buffers = KVBuffers(
        k=layers,
        v=layers,
        k_data_ptrs=pointers,
        v_data_ptrs=pointers,
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE_SIZE,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device=CPU,
    )
    return MHATokenToKVPoolHost(
        *(info, 1.0, 0, PAGE_SIZE, layout),
        pin_memory=False,
        device_capacity_tokens=PAGE_SIZE,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=pages * PAGE_SIZE,
    )


def mla_pool(pages, layout, *, rank=512, rope=64, dtype=torch.bfloat16):
    """Return SGLang's host pool for multi-head latent attention."""
    layers = tuple(torch.empty(PAGE_SIZE, 1, rank + rope, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=layers,
        data_ptrs=torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE_SIZE,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=dtype,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        *(info, 1.0, 0, PAGE_SIZE, layout),
        pin_memory=False,
        device_capacity_tokens=PAGE_SIZE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=pages * PAGE_SIZE,
    )


POOLS = {"mha": mha_pool, "mla": mla_pool}


class DevicePool:
    """What the controller asks of a pool on a device."""

    def __init__(self):
        self.device = CPU
        self.layer_num = LAYERS

    def register_layer_transfer_counter(self, counter):
        pass


class MlaDevicePool(DevicePool, MLATokenToKVPool):
    """Recognised as MLA by its class."""


class Rank:
    """A rank's controller and host pool.

    Attributes:
        pool: The host pool, filled with bytes that depend on `seed`.
        controller: SGLang's controller.
    """

    def __init__(
        self, kind, layout, backend, extra=(), *, pages=64, seed=0, tp_group=None, **parallel
    ):
        self.pool = POOLS[kind](pages, layout)
        generator = torch.Generator().manual_seed(seed)
        self.bytes = self.pool.kv_buffer.view(-1).view(torch.uint8)
        self.bytes.random_(0, 256, generator=generator)
        get_parallel().override_permanently(**(ALONE | parallel))
        device = MlaDevicePool() if kind == "mla" else DevicePool()
        self.controller = HiCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            self.pool,
            PAGE_SIZE,
            tp_group,
            threading.Event(),
            io_backend="direct",
            prefetch_threshold=1,
            model_name="org/model",
        )
        if tp_group is None:
            self.controller._create_sync_groups = list
        self.controller.attach_storage_backend(
            backend, 1, "org/model", {**OURS, **dict(extra)} if backend == "dynamic" else {}
        )

    def store(self, tokens):
        """Write a prompt from new slots; return the slots, and the number of pages stored."""
        count = len(tokens) // PAGE_SIZE
        slots = self.pool.alloc(count * PAGE_SIZE)
        self.controller.write_storage(
            slots, tokens, hash_value=get_storage_hash_str(tokens, None, page_size=PAGE_SIZE)
        )
        operation = self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        return slots, operation.completed_tokens // PAGE_SIZE

    def load(self, tokens):
        """Prefetch a prompt into new slots; return the slots, and the pages found and loaded."""
        controller = self.controller
        controller.prefetch("request", tokens)
        operation = controller.prefetch_hit_queue.get(timeout=DEADLINE_S)
        found = operation.storage_hit_count // PAGE_SIZE
        operation.host_indices = slots = self.pool.alloc(found * PAGE_SIZE)
        controller.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            report = controller.ack_prefetch_queue.get(timeout=DEADLINE_S)
            if report.completed_req:
                return slots, found, loaded // PAGE_SIZE
            loaded = report.completed_tokens

    def page(self, slots, number):
        """Return the bytes of a page."""
        start = int(slots[number * PAGE_SIZE])
        return self.pool.get_data_page(start, flat=True).view(torch.uint8)

    def close(self):
        self.controller.detach_storage_backend()
