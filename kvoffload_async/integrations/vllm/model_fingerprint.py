"""What a model computes, as far as vLLM's configuration and the model's files tell."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import vllm

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

_TIMEOUT_S: Final = 60.0


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
    content = {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "settings": settings.folded(vllm_config),
        "files": [fingerprint_files(path) for path in _weights_of(vllm_config)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _weights_of(vllm_config: Any) -> Iterator[str]:  # noqa: ANN401 - vLLM's
    """Yield where the weights are: of the model, and of one that drafts for it."""
    target = vllm_config.model_config
    yield _local_path(target, vllm_config.load_config)
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is not None and (draft.model, draft.revision) != (target.model, target.revision):
        yield _local_path(draft, speculative.draft_load_config or vllm_config.load_config)


def _local_path(model: Any, load: Any) -> str:  # noqa: ANN401 - vLLM's ModelConfig and LoadConfig
    """Return the folder or file that a model's weights are loaded from; raises ConfigError."""
    load_format = getattr(load.load_format, "value", load.load_format)
    if load_format not in _FROM_FILES:
        raise ConfigError(f"load_format={load_format!r} does not say what the weights are")
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
