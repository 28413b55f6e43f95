"""Identity of a stored block beyond its key: everything that must match for the block to be served.

It consists of the fields by which vLLM's own `fs` tier names its directories, the real parallel
sizes, the layout of a row, and the content of the model. Three keys of a tier's JSON affect it:

* `namespace`: any text; blocks of different namespaces are separate;
* `fingerprint`: replaces the content of the model if that is unknown or should not be read; the
  user must change it with every change of weights or adapters;
* `trust_vllm_directory`: the user guarantees that the blocks in the directory of vLLM's own tier
  belong to this model; both tiers then share it, and only vLLM's name separates models.

Tiers without a directory get the identity through their environment. The properties of model and
layout known to vLLM are their `run_config`, unless their configuration has one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, cast

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.facade.tier_options import options_of
from kvoffload_async.fingerprint import fingerprint_files
from kvoffload_async.integrations.vllm import settings
from kvoffload_async.integrations.vllm.convert import file_mapper_of
from kvoffload_async.integrations.vllm.internals import (
    ConnectorArguments,
    connector_arguments,
    require_one_host,
)
from kvoffload_async.integrations.vllm.options import IdentityOptions
from kvoffload_async.runtime.helper_thread import answered
from kvoffload_async.runtime.process_folder import ProcessFolder

_FROM_FILES: Final = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Values of `load_format` that load the weights from files of the model's folder."""

_ALL_FORMATS: Final = frozenset({"gguf", "npcache", "pt"})
"""Values of `load_format` that may read other weight files even if there are safetensors."""

_PROCESSORS: Final = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
"""Files that configure the preprocessing of images, audio and video."""

_LENGTHS: Final = (8192, 32768)
"""Values of `max_model_len` above which some of vLLM's models compute differently."""

