"""Integration with LMCache: this package's tiers as its L2 adapter, and its own tier in `bench`.

Importing this package does not need LMCache; the adapter is imported on first access.

    {"type": "plugin", "module_path": "kvoffload_async.integrations.lmcache",
     "class_name": "KVOffloadL2Adapter", "adapter_params": {"tier": {"type": "slab", ...}}}
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"KVOffloadL2Adapter": "kvoffload_async.integrations.lmcache.adapter"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of a module that is not loaded yet
    """Import the module that defines a name; raises ImportError without LMCache."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
