"""Filesystems of all kinds, mounted for a test; root only."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

IMAGE_BYTES = 48 << 20
KINDS = ["tmpfs", "ext4", "xfs", "vfat", "overlay"]


def command(*arguments: object) -> None:
    """Run a command; where it is not there or does not work, the test is skipped."""
    name, *rest = map(str, arguments)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here")
    done = subprocess.run([found, *rest], capture_output=True, check=False, text=True)
    if done.returncode:
        pytest.skip(f"{name} does not work here: {done.stderr.strip()}")


def make_image(kind: str, image: Path) -> None:
    """Make a filesystem in a file."""
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    options = ["-b", "4096"] if kind == "ext4" else []  # as where there is more room
    command(f"mkfs.{kind}", *options, image)


@contextmanager
def mounted_image(image: Path, folder: Path) -> Iterator[Path]:
    """Mount the filesystem in a file."""
    folder.mkdir()
    command("mount", "-o", "loop", image, folder)
    try:
        yield folder
    finally:
        command("umount", folder)


@contextmanager
def mounted(kind: str, below: Path) -> Iterator[Path]:
    """Mount an empty filesystem of a kind."""
    folder = below / kind
    if kind in {"tmpfs", "overlay"}:
        folder.mkdir()
        options = f"size={IMAGE_BYTES}"
        if kind == "overlay":
            layers = {name: below / name for name in ("lowerdir", "upperdir", "workdir")}
            for layer in layers.values():
                layer.mkdir()
            options = ",".join(f"{name}={layer}" for name, layer in layers.items())
        command("mount", "-t", kind, "-o", options, "none", folder)
        try:
            yield folder
        finally:
            command("umount", folder)
    else:
        make_image(kind, below / "image")
        with mounted_image(below / "image", folder):
            yield folder
