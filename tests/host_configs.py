"""Configurations for vLLM, LMCache and SGLang, and what becomes of them.

`check-config` must say what the table says, and so must the host, where it is installed.
"""

from dataclasses import dataclass
from typing import Any

from kvoffload_async.cli.host_config import host_config
from kvoffload_async.errors import OffloadError
from kvoffload_async.facade.spec import TieringOffloadingSpec

VLLM = "kvoffload_async.integrations.vllm"


@dataclass(frozen=True)
class Case:
    """A configuration.

    Attributes:
        config: As the host gets it; "ROOT" stands for a directory.
        why: Part of the refusal by `check-config`; None: it is accepted.
        starts: Whether the host would start with it, if that differs: the documentation forbids it.
    """

    name: str
    config: dict[str, Any]
    why: str | None = None
    starts: bool | None = None

    @property
    def is_accepted_by_host(self):
        return (self.why is None) if self.starts is None else self.starts


def is_refused(start, *args):
    """Tell whether a host refuses to start; the class of its error does not matter."""
    try:
        start(*args)
    except Exception:  # noqa: BLE001 - a server ends with any of them
        return True
    return False


def is_accepted(config):
    """Tell whether `check-config` accepts a configuration."""
    try:
        found = host_config(config)
        TieringOffloadingSpec(found.engine | found.placeholders)
    except OffloadError:
        return False
    return True


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


FS = {"type": "fs", "root_dir": "ROOT/kv", "fingerprint": "made up"}
FS_TIER = {"type": "FsTier", "module_path": VLLM, "root_dir": "ROOT/kv", "fingerprint": "made up"}


def whole(*tiers, **extra):
    """Return the JSON for the whole engine under vLLM."""
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": VLLM,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": VLLM,
            "cpu_bytes_to_use": "1MiB",
            "secondary_tiers": list(tiers),
            **extra,
        },
    }


def tiering(*tiers, spec="TieringOffloadingSpec", **extra):
    """Return the JSON for tiers under vLLM's own spec."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec,
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": list(tiers),
            **extra,
        },
    }


def multi(*connectors, **beside):
    """Return the JSON for `MultiConnector`."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
        **beside,
    }


OURS = without(whole(FS), "kv_load_failure_policy")
RECOMPUTE = {"kv_load_failure_policy": "recompute"}

