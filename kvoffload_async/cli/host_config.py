"""The engine's part of a host's configuration, and the table of its derived settings.

No host need be installed. A host's own keys are checked against tables of what its supported
versions accept, this package's by the code that reads them under the host. What only the
host knows (model, block) is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.table import Table
from rich.text import Text

from kvoffload_async.config import (
    OffloadConfig,
    parse_size_bytes,
    reject_unknown,
    shown,
    without_secrets,
)
from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tier_factory import naming_tier
from kvoffload_async.integrations.lmcache.settings import AdapterOptions
from kvoffload_async.integrations.sglang.settings import EXTRA as SGLANGS_EXTRA
from kvoffload_async.integrations.sglang.settings import HiCacheOptions
from kvoffload_async.integrations.vllm.options import (
    EXTRA,
    NAMES_UNDER_VLLM,
    OFFLOADING_CONNECTORS,
    check_no_tenants,
    check_place_of_options,
    engine_options,
    parse_locality,
    take_identity_options,
)

_VLLM: Final = "kvoffload_async.integrations.vllm"
_LMCACHE: Final = "kvoffload_async.integrations.lmcache"
_SGLANG: Final = "kvoffload_async.integrations.sglang"
_MODULES: Final = {
    "KVOffloadConnector": (_VLLM, f"{_VLLM}.connector"),
    "OffloadingConnector": (
        None,
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    ),
    "KVOffloadSpec": (_VLLM, f"{_VLLM}.spec"),
    "HostTieringOffloadingSpec": (_VLLM, f"{_VLLM}.host_tiering"),
    **dict.fromkeys(NAMES_UNDER_VLLM, (_VLLM, f"{_VLLM}.tiers")),
    "KVOffloadL2Adapter": (_LMCACHE, f"{_LMCACHE}.adapter"),
    "KVOffloadHiCache": (_SGLANG, f"{_SGLANG}.hicache"),
}
"""Class that a configuration names -> modules that contain it, the documented module first."""

_PLACEHOLDERS: Final = {"block_bytes": 1, "cpu_bytes_to_use": 1 << 20, "model": "model"}
"""Values for settings that the host determines; small, so that no valid size is refused."""


class HostConfig(NamedTuple):
    """The engine's part of a configuration, and the host that it is written for.

    Attributes:
        host: Who knows what is not checked; empty if everything is.
        engine: The engine's part.
        placeholders: Values for what only the host knows.
    """

    host: str
    engine: dict[str, Any]
    placeholders: dict[str, Any]


def host_config(config: Mapping[str, Any]) -> HostConfig:
    """Return the engine's part of a configuration for an engine, vLLM, LMCache or SGLang.

    Raises:
        InputError: The host would refuse it, the documentation forbids it, or nothing in it is of
            this package.
        ConfigError: A key of this package is missing, unknown or invalid.
    """
    if "kv_connector" in config or EXTRA in config:
        return _under_vllm(config)
    if "adapter_params" in config or config.get("type") == "plugin":
        return _under_lmcache(config)
    if config.keys() & {"backend_name", "class_name", "tier"}:
        return _under_sglang(config)
    if "block_bytes" in config:
        return HostConfig("", dict(config), {})
    if OffloadConfig.parse({**config, "block_bytes": 1}).model is None:
        raise InputError(
            "model: missing; OffloadEngine needs it, and TieringOffloadingSpec needs block_bytes"
        )
    return HostConfig("OffloadEngine", dict(config), {"block_bytes": 1})


# -- rules --------------------------------------------------------------------------------------

Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Key -> predicate of accepted values, and the description of these."""


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _one_of(*allowed: object) -> tuple[Callable[[Any], bool], str]:
    text = " or ".join(f'"{one}"' for one in allowed)
    return (lambda value: isinstance(value, str) and value in allowed), f"it must be {text}"


def _converts(
    to: type[int | float], is_valid: Callable[[Any], bool] = lambda _number: True
) -> Callable[[Any], bool]:
    """Return a predicate: whether `to(value)` succeeds, with a valid result."""

    def check(value: Any) -> bool:  # noqa: ANN401 - a user's JSON
        with suppress(TypeError, ValueError, OverflowError):
            return is_valid(to(value))
        return False

    return check


def _check(given: Mapping[str, Any], rules: Rules, where: str = "") -> None:
    for key, (is_valid, allowed) in rules.items():
        if key in given and not is_valid(given[key]):
            raise InputError(f"{where}{key}: {shown(given[key])} is not valid; {allowed}")


