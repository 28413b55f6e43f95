"""Builds the native module into the wheel, or beside its source for an editable install.

Without a compiler the wheel is pure, and what it does is slower; see block_io/build.py.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "kvoffload_async" / "block_io"


def load_build() -> ModuleType:
    """Return the module that compiles, without importing the package, whose needs are not met."""
    spec = importlib.util.spec_from_file_location("native_build", PACKAGE / "build.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(PACKAGE / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeBuildHook(BuildHookInterface):
    """Compiles, and says which wheel that makes."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is put together; `version` is standard or editable."""
        build = load_build()
        in_place = PACKAGE / build.FILE_NAME
        target = in_place
        if version != "editable":
            self._folder = tempfile.TemporaryDirectory()
            target = Path(self._folder.name) / build.FILE_NAME
        if build.build_if_wanted(target):
            build_data["tag"], build_data["pure_python"] = build.WHEEL_TAG, False
            if target != in_place:
                build_data["force_include"][str(target)] = str(in_place.relative_to(self.root))
        else:
            if target == in_place:
                in_place.unlink(missing_ok=True)  # of an older source
            build_data["tag"], build_data["pure_python"] = "py3-none-any", True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()
