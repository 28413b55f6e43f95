"""SGLang as far as a storage backend sees it, made from the recorded signatures.

The classes have the recorded methods, parameters and fields; what they do is a copy of what SGLang
0.5.23 does. So an adapter that fits them fits the recorded release.
"""

import enum
import importlib
import re
import sys
from abc import ABC, abstractmethod
from contextlib import contextmanager
from types import FunctionType, ModuleType

import torch

from kvoffload_async.integrations.sglang import CONTRACT

STORAGE = "sglang.srt.mem_cache.hicache_storage"
OURS = "kvoffload_async.integrations.sglang"


RANKS = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "is_mla_model": False,
    "enable_storage_metrics": False,
    "is_page_first_layout": False,
    "model_name": "org/model",
    "dp_rank": 0,
    "dcp_size": 1,
    "dcp_rank": 0,
}
"""Fields of the configuration of a rank that is alone."""


def function_of(name, parameters):
    """Return a function with recorded parameters that sets them as attributes."""
    names = [text.split("=")[0] for text in re.findall(r"[\w=.]+", parameters)]
    sets = "".join(f"    self.{one} = {one}\n" for one in names[1:]) or "    pass\n"
    scope = {}
    exec(f"def {name}{parameters.replace('...', 'None')}:\n{sets}", scope)  # noqa: S102 - recorded
    return scope[name]


def class_of(name, described):
    """Return a class with the recorded methods."""
    if "members" in described:
        values = [(member, member.lower()) for member in described["members"]]
        return enum.Enum(name, values, type=str)
    methods = {
        method: abstractmethod(function) if method in described["abstract"] else function
        for method, parameters in described["methods"].items()
        if isinstance(function := function_of(method, parameters), FunctionType)
    }
    return type(name, (ABC,), methods)


def is_storage_writer(config):
    return not config.is_mla_model or config.tp_rank == config.dcp_rank


def file_suffix(config):
    """Return what separates the pages of ranks in `HiCacheFile`, a copy of its code."""
    pp, cp, dcp = config.pp_size, config.attn_cp_size, config.dcp_size
    suffix = f"_{pp}_{config.pp_rank}" if pp > 1 else ""
    suffix += f"_cp{config.attn_cp_rank}_{cp}" if cp > 1 else ""
    if not config.is_mla_model:
        suffix = f"_{config.tp_rank}_{config.tp_size}{suffix}"
    if dcp > 1:
        suffix += f"_tp{config.tp_size}_dcp{config.dcp_rank}_{dcp}"
    return config.is_mla_model, suffix


def every_rank(sglang):
    """Yield the configurations of ranks of small deployments."""
    for is_mla in (False, True):
        for tp in (1, 2, 4):
            for pp in (1, 2):
                for cp in (1, 2):
                    for dcp in (1, 2) if is_mla and tp > 1 else (1,):
                        sizes = {"tp_size": tp, "pp_size": pp, "attn_cp_size": cp}
                        if dcp > 1:
                            sizes |= {"dcp_size": dcp, "logical_page_size": 64}
                        for rank in range(tp * pp * cp):
                            ranks = {
                                "tp_rank": rank % tp,
                                "pp_rank": rank // tp % pp,
                                "attn_cp_rank": rank // tp // pp,
                                "dcp_rank": rank % tp % dcp,
                                "is_mla_model": is_mla,
                            }
                            yield sglang.HiCacheStorageConfig(**{**RANKS, **sizes, **ranks})


def storage_module():
    """Return the module with SGLang's storage classes."""
    module = ModuleType(STORAGE)
    for symbol, described in CONTRACT.recorded().items():
        name = symbol.partition(":")[2]
        setattr(module, name, class_of(name, described))
    module.HiCacheStorageConfig.is_storage_writer = property(is_storage_writer)
    module.PoolTransferResult.empty = classmethod(lambda cls: cls(0, {}))
    return module


@contextmanager
def sglang(version="0.5.23"):
    """Have the recorded SGLang installed; yields its storage module."""
    added = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache")}
    added["sglang"].__version__ = version
    added[STORAGE] = storage_module()
    before = {name for name in sys.modules if name.startswith(OURS)}
    sys.modules.update(added)
    try:
        yield added[STORAGE]
    finally:
        for name in (*added, f"{OURS}.hicache"):
            sys.modules.pop(name, None)
        for name in set(sys.modules) - before:
            if name.startswith(OURS):
                del sys.modules[name]


def backend_class():
    """Return the storage backend as SGLang's factory finds it."""
    return getattr(importlib.import_module(OURS), "KVOffloadHiCache")  # noqa: B009 - as there


class HostPool:
    """A host pool as SGLang's `MHATokenToKVPoolHost` or `MLATokenToKVPoolHost`."""

    device = "cpu"
    layers, heads, dim = 2, 2, 16

    def __init__(
        self, pages, layout="layer_first", *, is_mla=False, page_size=4, dtype=torch.int16
    ):
        self.layout = layout
        self.page_size = self.logical_page_size = page_size
        self.dtype = dtype
        self.size = pages * page_size
        self.parts = 1 if is_mla else 2
        token = (self.heads, self.dim)
        order = (self.layers, self.size) if layout == "layer_first" else (self.size, self.layers)
        self.kv_buffer = torch.zeros((self.parts, *order, *token), dtype=dtype)

    def fill(self):
        """Fill the pool with bytes that differ everywhere."""
        flat = self.kv_buffer.view(-1).view(torch.uint8)
        generator = torch.Generator().manual_seed(len(flat))
        flat.random_(0, 256, generator=generator)

    def get_page_buffer_meta(self, indices):
        token_bytes = self.heads * self.dim * self.dtype.itemsize
        part_bytes = self.layers * self.size * token_bytes
        begin = self.kv_buffer.data_ptr()
        starts = indices.tolist()[:: self.page_size]
        parts = range(self.parts)
        if self.layout == "layer_first":
            pointers = [
                begin + part * part_bytes + (layer * self.size + start) * token_bytes
                for start in starts
                for layer in range(self.layers)
                for part in parts
            ]
            return pointers, [self.page_size * token_bytes] * len(pointers)
        stride = self.layers * token_bytes
        pointers = [
            begin + part * part_bytes + start * stride for start in starts for part in parts
        ]
        return pointers, [self.page_size * stride] * len(pointers)

    def page(self, number):
        """Return a copy of a page's bytes, in the order of `get_data_page`."""
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        by_layer = self.layout == "layer_first"
        found = self.kv_buffer[:, :, tokens] if by_layer else self.kv_buffer[:, tokens]
        return found.clone().flatten()

    def indices(self, pages):
        """Return the token indices of pages."""
        starts = torch.tensor(list(pages))[:, None] * self.page_size
        return (starts + torch.arange(self.page_size)).flatten()
