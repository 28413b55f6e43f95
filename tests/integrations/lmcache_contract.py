"""The part of LMCache that its L2 adapters see: its own where it is installed, else a copy.

The copy has the names, fields and defaults of LMCache 0.5.6; `lmcache_recorded.json` has those of
the original. A test that passes with the one and not with the other shows a difference between
them.
"""

import importlib
import importlib.util
import inspect
import json
import os
import select
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
RECORDED = Path(__file__).with_name("lmcache_recorded.json")
ADAPTER = "kvoffload_async.integrations.lmcache.adapter"
MODULES = {
    "lmcache.lmcache_native": ("Bitmap",),
    "lmcache.v1.distributed.api": (
        *("EncodedObjectKey", "KeyEntry", "KeyListPage", "MemoryLayoutDesc", "ObjectKey"),
    ),
    "lmcache.v1.distributed.internal_api": ("L1MemoryDesc", "L2StoreResult"),
    "lmcache.v1.distributed.l2_adapters.base": ("AdapterUsage", "L2AdapterInterface"),
    "lmcache.v1.platform": ("create_event_notifier",),
}
"""Module -> what the adapter takes from there."""
MEMORY_OBJECT = ("data_ptr", "get_size")
"""What the adapter uses of a memory object."""


class Bitmap:
    def __init__(self, size):
        self._flags = [False] * size

    def set(self, index):
        self._flags[index] = True

    def test(self, index):
        return self._flags[index]

    def popcount(self):
        return sum(self._flags)


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    def __post_init__(self):
        if "@" in self.model_name:
            raise ValueError(f"model_name must not contain '@' (got {self.model_name!r})")

    def to_encoded_object_key(self):
        return EncodedObjectKey(
            self.chunk_hash.hex(),
            self.model_name,
            self.kv_rank,
            self.object_group_id,
            self.cache_salt,
        )


@dataclass(frozen=True)
class EncodedObjectKey:
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class KeyEntry:
    key: EncodedObjectKey
    size_bytes: int


@dataclass(frozen=True)
class KeyListPage:
    entries: tuple
    next_page_token: str | None


@dataclass(frozen=True)
class MemoryLayoutDesc:
    shapes: list
    dtypes: list


@dataclass(frozen=True)
class L1MemoryDesc:
    ptr: int
    size: int
    align_bytes: int
    stable_registration_size: int | None = None


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int):
        if bytes_transferred < 0:
            raise ValueError(f"bytes_transferred must be >= 0, got {bytes_transferred}")
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self):
        return int(self) >= 0

    def bytes_transferred(self):
        return max(0, int(self))


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: MappingProxyType = field(default_factory=lambda: MappingProxyType({}))


class EventNotifier:
    def __init__(self):
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self):
        return self._fd

    def notify(self):
        os.eventfd_write(self._fd, 1)

    def close(self):
        os.close(self._fd)


def create_event_notifier():
    return EventNotifier()


