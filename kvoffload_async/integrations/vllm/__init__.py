"""Integration with vLLM: this package's tiers under vLLM's spec, or the whole engine as a spec.

Importing this package does not need vLLM. The names below are resolved on first access, which
checks the installed vLLM's version.

    {"type": "FsTier", "module_path": "kvoffload_async.integrations.vllm", "root_dir": "/kv"}
"""

from __future__ import annotations

import importlib
from typing import Any

from kvoffload_async.integrations.vllm.options import NAMES_UNDER_VLLM
from kvoffload_async.integrations.vllm.version import CONTRACT

_HOMES = {
    **dict.fromkeys(NAMES_UNDER_VLLM, "kvoffload_async.integrations.vllm.tiers"),
    "HostTieringOffloadingSpec": "kvoffload_async.integrations.vllm.host_tiering",
    "KVOffloadConnector": "kvoffload_async.integrations.vllm.connector",
    "KVOffloadSpec": "kvoffload_async.integrations.vllm.spec",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of a module that is not loaded yet
    """Import the module that defines a name; raises ImportError without a supported vLLM."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    CONTRACT.require(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
