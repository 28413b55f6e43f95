"""MkDocs hooks that add the pages outside `docs/` to the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside `docs/`, with their links adapted."""
    for name, page in BESIDE.items():
        text = _LINK.sub(_from_within, (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_config(config: MkDocsConfig) -> None:
    """Watch those pages too, so that the development server rebuilds when they change."""
    config.watch += [str(ROOT / name) for name in BESIDE]


def _from_within(link: re.Match[str]) -> str:
    return BESIDE.get(link[1], link[1].removeprefix("docs/"))
