"""The part of vLLM that tiers written for it see: vLLM's own where it is installed, else a copy.

The copy has the names, fields and defaults of vLLM 0.32. A test that passes with the one and not
with the other shows a difference between the two.
"""

import enum
import importlib
import importlib.util
import sys
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

HAS_VLLM = importlib.util.find_spec("vllm") is not None
OURS = "kvoffload_async.integrations.vllm"
MODULES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.cpu.common",
    "vllm.v1.kv_offload.file_mapper",
    "vllm.v1.kv_offload.tiering.base",
)


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


class OffloadPolicy(enum.Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


class ScheduleEndContext(NamedTuple):
    new_req_ids: Any
    preempted_req_ids: Any


@dataclass
class TierFilter:
    matchers: tuple[Any, ...] = ()


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: Any = None
    kv_hints: Any = None
    load_tier_filter: TierFilter = field(default_factory=TierFilter)
    _state: dict[type, Any] = field(default_factory=dict, init=False)
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict, init=False)

    def set_state(self, value):
        self._state[type(value)] = value

    def get_state(self, kind):
        return self._state.get(kind)


@dataclass
class OffloadingEvent:
    keys: Any
    medium: Any
    removed: bool
    locality: Any = None
    ownership: Any = None
    removal_expected: bool = False


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext
    submit_time: float


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: Any = None
    transfer_bytes: Any = None


class SecondaryTierManager(ABC):
    medium = None

    def __init__(
        self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None
    ) -> None:
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type
        self.locality = None

    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def submit_store(self, job_metadata): ...

    @abstractmethod
    def submit_load(self, job_metadata): ...

    @abstractmethod
    def get_finished_jobs(self): ...

    def has_pending_work(self):
        return False

    def take_events(self):
        return ()

    def touch(self, keys, req_context):
        return

    @abstractmethod
    def on_new_request(self, req_context): ...

    def on_request_finished(self, req_context):
        return

    def serve_external_requests(self, parent):
        return

    def on_schedule_end(self, context):
        return

    @abstractmethod
    def drain_jobs(self): ...

    def shutdown(self):
        return


def load(monkeypatch):
    """Return vLLM's modules and this package's modules over them, as attributes.

    Without vLLM, both are forgotten at the test's end.
    """
    names = ("convert", "internals", "tier_adapter")
    if not HAS_VLLM:
        for module_name in MODULES:
            for end in [i for i, c in enumerate(module_name) if c == "."]:
                monkeypatch.setitem(sys.modules, module_name[:end], ModuleType(module_name[:end]))
            monkeypatch.setitem(sys.modules, module_name, ModuleType(module_name))
        modules = [sys.modules[module_name] for module_name in MODULES]
        modules[0].OffloadingConnectorStats = modules[3].FileMapper = object
        vars(modules[1]).update(
            {name: value for name, value in globals().items() if name[0].isupper()}
        )
        vars(modules[4]).update(vars(modules[1]))
        sys.modules["vllm.v1.kv_offload.cpu"].common = modules[2]
        sys.modules["vllm.v1.kv_offload.tiering"].base = modules[4]
        sys.modules["vllm.v1.kv_offload"].base = modules[1]
        package = importlib.import_module(OURS)
        for name in names:
            monkeypatch.delitem(sys.modules, f"{OURS}.{name}", raising=False)
            if hasattr(package, name):
                monkeypatch.delattr(package, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, when it is imported
        ours = {name: importlib.import_module(f"{OURS}.{name}") for name in names}
        base, tiering = (importlib.import_module(MODULES[index]) for index in (1, 4))
    return SimpleNamespace(base=base, tiering=tiering, **ours)
