"""The content of a model's files as a short text: cheap to compute, equal wherever the files are.

Reading terabytes of weights at every start is out of the question, so a large file is known by its
size, by samples of its content, and by one of these: the hash that the Hugging Face hub publishes
beside it, or else its modification time. Small files are read whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvoffload_async.errors import ConfigError

WEIGHT_SUFFIXES: Final = frozenset(
    {".bin", ".ckpt", ".gguf", ".npz", ".pt", ".pth", ".safetensors", ".tensors"}
)
"""What a file of weights may be called."""
_TEXT_SUFFIXES: Final = frozenset({".json", ".py"})
"""Configuration, indexes, KV scales, and the code of models that bring their own."""
_NOT_THE_MODEL: Final = re.compile(
    r"(added_tokens|chat_template|generation_config|special_tokens_map|tokenizer.*|vocab)\.json"
)
"""What turns text into tokens, or probabilities into tokens: a block's key is made of tokens."""

_MAX_FILES: Final = 10_000
_WHOLE_BYTES: Final = 1 << 20
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_MAX_HEADER_BYTES: Final = 16 << 20
_PUBLISHED_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def fingerprint_files(path: str | os.PathLike[str]) -> str:
    """Return 64 hexadecimal digits that change when the weights of a model do.

    Everything in the folder counts that can change what the model computes: weights, indexes,
    configuration, code. What only concerns text and sampling (tokenizer, chat template) does not.

    Args:
        path: The model's folder, or the one file that it consists of.

    Raises:
        ConfigError: There are no weights, too many files, or some cannot be read.

    Thread: any; reads files, and so may wait for a disk.
    """
    root = Path(path)
    try:
        files = _files_of(root) if root.is_dir() else {root.name: root}
        if not any(Path(name).suffix in WEIGHT_SUFFIXES for name in files):
            raise ConfigError(f"model: there are no files with weights in {os.fspath(path)!r}")
        records = [[name, *_evidence(file, root)] for name, file in sorted(files.items())]
    except OSError as error:
        raise ConfigError(f"model: the files of {os.fspath(path)!r} cannot be read: {error}") from (
            error
        )
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def _files_of(root: Path) -> dict[str, Path]:
    """Return the files that count, by their path below the folder; hidden ones do not."""
    found: dict[str, Path] = {}
    for folder, names, files in os.walk(root, onerror=_raise):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in files:
            suffix = Path(name).suffix
            if name.startswith(".") or suffix not in WEIGHT_SUFFIXES | _TEXT_SUFFIXES:
                continue
            if _NOT_THE_MODEL.fullmatch(name):
                continue
            file = Path(folder, name)
            found[file.relative_to(root).as_posix()] = file
            if len(found) > _MAX_FILES:
                raise ConfigError(f"model: there are more than {_MAX_FILES} files in {str(root)!r}")
    return found


def _raise(error: OSError) -> None:
    raise error


def _evidence(file: Path, root: Path) -> Iterator[object]:
    """Yield what is known of one file's content, as JSON."""
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
        yield _published_hash(file, root, found.st_mtime) or found.st_mtime_ns
    finally:
        os.close(fd)


def _samples(fd: int, file: Path, size: int) -> list[tuple[int, int]]:
    """Return what to read of a large file, as (offset, bytes): its header, and evenly spread parts.

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


def _published_hash(file: Path, root: Path, mtime_s: float) -> str | None:
    """Return the hash under which the hub published a file, if it is still the file's.

    In the hub's cache a snapshot's file is a link to a blob of that name. A download into a folder
    of the user's has the hash in `.cache/huggingface/download/<path>.metadata` (commit, hash, time
    of the download, a line each); it counts if the file has not been modified since.

    Source: huggingface_hub, file_download.py and _local_folder.py.
    """
    target = Path(os.path.realpath(file))
    if target.parent.name == "blobs" and _PUBLISHED_HASH.fullmatch(target.name):
        return target.name
    below = file.relative_to(root) if file != root else Path(file.name)
    base = root if file != root else root.parent
    metadata = base / ".cache/huggingface/download" / f"{below}.metadata"
    try:
        _commit, published, downloaded_s = metadata.read_text().split()[:3]
        is_current = mtime_s <= float(downloaded_s) + 1.0
    except (OSError, ValueError):
        return None
    return published if is_current and _PUBLISHED_HASH.fullmatch(published) else None
