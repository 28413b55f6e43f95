"""What a model computes, as far as vLLM's configuration and the model's files tell."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import vllm
from vllm import envs

from kvoffload_async.errors import ConfigError
from kvoffload_async.fingerprint import fingerprint_files
from kvoffload_async.integrations.vllm import settings

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
"""The values of `load_format` whose weights are files of the model's folder."""

_ALL_FORMATS: Final = frozenset({"gguf", "npcache", "pt"})
"""Those that may read other files than safetensors although there are some."""

_PROCESSORS: Final = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
"""What images, audio and video become tokens and embeddings by."""

_LENGTHS: Final = (8192, 32768)
"""Where models of vLLM's switch by `max_model_len`, beside the lengths of their configuration."""

_NUMERIC: Final = re.compile(
    "ACCUM|ATTN|AWQ|BATCH_INVARIANT|DTYPE|EMULATION|FP4|FP8|HUMMING|INT4|LAYOUT|MARLIN|MLA|MOE_|"
    "PARTITION|PLUGINS|PRECISION|QUANT|REDIRECT|ROCM_USE|RUNNER"
)
"""What is in the names of vLLM's environment variables that choose how numbers are computed."""

_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Either a digest of the content, or why it cannot be known.

    Attributes:
        digest: 64 hexadecimal digits; empty if the content cannot be known.
        unknown: Why; empty if it is known.
    """

    digest: str = ""
    unknown: str = ""


def fingerprint_model(vllm_config: Any, timeout_s: float = _TIMEOUT_S) -> Fingerprint:  # noqa: ANN401 - vLLM's VllmConfig
    """Return what configuration and weights come to; two that are equal compute the same.

    Args:
        vllm_config: As vLLM has resolved it, after every override.
        timeout_s: Seconds that the files may take; a disk that hangs makes the content unknown.

    Thread: any; waits for a disk.
    """
    found: list[Fingerprint] = []

    def run() -> None:
        try:
            found.append(Fingerprint(_digest(vllm_config)))
        except ConfigError as error:
            found.append(Fingerprint(unknown=str(error)))
        except Exception as error:  # noqa: BLE001 - a plugin's configuration may raise anything
            found.append(Fingerprint(unknown=f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, name="kvoffload-fingerprint", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return (
        found[0]
        if found
        else Fingerprint(unknown=f"the model's files could not be read within {timeout_s} s")
    )


def _digest(vllm_config: Any) -> str:  # noqa: ANN401 - vLLM's
    """Raises ConfigError if something cannot be known."""
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
        "files": [_files_of(model, load) for model, load in models],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _environment() -> dict[str, str]:
    """Return vLLM's variables that are set and change numbers; raises ConfigError."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and _NUMERIC.search(name)
    }
    for name, value in found.items():
        if os.path.exists(value):  # noqa: PTH110 - as text
            raise ConfigError(f"{name} names a file, which is not looked at")
    return found


def _models_of(vllm_config: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - vLLM's
    """Yield vLLM's ModelConfig and LoadConfig: of the model, and of one that drafts for it."""
    target = vllm_config.model_config
    yield target, vllm_config.load_config
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is not None and (draft.model, draft.revision) != (target.model, target.revision):
        yield draft, speculative.draft_load_config or vllm_config.load_config


def _check_sources(model: Any) -> None:  # noqa: ANN401 - vLLM's ModelConfig
    """Check that all of a model lies in its folder; raises ConfigError."""
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    if "quantization_config_file" in overrides:
        raise ConfigError("hf_overrides has a quantization_config_file, which is not looked at")
    code = getattr(model.hf_config, "auto_map", None) or {}
    if model.trust_remote_code and any("--" in str(one) for one in code.values()):
        raise ConfigError("trust_remote_code runs code of another repository, which may change")
    if envs.VLLM_USE_MODELSCOPE and not os.path.exists(model.model):  # noqa: PTH110 - as text
        raise ConfigError("VLLM_USE_MODELSCOPE: where it keeps its files is not known")


def _lengths_passed(model: Any) -> list[bool]:  # noqa: ANN401 - vLLM's ModelConfig
    """Return which lengths `max_model_len` exceeds: some models compute otherwise beyond one.

    Longrope takes other factors beyond its original length, Llama 4 scales attention beyond 32 Ki.
    The length itself does not count: by default vLLM fits it to the memory that is free.
    """
    names = ("max_position_embeddings", "original_max_position_embeddings")
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    known = [getattr(text, name, None) for name in names]
    known += [rope.get(name) for name in names] if isinstance(rope, Mapping) else []
    return [model.max_model_len > limit for limit in (*known, *_LENGTHS) if isinstance(limit, int)]


def _files_of(model: Any, load: Any) -> str:  # noqa: ANN401 - vLLM's ModelConfig and LoadConfig
    return fingerprint_files(
        _local_path(model, load),
        all_formats=_load_format(load) in _ALL_FORMATS,
        also=_PROCESSORS if model.multimodal_config is not None else (),
    )


def _load_format(load: Any) -> str:  # noqa: ANN401 - vLLM's LoadConfig
    return str(getattr(load.load_format, "value", load.load_format))


def _local_path(model: Any, load: Any) -> str:  # noqa: ANN401 - vLLM's ModelConfig and LoadConfig
    """Return the folder or file that a model's weights are loaded from; raises ConfigError."""
    if _load_format(load) not in _FROM_FILES:
        raise ConfigError(f"load_format={_load_format(load)!r} does not say what the weights are")
    if getattr(model, "model_weights", ""):
        raise ConfigError(f"the weights of {model.model!r} are not local files")
    path = os.fspath(model.model)
    return path if os.path.exists(path) else _snapshot(path, model.revision, load.download_dir)  # noqa: PTH110 - as text


def _snapshot(repo_id: str, revision: str | None, download_dir: str | None) -> str:
    """Return the hub's snapshot that vLLM has downloaded; asks no server."""
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
