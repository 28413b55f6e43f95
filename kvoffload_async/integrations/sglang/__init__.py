"""Integration with SGLang: this package's tiers as the storage backend of HiCache.

Importing this package does not need SGLang. The name below is resolved on first access, which
checks the installed SGLang.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvoffload_async.integrations.sglang.version import CONTRACT


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of a module that is not loaded yet
    """Import the storage backend; raises ImportError without a supported SGLang."""
    if name != "KVOffloadHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    CONTRACT.require(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.hicache"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), "KVOffloadHiCache"})
