"""Stores as released versions have left them, packed so that extended attributes survive.

`NAME.tar.xz` has the files of a root directory; `NAME.json` says what tier opens it, which blocks
are in it, and the attributes of the files, in hex digits. What a block's bytes are is `content`, so
that no stored byte has to be believed. A sample is never changed once its version is released;
`make.py` makes one of the version that this checkout writes.
"""

import errno
import json
import os
import tarfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvoffload_async import SecondaryTierFactory
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.types import JobMetadata, OffloadKey, ReqContext, as_block_ids

FOLDER = Path(__file__).parent
BLOCK_BYTES = 4096
THEN_S = 1_700_000_000
"""When every file of a sample was changed last."""


def content(number: int) -> np.ndarray:
    """Return the bytes of a sample's block: simple, so that they compress."""
    return ((number * 31 + np.arange(BLOCK_BYTES) * 7) % 251).astype(np.uint8)


@dataclass
class Sample:
    """One stored store.

    Attributes:
        name: Of its two files.
        tier: The options of the tier that made it; `root_dir` is left out.
        blocks: Key in hex digits -> the number that its bytes follow from.
        attributes: Path below the root -> attribute -> value, in hex digits.
        integrity_key: What is in the file of the integrity key; empty without one.
        encryption_key: Likewise of the encryption key.
    """

    name: str
    tier: dict[str, Any]
    blocks: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    integrity_key: str = ""
    encryption_key: str = ""

    @classmethod
    def read(cls, name: str) -> Self:
        return cls(name, **json.loads((FOLDER / f"{name}.json").read_text()))

    def write(self, root: Path) -> None:
        """Pack what is below a directory."""
        for path in sorted(root.rglob("*")):
            names = [name for name in os.listxattr(path) if name.startswith("user.")]
            if names:
                values = {name: os.getxattr(path, name).hex() for name in names}
                self.attributes[str(path.relative_to(root))] = values
        with tarfile.open(FOLDER / f"{self.name}.tar.xz", "w:xz", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(root.rglob("*")):
                tar.add(path, path.relative_to(root), recursive=False, filter=_anonymous)
        fields = {key: value for key, value in asdict(self).items() if key != "name"}
        text = json.dumps(fields, indent=1, sort_keys=True)
        (FOLDER / f"{self.name}.json").write_text(text + "\n")

    def unpack(self, root: Path) -> None:
        """Lay the files below a directory; skips the test where there are no attributes."""
        with tarfile.open(FOLDER / f"{self.name}.tar.xz") as tar:
            # Python 3.11.2 has no filters, and its extractall no argument for one.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(root)  # noqa: S202 - filtered above, and ours
        for path, values in self.attributes.items():
            for name, value in values.items():
                try:
                    os.setxattr(root / path, name, bytes.fromhex(value))
                except OSError as error:
                    if error.errno != errno.EOPNOTSUPP:
                        raise
                    pytest.skip("no extended attributes here")
                os.utime(root / path, (THEN_S, THEN_S))

    def key_file(self, folder: Path) -> Path | None:
        """Write the key into a folder, where there is one."""
        key = self.integrity_key or self.encryption_key
        if not key:
            return None
        path = folder / "key"
        path.write_text(key)
        path.chmod(0o600)
        return path

    def options(self, folder: Path) -> dict[str, Any]:
        """Return the tier's options; the key is written into a folder."""
        path = self.key_file(folder)
        return self.tier if path is None else self.tier | {f"{self.kind}_key_file": str(path)}

    @property
    def kind(self) -> str:
        """The kind of the key."""
        return "encryption" if self.encryption_key else "integrity"

    def keys(self) -> list[OffloadKey]:
        return [OffloadKey(bytes.fromhex(key)) for key in self.blocks]

    def truth(self) -> np.ndarray:
        return np.stack([content(number) for number in self.blocks.values()])


class Opened:
    """A tier on a directory, by the same calls as a program's; a context manager."""

    def __init__(self, root: Path, options: dict[str, Any], num_slots: int = 64) -> None:
        self._buffer = PrimaryBuffer(num_slots, BLOCK_BYTES)
        self.rows = np.asarray(self._buffer.view)
        try:
            self.tier = SecondaryTierFactory.create_secondary_tier(
                {**options, "root_dir": str(root)}, self._buffer.view, None
            )
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.shutdown()
        self._release()

    def store(self, keys: list[OffloadKey], rows: np.ndarray) -> None:
        self.rows[: len(keys)] = rows
        assert self._job(keys, is_load=False) == set(keys)

    def load(self, keys: list[OffloadKey]) -> dict[OffloadKey, bytes]:
        """Return what is served."""
        self.rows[:] = 0xA5
        loaded = self._job(keys, is_load=True)
        return {key: bytes(self.rows[slot]) for slot, key in enumerate(keys) if key in loaded}

    def _job(self, keys: list[OffloadKey], *, is_load: bool) -> set[OffloadKey]:
        slots = as_block_ids(range(len(keys)))
        job = JobMetadata(1, tuple(keys), slots, is_load, ReqContext("r"))
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        assert self.tier.drain_jobs(30.0)
        (result,) = self.tier.get_finished_jobs()
        return set(keys if result.success else result.successful_keys or ())

    def _release(self) -> None:
        self.rows = None
        assert self._buffer.release()


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = THEN_S
    return info
