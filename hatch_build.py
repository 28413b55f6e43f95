"""The package's build: the native module, and the README with absolute links.

The native module is built into the wheel, or next to its source for an editable install. Without a
compiler the wheel is pure, and slower; see block_io/build.py.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = Path(__file__).parent / "kvoffload_async" / "block_io"

_LINK: Final = re.compile(
    r"""^```.*?^```$                            # a code block has no links
    |(?P<before>\]\(|\b(?:href|src)=")         # of Markdown or HTML
    (?![a-z]+:|\#)(?P<path>[^)"\s]+)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_IMAGES: Final = (".gif", ".jpg", ".png", ".svg")


def with_absolute_links(text: str, source_url: str, version: str) -> str:
    """Return a Markdown text whose relative links lead into the repository, at a version's tag."""

    def absolute(link: re.Match[str]) -> str:
        if link["path"] is None:
            return link[0]
        file = link["path"].partition("#")[0]
        view = "raw" if file.endswith(_IMAGES) else "blob"
        return f"{link['before']}{source_url}/{view}/v{version}/{link['path']}"

    return _LINK.sub(absolute, text)


class ReadmeHook(MetadataHookInterface):
    """Makes the README the description of the package, which is read away from the repository."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, with the `Source` of `project.urls`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, metadata["urls"]["Source"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


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