OF_VLLM = [
    Case("whole engine", whole(FS)),
    Case("no tiers", whole()),
    Case("vLLM's keys", whole(FS, offload_prompt_only=True, blocks_per_chunk="2")),
    Case("block_size", whole(FS, block_size=64)),
    Case("policy fail", whole(FS) | {"kv_load_failure_policy": "fail"}),
    Case("port as text", whole(FS) | {"kv_port": "14579", "engine_id": "e"}),
    Case("role both", whole(FS) | {"kv_role": "both"}, "kv_role: 'both' is not valid; it must be"),
    Case("no role", without(whole(FS), "kv_role"), "kv_role: None is not valid"),
    Case(
        "policy unknown", whole(FS) | {"kv_load_failure_policy": "skip"}, 'it must be "recompute"'
    ),
    Case(
        "no policy",
        OURS,
        'give "recompute" next to "kv_connector": "KVOffloadConnector"',
        starts=True,
    ),
    Case(
        "vLLM's connector",
        without(whole(FS), "kv_connector_module_path") | {"kv_connector": "OffloadingConnector"},
        'a failed load would end the engine, as OffloadingConnector cannot report it; give "KVOff',
        starts=True,
    ),
    Case(
        "no path of the connector",
        without(whole(FS), "kv_connector_module_path"),
        f'kv_connector_module_path: None is not a module that has KVOffloadConnector; give "{VLLM}',
    ),
    Case(
        "wrong path of the connector",
        whole(FS) | {"kv_connector_module_path": VLLM + ".worker"},
        "is not a module that has KVOffloadConnector",
    ),
    Case("empty path", whole(FS) | {"kv_connector_module_path": ""}, "it must name a module"),
    Case(
        "vLLM's connector from our module",
        tiering(FS_TIER) | {"kv_connector_module_path": VLLM},
        "leave it out",
    ),
    Case("module of the connector", whole(FS) | {"kv_connector_module_path": VLLM + ".connector"}),
    Case("no path of the spec", whole(FS, spec_module_path=None), "spec_module_path: None is not"),
    Case(
        "wrong path of the spec", whole(FS, spec_module_path="kvoffload"), "not a module that has"
    ),
    Case("unknown field", whole(FS) | {"kv_rank": 0}, "unknown key 'kv_rank'"),
    Case("unknown key", whole(FS, surprise=1), "unknown key 'surprise'"),
    Case("port", whole(FS) | {"kv_port": "port"}, "kv_port: 'port' is not valid"),
    Case("two sizes of a chunk", whole(FS, blocks_per_chunk=2, block_size=64), "give one"),
    Case("size of a chunk", whole(FS, blocks_per_chunk="many"), "blocks_per_chunk: 'many'"),
    Case("no chunk", whole(FS, blocks_per_chunk=0), "blocks_per_chunk: 0 is not valid"),
    Case("fingerprint beside", whole(FS, fingerprint="f"), "put it into the tier"),
    Case("model of a tier", whole(FS | {"model": "m"}), "model: 'm' is determined by vLLM"),
    Case("tier without a place", whole({"type": "fs"}), "secondary_tiers[0]: root_dir: missing"),
    Case("name under vLLM's spec", whole(FS_TIER), "[0]: type: 'FsTier' is for vLLM's own"),
    Case("canonical layout", whole(FS, canonical_layout=True)),
    Case("no canonical layout", whole(FS, canonical_layout="no"), "canonical_layout: 'no'"),
    Case("relative", whole(FS | {"root_dir": "kv"}), "root_dir: 'kv' is not an absolute path"),
    Case("trust", whole(without(FS, "fingerprint") | {"trust_vllm_directory": True})),
    Case("trust and name", whole(FS | {"trust_vllm_directory": True}), "conflicts with trust_vllm"),
    Case("very long name", whole(FS | {"namespace": "n" * 9999}), "nn...nn"),
    Case("tier under vLLM's spec", tiering(FS_TIER)),
    Case(
        "trust under vLLM's spec",
        tiering(without(FS_TIER, "fingerprint") | {"trust_vllm_directory": True}),
    ),
    Case("beside vLLM's tier", tiering({"type": "fs", "root_dir": "ROOT/vllm"}, FS_TIER)),
    Case("integer as text", tiering(FS_TIER, cpu_bytes_to_use="1048576")),
    Case(
        "size as text",
        tiering(FS_TIER, cpu_bytes_to_use="8GiB"),
        "cpu_bytes_to_use: '8GiB' is not valid; vLLM calls int: give bytes as an integer, such as "
        "8589934592",
    ),
    Case("no size", tiering(FS_TIER, cpu_bytes_to_use=0), "cpu_bytes_to_use: 0 is not valid"),
    Case("threshold", tiering(FS_TIER, store_threshold="2x"), "store_threshold: '2x'"),
    Case("policy", tiering(FS_TIER, eviction_policy="hd"), 'it must be "lru" or "arc"'),
    Case(
        "tier's module",
        tiering(without(FS_TIER, "module_path")),
        "[0]: module_path: None is not a module that has FsTier",
    ),
    Case(
        "wrong module of the tier",
        tiering(FS_TIER | {"module_path": "kvoffload_async.vllm"}),
        "is not a module that has FsTier; give",
    ),
    Case("name of the tier", tiering(FS_TIER | {"type": "Fs"}), "type: 'Fs' is not valid"),
    Case(
        "vLLM's name with our module",
        tiering(without(FS_TIER, "fingerprint") | {"type": "fs"}),
        "[0]: type: 'fs' is not valid; it must be \"FsTier\"",
        starts=True,  # vLLM takes its own tier, and ignores the module
    ),
    Case("type of the tier", tiering(FS_TIER | {"type": ["FsTier"]}), "type: ['FsTier'] is not"),
    Case("type of a tier", whole(FS | {"type": ["fs"]}), "type: ['fs'] is not valid"),
    Case("rank of the tier", tiering(FS_TIER | {"rank": 0}), "unknown key 'rank'"),
    Case("option of the engine", tiering(FS_TIER | {"required": False}), "unknown key 'required'"),
    Case("locality", tiering(FS_TIER | {"locality": "NEAR"}), "locality: 'NEAR' is unknown"),
    Case(
        "no tiers of ours", tiering({"type": "fs", "root_dir": "ROOT/v"}), "nothing here is", True
    ),
    Case("tiers", tiering() | {"kv_connector_extra_config": {}}, "spec_name: 'CPUOff"),
    Case(
        "our connector with vLLM's spec",
        tiering(FS_TIER) | {"kv_connector": "KVOffloadConnector", "kv_connector_module_path": VLLM},
        "spec_name: 'TieringOffloadingSpec' is not valid with KVOffloadConnector",
        starts=True,  # and ends at the registration of the tensors
    ),
    Case(
        "without a GPU", tiering(FS_TIER, spec="HostTieringOffloadingSpec", spec_module_path=VLLM)
    ),
    Case(
        "module of the spec",
        tiering(FS_TIER, spec="HostTieringOffloadingSpec"),
        "spec_module_path: None is not a module that has HostTieringOffloadingSpec",
    ),
    Case("multi", multi(OURS, **RECOMPUTE)),
    Case("multi, policy inside", multi(OURS | RECOMPUTE), '"kv_connector": "MultiConnector"', True),
    Case("multi, two", multi(OURS, OURS, **RECOMPUTE), "2 of them offload; keep one"),
    Case("multi, engine_id", multi(OURS | {"engine_id": "e"}, **RECOMPUTE), "key 'engine_id'"),
    Case(
        "multi, role", multi(without(OURS, "kv_role"), **RECOMPUTE), "connectors[0]: kv_role: None"
    ),
    Case(
        "multi, nothing", multi(**RECOMPUTE) | {"kv_connector_extra_config": {}}, "connectors: None"
    ),
]