class L2AdapterInterface(ABC):
    """Counts like the original, and fails where the original logs an underflow."""

    def __init__(self, max_capacity_bytes=0):
        self._listeners = []
        self._max_capacity_bytes = max_capacity_bytes
        self._total_bytes_used = 0
        self._bytes_by_cache_salt = {}
        self._usage_lock = threading.Lock()

    @abstractmethod
    def get_store_event_fd(self): ...
    @abstractmethod
    def get_lookup_and_lock_event_fd(self): ...
    @abstractmethod
    def get_load_event_fd(self): ...
    @abstractmethod
    def submit_store_task(self, keys, objects): ...
    @abstractmethod
    def pop_completed_store_tasks(self): ...
    @abstractmethod
    def submit_lookup_and_lock_task(self, keys, group_layout_descs): ...
    @abstractmethod
    def query_lookup_and_lock_result(self, task_id): ...
    @abstractmethod
    def submit_unlock(self, keys): ...
    @abstractmethod
    def submit_load_task(self, keys, objects): ...
    @abstractmethod
    def query_load_result(self, task_id): ...
    @abstractmethod
    def close(self): ...

    def register_listener(self, listener):
        self._listeners.append(listener)

    def set_backend_identity(self, name, shared=False):
        self._backend = name, shared

    def _count(self, keys, sizes, sign):
        with self._usage_lock:
            for key, size in zip(keys, sizes, strict=True):
                used = self._bytes_by_cache_salt.get(key.cache_salt, 0) + sign * size
                assert used >= 0, f"underflow of {key.cache_salt!r}"
                self._bytes_by_cache_salt[key.cache_salt] = used
                self._total_bytes_used += sign * size

    def _notify_keys_stored(self, keys, sizes):
        self._count(keys, sizes, 1)
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys):
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(self, keys, sizes):
        self._count(keys, sizes, -1)
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)

    @property
    def supports_global_eviction(self):
        return self._max_capacity_bytes > 0

    def delete(self, keys):
        return None

    def list_l2_keys(self, model_name=None, page_size=500, cursor=None):
        raise NotImplementedError

    def get_usage(self):
        with self._usage_lock:
            used = {salt: size for salt, size in self._bytes_by_cache_salt.items() if size}
            return AdapterUsage(
                self._total_bytes_used, self._max_capacity_bytes, MappingProxyType(used)
            )

    def report_status(self):
        return {"is_healthy": True}


def install(monkeypatch):
    """Return the adapter's class, over LMCache where it is installed and over the copy elsewhere.

    The namespace has the names of `MODULES` as well.
    """
    if not HAS_LMCACHE:
        for module_name, names in MODULES.items():
            module = ModuleType(module_name)
            vars(module).update({name: globals()[name] for name in names})
            parts = module_name.split(".")
            for end in range(1, len(parts)):
                parent = ".".join(parts[:end])
                if parent not in sys.modules:
                    monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
            monkeypatch.setitem(sys.modules, module_name, module)
        api = sys.modules["lmcache.v1.distributed.api"]
        sys.modules["lmcache.v1.distributed"].api = api
        monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of LMCache's own imports
        adapter = importlib.import_module(ADAPTER)
    if not HAS_LMCACHE:
        monkeypatch.setitem(sys.modules, ADAPTER, adapter)
    found = {
        name: getattr(importlib.import_module(module_name), name)
        for module_name, names in MODULES.items()
        for name in names
    }
    return SimpleNamespace(KVOffloadL2Adapter=adapter.KVOffloadL2Adapter, **found)


def described(found):
    """Return what the adapter relies on, of LMCache's own classes or of their copies.

    Args:
        found: Name -> class or function, as `install` returns them.
    """
    return {name: _described(getattr(found, name)) for names in MODULES.values() for name in names}


def _described(thing):
    if is_dataclass(thing):
        return {"fields": [one.name for one in fields(thing)]}
    if not isinstance(thing, type):
        return {"call": list(inspect.signature(thing).parameters)}
    if thing.__name__ == "Bitmap":
        return {"methods": ["popcount", "set", "test"] if _has_bitmap(thing) else []}
    return {
        "abstract": sorted(getattr(thing, "__abstractmethods__", ())),
        "methods": {
            name: list(inspect.signature(method).parameters)
            for name, method in sorted(vars(thing).items())
            if inspect.isfunction(method) and (name in {"__init__", "__new__"} or _is_used(name))
        },
    }


def _is_used(name):
    return not name.startswith("_") or name.startswith("_notify_keys_")


def _has_bitmap(cls):
    bitmap = cls(3)
    bitmap.set(1)
    return (bitmap.popcount(), bitmap.test(1), bitmap.test(2)) == (1, True, False)


def recorded():
    """Return the recording."""
    return json.loads(RECORDED.read_text())


def wait_for(fd, timeout_s=60.0):
    """Wait for a descriptor, and clear it."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(timeout_s * 1000), "nothing was signalled"
    os.eventfd_read(fd)


if __name__ == "__main__":  # with LMCache installed: records it anew
    assert HAS_LMCACHE
    RECORDED.write_text(json.dumps(described(install(None)), indent=1, sort_keys=True) + "\n")