_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of the model's content, or the reason why it is unknown.

    Attributes:
        digest: 64 hexadecimal digits; empty if unknown.
        unknown: The reason; empty if the digest is known.
    """

    digest: str = ""
    unknown: str = ""


def fingerprint_model(vllm_config: Any, timeout_s: float = _TIMEOUT_S) -> Fingerprint:  # noqa: ANN401 - vLLM's VllmConfig
    """Return the fingerprint of configuration and weights, which determine the KV values.

    Args:
        vllm_config: vLLM's resolved configuration, with all overrides applied.
        timeout_s: Timeout in seconds for reading the files; on timeout the content is unknown.

    May be called from any thread. Blocks on file I/O.
    """
    try:
        return Fingerprint(answered(partial(_digest, vllm_config), timeout_s))
    except TimeoutError:
        reason = f"the model's files could not be read within {timeout_s} s"
    except ConfigError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a plugin's configuration may raise anything
        reason = f"{type(error).__name__}: {error}"
    return Fingerprint(unknown=reason)


def _digest(vllm_config: Any) -> str:  # noqa: ANN401 - vLLM's
    """Return the digest of the model's content; raises ConfigError if some of it is unknown."""
    for reason in settings.unknowable(vllm_config):
        raise ConfigError(reason)
    models = list(_models_of(vllm_config))
    for model, _ in models:
        _check_sources(model)
    content = {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "environment": _environment(),
        "settings": settings.folded(vllm_config),
        "lengths": [_lengths_passed(model) for model, _ in models],
        "files": [
            fingerprint_files(
                _local_path(model, load),
                all_formats=_load_format(load) in _ALL_FORMATS,
                also=_PROCESSORS if model.multimodal_config is not None else (),
            )
            for model, load in models
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _environment() -> dict[str, str]:
    """Return the fingerprinted environment variables; raises ConfigError if one names a file."""
    found = settings.environment(os.environ, envs.environment_variables)
    for name, value in found.items():
        if not value.isdigit() and os.path.exists(value):  # noqa: PTH110 - as text
            raise ConfigError(f"{name} names a file, whose content is not fingerprinted")
    return found


def _models_of(vllm_config: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - vLLM's
    """Yield (ModelConfig, LoadConfig) of the model and of its draft model, if any."""
    target = vllm_config.model_config
    yield target, vllm_config.load_config
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is not None and (draft.model, draft.revision) != (target.model, target.revision):
        yield draft, speculative.draft_load_config or vllm_config.load_config


def _check_sources(model: Any) -> None:  # noqa: ANN401 - vLLM's ModelConfig
    """Check that everything a model consists of is in its folder; raises ConfigError."""
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    if "quantization_config_file" in overrides:
        raise ConfigError("hf_overrides has a quantization_config_file, which is not fingerprinted")
    code = getattr(model.hf_config, "auto_map", None) or {}
    if model.trust_remote_code and any("--" in str(one) for one in code.values()):
        raise ConfigError("trust_remote_code runs code of another repository, which may change")
    if envs.VLLM_USE_MODELSCOPE and not os.path.exists(model.model):  # noqa: PTH110 - as text
        raise ConfigError("VLLM_USE_MODELSCOPE is set; where its files lie is unknown")


def _lengths_passed(model: Any) -> list[bool]:  # noqa: ANN401 - vLLM's ModelConfig
    """Return for each known length limit whether `max_model_len` exceeds it.

    Some models compute differently above a limit: Longrope changes its factors above the original
    length, Llama 4 scales attention above 32 Ki. The length itself is not included, because by
    default vLLM fits it to the free memory.
    """
    names = ("max_position_embeddings", "original_max_position_embeddings")
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    known = [getattr(text, name, None) for name in names]
    known += [rope.get(name) for name in names] if isinstance(rope, Mapping) else []
    return [model.max_model_len > limit for limit in (*known, *_LENGTHS) if isinstance(limit, int)]


def _load_format(load: Any) -> str:  # noqa: ANN401 - vLLM's LoadConfig
    return str(getattr(load.load_format, "value", load.load_format))


def _local_path(model: Any, load: Any) -> str:  # noqa: ANN401 - vLLM's ModelConfig and LoadConfig
    """Return the folder or file with a model's weights; raises ConfigError."""
    if _load_format(load) not in _FROM_FILES:
        raise ConfigError(f"load_format={_load_format(load)!r} does not load weights from files")
    if getattr(model, "model_weights", ""):
        raise ConfigError(f"the weights of {model.model!r} are not local files")
    path = os.fspath(model.model)
    return path if os.path.exists(path) else _snapshot(path, model.revision, load.download_dir)  # noqa: PTH110 - as text


def _snapshot(repo_id: str, revision: str | None, download_dir: str | None) -> str:
    """Return the path of the hub snapshot that vLLM has downloaded, without network access."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM brings it, if it is needed
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - likewise

    try:
        return str(
            snapshot_download(
                repo_id, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (OSError, HFValidationError) as error:
        raise ConfigError(f"the weights of {repo_id!r} are not local files") from error


logger = logging.getLogger(__name__)


_VLLM_LAYOUT: Final = "LBHNC"
"""Order of dimensions requested by vLLM's connector: layer, block, head, token, content."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of blocks: everything that must match for a block to be served.

    Attributes:
        run_config: The fields of the identity, as JSON; a tier's directory is named by their
            digest.
        rank: Rank in the directory's name; a row contains the cells of all ranks of a scheduler.
        unknown: Why the model's content is unknown, so that only this process may use the blocks;
            empty if it is known.
    """

    run_config: dict[str, Any]
    rank: int
    unknown: str = ""


class ModelContent:
    """The fingerprint of a connector's model, computed once on demand, for all tiers of a spec.

    Attributes:
        arguments: The connector's; None if they are not accessible.
        tier_types: Number of open tiers by type.
    """

    def __init__(self, arguments: ConnectorArguments | None) -> None:
        self.arguments = arguments
        self.tier_types: Counter[str] = Counter()
        self._found: Fingerprint | None = None
        self._is_warned_of = False

    @classmethod
    def of(cls, spec: base.OffloadingSpec) -> Self:
        """Return the instance shared by all tiers of a spec.

        Call it first while vLLM creates the connector; see `connector_arguments`.

        Raises:
            ConfigError: The ranks of a replica are on several hosts.
        """
        known = vars(spec)
        if "_kvoffload_content" not in known:
            arguments = connector_arguments(spec.config.extra_config)
            require_one_host(arguments)
            known["_kvoffload_content"] = cls(arguments)
        return cast("Self", known["_kvoffload_content"])

    def reason_to_change(self) -> str:
        """Return why the model's content may change at run time; empty if it cannot."""
        config = None if self.arguments is None else self.arguments.vllm_config
        return next(settings.refused(config), "")

    def warn_of_unknown(self, tier_type: str, folder: str) -> None:
        """Warn once that blocks do not outlive the process, and how to change that."""
        if not self._is_warned_of:
            self._is_warned_of = True
            logger.warning(
                "the content of the model cannot be known (%s), so tiers' blocks are used by this "
                'process alone; give each tier a "fingerprint" that you change whenever weights or '
                "adapters do, and they are kept and shared",
                self.fingerprint().unknown,
            )
        logger.info("tier %s: blocks are kept in %s, for this process only", tier_type, folder)

    def fingerprint(self) -> Fingerprint:
        """Return the model's fingerprint; the first call may block on file I/O."""
        if self._found is None:
            if self.arguments is None:
                self._found = Fingerprint(unknown="vLLM's configuration is not accessible")
            else:
                self._found = fingerprint_model(self.arguments.vllm_config)
        return self._found


def canonical_format(config: OffloadingConfig) -> str:
    """Return vLLM's id of the canonical format, if rows have it and do not depend on the ranks.

    Empty for other layouts, and for canonical pages that only ranks of the same sizes can use.
    """
    if not (config.canonical_layout and config.parallel.is_parallelism_agnostic):
        return ""
    return str(canonical_format_id(config.kv_cache_layout))


def identify(
    offloading_spec: base.OffloadingSpec,
    options: IdentityOptions,
    layout: str,
    content: ModelContent,
    *,
    must_stay: bool = True,
) -> Identity:
    """Return the identity of a tier's blocks.

    Args:
        offloading_spec: vLLM's spec.
        options: Identity options of the tier's JSON.
        layout: Digest of a row's layout; see `row_layout`.
        content: The model's content.
        must_stay: Raise if weights may change at run time, instead of returning an unknown
            content.

    Raises:
        ConfigError: `trust_vllm_directory` is set although vLLM's name does not distinguish
            layouts, or the weights may change at run time.
    """
    config = offloading_spec.config
    if options.trust_vllm_directory:
        mapper = file_mapper_of(offloading_spec, "")
        _check_trust(config, mapper)
        return Identity(mapper.get_run_config(), mapper.rank)
    has_same_bytes = (
        config.replicated_layout
        or config.parallel.world_size == 1
        or bool(canonical_format(config))
    )
    mapper = file_mapper_of(offloading_spec, "", parallel_agnostic=has_same_bytes)
    run_config = mapper.get_run_config() | {"row_layout": layout}
    if options.namespace is not None:
        run_config["namespace"] = options.namespace
    if options.fingerprint is not None:
        return Identity(run_config | {"given_fingerprint": options.fingerprint}, mapper.rank)
    if reason := content.reason_to_change():
        if not must_stay:
            return Identity(run_config, mapper.rank, reason)
        raise ConfigError(
            f"type: the tier might serve KV of other weights, because {reason}; remove the tier, "
            "or set its fingerprint if the weights never change"
        )
    found = content.fingerprint()
    return Identity(run_config | {"fingerprint": found.digest}, mapper.rank, found.unknown)


def completed(
    tier: Mapping[str, Any],
    spec: base.OffloadingSpec,
    options: IdentityOptions,
    layout: str,
    folders: ExitStack,
    *,
    name: str,
) -> dict[str, Any]:
    """Complete the configuration of this package's tier with its blocks' identity and folder.

    If the model's content is unknown, the blocks are of this process: in a folder of its own, or
    under names of their own.

    Args:
        tier: The configuration.
        spec: vLLM's spec.
        options: The tier's identity options.
        layout: Digest of a row's layout; see `row_layout`.
        folders: Removes the folder when it is closed.
        name: Name of the tier in log lines.

    Raises:
        ConfigError: See `identify`; or the folder cannot be created.
    """
    content = ModelContent.of(spec)
    identity = identify(spec, options, layout, content)
    if "root_dir" not in tier:
        if identity.unknown:
            content.warn_of_unknown(name, "names of their own")
        return {**tier, "run_config": of_this_process(identity), "rank": identity.rank}
    known: dict[str, Any] = {**SecondaryTierFactory.host_defaults(tier)}
    if options.trust_vllm_directory:
        known["trust_vllm_directory"] = True
        if tier.get("capacity_bytes") is not None:
            logger.warning(
                "%s: capacity_bytes: %s does not bound what vLLM's own fs tier writes to the "
                "directory (trust_vllm_directory), and this tier evicts vLLM's blocks; leave "
                "capacity_bytes out unless vLLM's tier no longer writes there",
                name,
                tier["capacity_bytes"],
            )
    root_dir, rank = tier["root_dir"], identity.rank
    if identity.unknown:
        folder = ProcessFolder(root_dir)
        folders.callback(folder.close)
        root_dir = folder.path
        content.warn_of_unknown(name, root_dir)
    if SecondaryTierFactory.is_private(tier):
        rank = spec.config.parallel.data_parallel_index
    known |= tier
    return known | {"root_dir": root_dir, "run_config": identity.run_config, "rank": rank}


# -- inside -------------------------------------------------------------------------------------


def _check_trust(config: OffloadingConfig, mapper: FileMapper) -> None:
    """Check that the name of vLLM's directory determines a row's layout; raises ConfigError."""
    parallel, kv_layout = config.parallel, config.kv_cache_layout
    if config.canonical_layout:
        raise ConfigError(
            "trust_vllm_directory: not possible with canonical_layout, as the size of vLLM's "
            "blocks depends on tensor_parallel_size; leave one of them out"
        )
    if kv_layout not in {None, _VLLM_LAYOUT}:
        raise ConfigError(
            f"trust_vllm_directory: the KV cache has the layout {kv_layout} here, but the name of "
            f"vLLM's own directory does not distinguish it from {_VLLM_LAYOUT}; leave it out"
        )
    if config.replicated_layout:
        return  # one copy, whose bytes do not depend on the sizes
    named: Mapping[str, Any] = mapper.get_run_config()
    for size in ("tp_size", "pp_size", "pcp_size", "dcp_size"):
        if named[size] != getattr(parallel, size):
            raise ConfigError(
                f"trust_vllm_directory: with {size}={getattr(parallel, size)} vLLM's own tier "
                "keeps blocks of several layouts under one name, and some would be served "
                "wrongly; leave it out"
            )


_OWN: Final = __name__.partition(".")[0]
_PROCESS: Final = uuid.uuid4().hex
"""Separates this process's blocks from others' if the model's content is unknown."""


def takes_identity(tier: Mapping[str, Any]) -> bool:
    """Return whether a validated tier is external and accepts an identity."""
    manager = SecondaryTierFactory.class_of(tier)
    if manager.__module__.partition(".")[0] == _OWN:
        return False
    return "run_config" in options_of(manager).keys() - options_of(manager.tier_class).keys()


def identified(
    tier: Mapping[str, Any], spec: base.OffloadingSpec, layout: str
) -> Mapping[str, Any]:
    """Complete an external tier's configuration with the identity of its blocks.

    Args:
        tier: The tier's configuration; its values take precedence.
        spec: vLLM's spec.
        layout: Digest of a row's layout.
    """
    options = IdentityOptions(tier.get("namespace"), tier.get("fingerprint"))
    identity = identify(spec, options, layout, ModelContent.of(spec), must_stay=False)
    return {"run_config": of_this_process(identity), "rank": identity.rank, **tier}


def of_this_process(identity: Identity) -> dict[str, Any]:
    """Return an identity's `run_config`, made unique to this process if the content is unknown.

    For tiers that have no private directory for such blocks.
    """
    return identity.run_config | ({"process": _PROCESS} if identity.unknown else {})
