"""Refuse a release whose metadata has placeholders: addresses in the reserved domain `.invalid`.

python .ci/publishable.py dist/*
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

PLACEHOLDER: Final = re.compile(r"[\w.+@-]+\.invalid\b")


def metadata_of(path: Path) -> str:
    """Return the metadata of a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return wheel.read(name).decode()
    with tarfile.open(path) as sdist:
        (member,) = (one for one in sdist if re.fullmatch(r"[^/]+/PKG-INFO", one.name))
        file = sdist.extractfile(member)
        return file.read().decode() if file is not None else ""


def main(paths: list[str]) -> str | None:
    """Return why these artifacts must not be published, or None."""
    if not paths:
        return "no artifacts are given"
    for path in map(Path, paths):
        if found := sorted(set(PLACEHOLDER.findall(metadata_of(path)))):
            return (
                f"{path.name}: the metadata has placeholders: {', '.join(found)}; replace them "
                "in [project] and [project.urls] of pyproject.toml"
            )
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