ADAPTER = {
    "type": "plugin",
    "module_path": "kvoffload_async.integrations.lmcache",
    "class_name": "KVOffloadL2Adapter",
    "adapter_params": {"tier": {"type": "fs", "root_dir": "ROOT/kv"}},
}


def params(tier, **others):
    return ADAPTER | {"adapter_params": {"tier": tier, **others}}


SLAB = {"type": "slab", "root_dir": "ROOT/slab", "capacity_bytes": "1MiB"}
OF_LMCACHE = [
    Case("adapter", ADAPTER),
    Case("options", params([SLAB, {"type": "example"}], num_stores=2, lookup_timeout_s=1)),
    Case("home", ADAPTER | {"module_path": "kvoffload_async.integrations.lmcache.adapter"}),
    Case(
        "tag and eviction", ADAPTER | {"affinity_tag": "a", "eviction": {"eviction_policy": "LRU"}}
    ),
    Case("type", ADAPTER | {"type": "plug"}, "type: 'plug' is not valid; it must be \"plugin\""),
    Case("no module", without(ADAPTER, "module_path"), "module_path: None is not a module"),
    Case("wrong module", ADAPTER | {"module_path": VLLM}, 'give "kvoffload_async.integrations.lmc'),
    Case("class", ADAPTER | {"class_name": "Adapter"}, "class_name: 'Adapter' is not valid"),
    Case("no params", ADAPTER | {"adapter_params": None}, "adapter_params: None is not valid"),
    Case("no tier", ADAPTER | {"adapter_params": {}}, "tier: missing"),
    Case("unknown option", params(SLAB, n=1), "unknown key 'n'"),
    Case("rank", params(SLAB | {"rank": 1}), "tier[0]: rank: 1 is determined by LMCache"),
    Case("time", params(SLAB, lock_timeout_s="soon"), "lock_timeout_s: 'soon'"),
    Case("capacity", params(without(SLAB, "capacity_bytes")), "tier[0]: capacity_bytes: missing"),
    Case("policy", ADAPTER | {"eviction": {"eviction_policy": "hd"}}, "eviction: eviction_policy:"),
    Case("empty tag", ADAPTER | {"affinity_tag": " "}, "affinity_tag: ' ' is not valid"),
    Case(
        "serde", ADAPTER | {"serde": {"type": "fp8"}}, "serde: {'type': 'fp8'} is not valid", True
    ),
]

BACKEND = {
    "backend_name": "kvoffload",
    "module_path": "kvoffload_async.integrations.sglang",
    "class_name": "KVOffloadHiCache",
    "interface_v1": 1,
    "tier": {"type": "fs", "root_dir": "ROOT/kv"},
}
OF_SGLANG = [
    Case("backend", BACKEND),
    Case("options", BACKEND | {"staging_bytes": "1MiB", "prefetch_threshold": 16}),
    Case("tiers", BACKEND | {"tier": [SLAB, {"type": "example"}], "prefetch_timeout_base": 1.5}),
    Case("home", BACKEND | {"module_path": "kvoffload_async.integrations.sglang.hicache"}),
    Case("no name", without(BACKEND, "backend_name"), "backend_name: None is not valid"),
    Case("no module", without(BACKEND, "module_path"), "module_path: None is not a module"),
    Case("wrong module", BACKEND | {"module_path": "kvoffload_async"}, "not a module that has KVO"),
    Case("class", BACKEND | {"class_name": "HiCache"}, "class_name: 'HiCache' is not valid"),
    Case("no tier", without(BACKEND, "tier"), "tier: missing"),
    Case("unknown key", BACKEND | {"tiers": []}, "unknown key 'tiers'"),
    Case("model", BACKEND | {"tier": SLAB | {"model": "m"}}, "tier[0]: model: 'm' is determined"),
    Case("tier's key", BACKEND | {"tier": SLAB | {"n": 1}}, "unknown key 'n'"),
    Case("threshold", BACKEND | {"prefetch_threshold": "16"}, "prefetch_threshold: '16' is not"),
    Case("base", BACKEND | {"prefetch_timeout_base": "1"}, "prefetch_timeout_base: '1'"),
    Case("per token", BACKEND | {"prefetch_timeout_per_ki_token": None}, "per_ki_token: None"),
    Case("prefix", BACKEND | {"hicache_storage_pass_prefix_keys": 1}, "pass_prefix_keys: 1 is not"),
    Case("size", BACKEND | {"staging_bytes": "much"}, "staging_bytes: 'much'"),
]

CASES = {"vLLM": OF_VLLM, "LMCache": OF_LMCACHE, "SGLang": OF_SGLANG}


def placed(value, root):
    """Return a configuration with a directory in place of ROOT."""
    if isinstance(value, dict):
        return {key: placed(one, root) for key, one in value.items()}
    if isinstance(value, list):
        return [placed(one, root) for one in value]
    return value.replace("ROOT", str(root)) if isinstance(value, str) else value