def _check_module(given: Mapping[str, Any], name: str, path: str, where: str = "") -> None:
    """Check that the named module contains the named class, according to `_MODULES`."""
    modules = _MODULES[given[name]]
    if given.get(path) not in modules:
        remedy = f'give "{modules[0]}"' if modules[0] else "leave it out"
        raise InputError(
            f"{where}{path}: {shown(given.get(path))} is not a module that has {given[name]}; "
            f"{remedy}"
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


_TEXT: Final = _is_text, "it must be a text"
_TRUTH: Final = _is(bool), "it must be true or false"
_FLOAT: Final = _converts(float), "it must be a number"
_OBJECTS: Final = (
    lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
    "it must be a list of objects",
)

# -- vLLM ---------------------------------------------------------------------------------------

_TRANSFER: Final[Rules] = {
    "kv_connector": _TEXT,
    "kv_connector_module_path": (lambda p: p is None or _is_text(p), "it must name a module"),
    "kv_role": _one_of("kv_both", "kv_producer", "kv_consumer"),
    "kv_load_failure_policy": _one_of("recompute", "fail"),
    EXTRA: (_is(dict), "it must be an object with the keys of the engine"),
    "engine_id": (_is(str, type(None)), "it must be a text"),
    "kv_buffer_device": (_is(str), "it must be a text"),
    "kv_port": (_converts(int), "it must be an integer"),
    "enable_permute_local_kv": _TRUTH,
}
"""The fields of `KVTransferConfig`."""

_POSITIVE: Final = _converts(int, lambda number: number > 0)
_INTEGER: Final = _converts(int), "vLLM calls int: give an integer"
_SIZE: Final = (lambda size: size is None or _POSITIVE(size)), "it must be a positive integer"
_CHUNK: Final[Rules] = {
    "blocks_per_chunk": _SIZE,
    "block_size": _SIZE,
    "sync_load_budget_bytes": _INTEGER,
}
_TIERING: Final[Rules] = {
    "store_threshold": _INTEGER,
    "max_tracker_size": _INTEGER,
    "tier_poll_interval_s": _FLOAT,
    "secondary_tiers": _OBJECTS,
}
_VLLMS_TIERS: Final = ("example", "fs", "kvcr", "obj", "p2p")
_DECIDED: Final = {"block_bytes": 1, "model": "vllm"}
_OWN_SPECS: Final = ("TieringOffloadingSpec", "HostTieringOffloadingSpec")


def _under_vllm(config: Mapping[str, Any]) -> HostConfig:
    """Check the JSON of `--kv-transfer-config`."""
    _check_transfer(config, _TRANSFER)
    extra = config[EXTRA]
    if config["kv_connector"] != "MultiConnector":
        return _connector(config, config)
    _check({"connectors": None, **extra}, {"connectors": _OBJECTS}, f"{EXTRA}: ")
    fields = {key: rule for key, rule in _TRANSFER.items() if key != "engine_id"}  # the outer's
    found = []
    for index, one in enumerate(extra["connectors"]):
        where = f"{EXTRA}: connectors[{index}]: "
        _check_transfer(one, fields, where)
        if one["kv_connector"] in OFFLOADING_CONNECTORS:
            found.append(_connector(one, config, where))
    if len(found) != 1:
        remedy = "nothing here is of this package"
        if found:
            remedy = f"{len(found)} of them offload; keep one, with the secondary_tiers of all"
        raise InputError(f"{EXTRA}: connectors: {remedy}")
    return found[0]


def _check_transfer(config: Mapping[str, Any], fields: Rules, where: str = "") -> None:
    reject_unknown(config, fields, f"{where}kv-transfer-config")
    _check({"kv_connector": None, "kv_role": None, EXTRA: None} | dict(config), fields, where)


def _connector(config: Mapping[str, Any], outer: Mapping[str, Any], where: str = "") -> HostConfig:
    """Check an offloading connector's configuration; `outer` has vLLM's failure policy."""
    _check(config, {"kv_connector": _one_of(*OFFLOADING_CONNECTORS)}, where)
    _check_module(config, "kv_connector", "kv_connector_module_path", where)
    connector, extra = config["kv_connector"], config[EXTRA]
    inside = f"{where}{EXTRA}: "
    _check(extra, _CHUNK, inside)
    if extra.get("blocks_per_chunk") is not None and extra.get("block_size") is not None:
        raise InputError(f"{inside}block_size: vLLM refuses it with blocks_per_chunk; give one")
    name = extra.get("spec_name", "CPUOffloadingSpec")
    if name != "KVOffloadSpec":
        if connector == "KVOffloadConnector":
            raise InputError(
                f"{inside}spec_name: {shown(name)} is not valid with KVOffloadConnector; give "
                '"KVOffloadSpec", or "kv_connector": "OffloadingConnector" with other specs'
            )
        return _under_vllms_spec(name, extra, inside)
    if connector != "KVOffloadConnector":
        raise InputError(
            f"{where}kv_connector: a failed load would end the engine, as {connector} cannot report"
            f' it; give "KVOffloadConnector" and "kv_connector_module_path": "{_VLLM}"'
        )
    _check_module(extra, "spec_name", "spec_module_path", inside)
    if "kv_load_failure_policy" not in outer:
        raise InputError(
            "kv_load_failure_policy: missing, so that vLLM ends a request whose load failed; give "
            f'"recompute" next to "kv_connector": "{outer["kv_connector"]}"'
        )
    engine = {key: one for key, one in engine_options(extra)[0].items() if key not in _CHUNK}
    if isinstance(tiers := engine.get("secondary_tiers"), list):
        engine["secondary_tiers"] = [tier for tier in tiers if not _is_external(tier)]
    return HostConfig("vLLM", engine, _DECIDED)


def _is_external(tier: object) -> bool:
    """Return whether a tier is of another package, which alone can check it."""
    path = tier.get("module_path") if isinstance(tier, dict) else None
    return isinstance(path, str) and not path.startswith("kvoffload_async.")


def _under_vllms_spec(name: object, extra: Mapping[str, Any], where: str) -> HostConfig:
    """Check this package's tiers under vLLM's own spec."""
    if name not in _OWN_SPECS:
        raise InputError(
            f"{where}spec_name: {shown(name)} has no tiers of this package; give "
            f'"KVOffloadSpec", or one of {", ".join(_OWN_SPECS)}'
        )
    if name in _MODULES:
        _check_module(extra, "spec_name", "spec_module_path", where)
    _check(extra, _TIERING, where)
    check_place_of_options(extra)
    check_no_tenants(extra)
    given = extra.get("cpu_bytes_to_use")
    if not given or not _POSITIVE(given):
        remedy = 8 << 30
        with suppress(ConfigError):
            remedy = parse_size_bytes(given, "cpu_bytes_to_use")
        raise InputError(
            f"{where}cpu_bytes_to_use: {shown(given)} is not valid; vLLM calls int: give bytes as "
            f"an integer, such as {remedy}"
        )
    if "cache_policy_module_path" not in extra:
        _check(extra, {"eviction_policy": _one_of("lru", "arc")}, where)
    tiers = []
    for index, tier in enumerate(extra.get("secondary_tiers", [])):
        prefix = f"{where}secondary_tiers[{index}]: "
        kind, path = tier.get("type"), tier.get("module_path")
        if path in _MODULES["FsTier"]:
            _check({"type": kind}, {"type": _one_of(*NAMES_UNDER_VLLM)}, prefix)
        elif path is None and kind not in tuple(NAMES_UNDER_VLLM):
            _check({"type": kind}, {"type": _one_of(*_VLLMS_TIERS)}, prefix)
        if kind in tuple(NAMES_UNDER_VLLM):  # a list cannot be looked up in a mapping
            _check_module(tier, "type", "module_path", prefix)
            with naming_tier(index, tier):
                tiers.append(_tier_under_vllms_spec(tier))
    if not tiers:
        raise InputError(
            f"{where}secondary_tiers: nothing here is of this package; give a tier "
            f'{{"type": "FsTier", "module_path": "{_VLLM}", ...}}'
        )
    engine = {"cpu_bytes_to_use": int(given), "secondary_tiers": tiers}
    return HostConfig("vLLM", engine, _DECIDED)


def _tier_under_vllms_spec(tier: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(tier)
    kind = NAMES_UNDER_VLLM[options.pop("type")]
    for key in ("module_path", "backpressure"):  # vLLM's
        options.pop(key, None)
    take_identity_options(kind, options, tier["type"])
    parse_locality(kind, options.get("locality"))
    if isinstance(directory := options.get("root_dir"), str) and directory:
        options["root_dir"] = str(Path(directory).absolute())  # vLLM's: relative to where it runs
    return {"type": kind, **options}


# -- LMCache ------------------------------------------------------------------------------------

_EVICTION: Final[Rules] = {
    "eviction_policy": _one_of("LRU", "ARC", "IsolatedLRU", "noop"),
    "trigger_watermark": _FLOAT,
    "eviction_ratio": _FLOAT,
}
_ADAPTER: Final[Rules] = {
    "type": _one_of("plugin"),
    "class_name": _one_of("KVOffloadL2Adapter"),
    "adapter_params": (_is(dict), "it must be an object with tier"),
    "config_class_name": (_is(str, type(None)), "leave it out"),
    "affinity_tag": (lambda tag: isinstance(tag, str) and bool(tag.strip()), "it must be a text"),
    "serde": (_is(type(None)), "objects of varying sizes are not supported; leave it out"),
    "eviction": (_is(dict, type(None)), "it must be an object"),
}


def _under_lmcache(config: Mapping[str, Any]) -> HostConfig:
    """Check the JSON of `--l2-adapter`."""
    given = dict.fromkeys(("type", "class_name"), None) | {"adapter_params": {}} | dict(config)
    _check(given, _ADAPTER)
    _check_module(given, "class_name", "module_path")
    if (eviction := given.get("eviction")) is not None:
        _check({"eviction_policy": None, **eviction}, _EVICTION, "eviction: ")
    options = AdapterOptions.parse(given["adapter_params"])
    engine = {"secondary_tiers": list(options.tier), "status_socket": options.status_socket}
    return HostConfig("LMCache", engine, _PLACEHOLDERS)


# -- SGLang -------------------------------------------------------------------------------------

_NUMBER: Final = _is(int, float), "it must be a number"
_HICACHE: Final[Rules] = {
    "backend_name": _TEXT,
    "class_name": _one_of("KVOffloadHiCache"),
    "prefetch_threshold": (_is(int), "it must be an integer"),
    "prefetch_timeout_base": _NUMBER,
    "prefetch_timeout_per_ki_token": _NUMBER,
    "hicache_storage_pass_prefix_keys": _TRUTH,
}


def _under_sglang(config: Mapping[str, Any]) -> HostConfig:
    """Check the JSON of `--hicache-storage-backend-extra-config`."""
    given = {"backend_name": None, "class_name": None, **config}
    _check(given, _HICACHE, f"{SGLANGS_EXTRA}: ")
    _check_module(given, "class_name", "module_path")
    options = HiCacheOptions.parse(config)
    engine = {"secondary_tiers": options.tier, "status_socket": options.status_socket}
    return HostConfig("SGLang", engine, _PLACEHOLDERS)


def derived_settings(spec: TieringOffloadingSpec, found: HostConfig) -> dict[str, Any]:
    """Return a configuration's derived settings as a JSON object, without secrets.

    Args:
        spec: Made from the configuration.
        found: The configuration; what has a placeholder in it is None, as what follows from it.
    """
    config = spec.config
    sizes = {
        "primary_blocks": spec.num_blocks,
        "row_stride_bytes": spec.stride_bytes,
        "block_bytes": config.block_bytes,
        "num_workers": config.num_workers,
        "used_bytes": spec.num_blocks * spec.stride_bytes,
        "tokens_per_block": config.block_size * config.blocks_per_chunk,
    }
    return {
        **(dict.fromkeys(sizes) if found.placeholders else sizes),
        "cpu_bytes_to_use": found.engine.get("cpu_bytes_to_use") and config.cpu_bytes_to_use,
        "eviction_policy": config.eviction_policy,
        "decided_by": found.host or None,
        "status_socket": config.status_socket,
        "secondary_tiers": [
            {key: without_secrets(value, key) for key, value in tier.items()}
            for tier in config.secondary_tiers
        ],
    }


def geometry_table(settings: Mapping[str, Any]) -> Table:
    """Return a table of a configuration's derived settings; see `derived_settings`."""
    table = Table(title="Configuration", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    memory = "unknown"
    if settings["cpu_bytes_to_use"] is not None:
        memory = f"{settings['cpu_bytes_to_use']:,} bytes"
    if settings["primary_blocks"] is None:
        table.add_row("memory", memory)
        table.add_row("not checked", f"what only {settings['decided_by']} knows, as a block's size")
    else:
        workers = f"on {settings['num_workers']} worker(s)"
        table.add_row("primary blocks", f"{settings['primary_blocks']:,}")
        table.add_row("row stride", f"{settings['row_stride_bytes']:,} bytes")
        table.add_row("block", f"{settings['block_bytes']:,} bytes {workers}")
        table.add_row("memory", f"{settings['used_bytes']:,} of {memory}")
        table.add_row("tokens per block", f"{settings['tokens_per_block']:,}")
    table.add_row("eviction policy", settings["eviction_policy"])
    if settings["status_socket"] is not None:
        table.add_row("status socket", Text(settings["status_socket"]))
    for number, tier in enumerate(settings["secondary_tiers"], 1):
        options = ", ".join(f"{k}={json.dumps(v)}" for k, v in tier.items() if k != "type")
        text = f"{tier['type']}: {options}" if options else str(tier["type"])
        table.add_row(f"secondary tier {number}", Text(text))
    if not settings["secondary_tiers"]:
        table.add_row("secondary tiers", "none")
    return table
