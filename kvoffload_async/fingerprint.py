"""A short fingerprint of a model's files, cheap to compute and equal on every host.

Terabytes of weights cannot be read at every start. A large file is therefore identified by its
size, samples of its content, and the hash published by the Hugging Face hub or, without one, its
modification time. Small files are read whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from kvoffload_async.errors import ConfigError

_WEIGHTS: Final = frozenset({".bin", ".ckpt", ".gguf", ".npz", ".pt", ".pth", ".tensors"})
_SAFETENSORS: Final = ".safetensors"
_CONFIGURATION: Final = re.compile(r"(config|params)\.json|.*\.index\.json|.*quant.*\.json|.*\.py")
"""Configuration, indexes, quantisation and scales, and the code of models that ship their own."""

_MAX_FILES: Final = 10_000
_WHOLE_BYTES: Final = 1 << 20
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_MAX_HEADER_BYTES: Final = 16 << 20
_PUBLISHED_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def fingerprint_files(
    path: str | os.PathLike[str], *, all_formats: bool = False, also: Collection[str] = ()
) -> str:
    """Return 64 hexadecimal digits that change when the weights of a model change.

    Included are files directly in the folder: weights, indexes, configuration, quantisation and
    code. Files that affect only text and sampling (tokenizer, chat template) are ignored.

    Args:
        path: The model's folder, or a model in a single file.
        all_formats: Include other weight files even if there are safetensors files. By default
            they are ignored, as loaders ignore them.
        also: Names of further files to include if present, such as the configuration of an
            image processor.

    Raises:
        ConfigError: There are no weights, too many files, or unreadable files.

    May be called from any thread. Blocks on file I/O.
    """
    root = Path(path)
    try:
        files = _files_of(root, all_formats, also) if root.is_dir() else [root]
        if not any(file.suffix in _WEIGHTS | {_SAFETENSORS} for file in files):
            raise ConfigError(f"model: there are no files with weights in {os.fspath(path)!r}")
        records = [[file.name, *_evidence(file)] for file in sorted(files)]
    except OSError as error:
        raise ConfigError(f"model: the files of {os.fspath(path)!r} cannot be read: {error}") from (
            error
        )
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def _files_of(root: Path, all_formats: bool, also: Collection[str]) -> list[Path]:
    """Return the files that the fingerprint covers."""
    listed = list(itertools.islice(root.iterdir(), _MAX_FILES + 1))
    if len(listed) > _MAX_FILES:
        raise ConfigError(f"model: there are more than {_MAX_FILES} files in {str(root)!r}")
    shown = [file for file in listed if not file.name.startswith(".")]
    weights = [file for file in shown if file.suffix == _SAFETENSORS]
    if all_formats or not weights:
        weights += [file for file in shown if file.suffix in _WEIGHTS]
    names = [file for file in shown if _CONFIGURATION.fullmatch(file.name) or file.name in also]
    return [*weights, *names]


def _evidence(file: Path) -> Iterator[object]:
    """Yield the identifying properties of one file's content, as JSON values."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"model: {str(file)!r} is not a regular file")
        yield found.st_size
        if found.st_size <= _WHOLE_BYTES:
            yield _digest(fd, [(0, found.st_size)])
            return
        yield _digest(fd, _samples(fd, file, found.st_size))
        # A copy may preserve an older mtime; its ctime is the time of the copy.
        in_place_since_s = max(found.st_mtime, found.st_ctime)
        yield _published_hash(file, in_place_since_s) or found.st_mtime_ns
    finally:
        os.close(fd)


def _samples(fd: int, file: Path, size: int) -> list[tuple[int, int]]:
    """Return the ranges to read of a large file, as (offset, bytes): header and spread samples.

    Source: safetensors, https://github.com/huggingface/safetensors#format (8 bytes of length,
    little-endian, then that many bytes of JSON).
    """
    header = _SAMPLE_BYTES
    if file.suffix == ".safetensors":
        header = min(8 + int.from_bytes(os.pread(fd, 8, 0), "little"), _MAX_HEADER_BYTES)
    step = (size - _SAMPLE_BYTES) // _SAMPLES
    spread = [(step * index, _SAMPLE_BYTES) for index in range(1, _SAMPLES + 1)]
    return [(0, header), *spread]


def _digest(fd: int, parts: list[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for offset, length in parts:
        digest.update(os.pread(fd, length, offset))
    return digest.hexdigest()


def _published_hash(file: Path, in_place_since_s: float) -> str | None:
    """Return the hash that the Hugging Face Hub published for a file, if it still applies.

    In the hub's cache a snapshot's file is a link to a blob named by its hash. A download to a
    user's folder has it in `.cache/huggingface/download/<name>.metadata` (commit, hash and time of
    the download, one per line), valid if the file was not modified since.

    Source: huggingface_hub, file_download.py and _local_folder.py.
    """
    target = Path(os.path.realpath(file))
    if target.parent.name == "blobs" and _PUBLISHED_HASH.fullmatch(target.name):
        return target.name
    metadata = file.parent / ".cache/huggingface/download" / f"{file.name}.metadata"
    try:
        _commit, published, downloaded_s = metadata.read_text().split()[:3]
        is_current = in_place_since_s <= float(downloaded_s) + 1.0
    except (OSError, ValueError):
        return None
    return published if is_current and _PUBLISHED_HASH.fullmatch(published) else None
