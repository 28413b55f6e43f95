"""The native engine on its own, for tests: rows in memory, a batch, and its outcome."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import xxhash
from xxh3 import addresses

from kvoffload_async.block_io.contract import Attribute, FileBatch, FileStores
from kvoffload_async.tiers.files.ops import FileOps

pytest.importorskip("kvoffload_async.block_io._native")

from kvoffload_async.block_io import engine as native

PREFIX = b"layout\0"
ATTRIBUTE = "user.kvoffload.test"
VALUE_PREFIX = b"\x01"
BLOCKS = 6
ROW_BYTES = 1000


@contextmanager
def opened_engine(**settings: Any) -> Iterator[Any]:
    """Yield an engine that has no threads any more afterwards."""
    engine = native.Engine(
        **{
            "load_threads": 2,
            "store_threads": 1,
            "spare_threads": 1,
            "queued": 8,
            "hashes": addresses(),
            **settings,
        }
    )
    try:
        yield engine
    finally:
        assert engine.close(30.0) == 0


def outcomes(engine: Any, *tickets: int) -> Any:
    """Return what became of batches; of one, not in a list."""
    found: dict[int, Any] = {}
    while not found.keys() >= set(tickets):
        assert select.select([engine.fd], [], [], 60.0)[0], "no batch has ended"
        found.update(engine.take())
    return found[tickets[0]] if len(tickets) == 1 else [found[ticket] for ticket in tickets]


def keys_of(count: int) -> list[bytes]:
    """Return as many keys."""
    return [b"key %d" % index for index in range(count)]


def digest(key: bytes, data: bytes | bytearray | memoryview) -> bytes:
    """Return the checksum of a block, as the tiers define it."""
    return xxhash.xxh3_128_digest(data, xxhash.xxh3_64_intdigest(PREFIX + key))


def digests(data: bytes | bytearray, row_bytes: int) -> bytes:
    """Return those of rows whose keys are `keys_of`."""
    rows = [data[start : start + row_bytes] for start in range(0, len(data), row_bytes)]
    return b"".join(map(digest, keys_of(len(rows)), rows))


class Block:
    """Rows of random bytes in memory, and files for them.

    Attributes:
        data: The rows to store.
        loaded: Those to load into.
    """

    def __init__(  # noqa: PLR0917 - the first four are always given
        self,
        engine: Any,
        folder: Any,
        count: int,
        row_bytes: int,
        slot_bytes: int = 0,
        ops: FileOps | None = None,
    ):
        self.engine = engine
        self.count, self.slot_bytes = count, slot_bytes or row_bytes
        self.data = bytearray(os.urandom(count * row_bytes))
        self.loaded = bytearray(count * row_bytes)
        self.source = engine.map(self.data, row_bytes, self.slot_bytes)
        self.target = engine.map(self.loaded, row_bytes, self.slot_bytes)
        self.names = [f"leaf/{index}.bin" for index in range(count)]
        self.digests = digests(self.data, row_bytes)
        (folder / "leaf").mkdir(exist_ok=True)
        self._ops = ops or FileOps()
        self.fd = self._ops.open(f"{folder}/extents", os.O_RDWR | os.O_CREAT)
        self.root = (os.open(folder, os.O_PATH | os.O_DIRECTORY), str(folder))

    def extents(self, *, is_store: bool, **changed: Any) -> int:
        """Submit a batch of all rows in one run."""
        arguments = {
            "memory": self.source if is_store else self.target,
            "is_store": is_store,
            "rows": range(self.count),
            "runs": [(self.fd, 0, self.count)],
            "keys": keys_of(self.count),
            "prefix": PREFIX,
        }
        return self.engine.extents(**{**arguments, **changed})

    def store_files(self, **changed: Any) -> int:
        """Submit a batch of all rows."""
        arguments = {
            "memory": self.source,
            "victims": [""] * self.count,
            "marker": "marker",
            "may_write": b"\1" * self.count,
            "temp_stem": ".",
            "first_serial": 0,
            "file_mode": 0o600,
            "fsync": False,
            "wants_disk_bytes": True,
            "has_digest": True,
        }
        memory, files, attribute, how = self._of_files(arguments | changed)
        how = FileStores(**how, attribute=attribute)
        return self.engine.store_files(memory, files, PREFIX, how)

    def load_files(self, **changed: Any) -> int:
        """Submit a batch of all rows."""
        arguments = {"memory": self.target, "expected": [None] * self.count, "verify": True}
        memory, files, attribute, rest = self._of_files(arguments | changed)
        expected, verify = rest["expected"], rest["verify"]
        return self.engine.load_files(memory, files, PREFIX, expected, attribute, verify=verify)

    def _of_files(self, changed: dict[str, Any]) -> tuple[Any, FileBatch, Attribute, dict]:
        """Return the memory, the files, the attribute, and the other arguments."""
        rest = {
            "root": self.root,
            "names": self.names,
            "rows": range(self.count),
            "keys": keys_of(self.count),
            "attribute": ATTRIBUTE,
            "value_prefix": VALUE_PREFIX,
            **changed,
        }
        files = FileBatch(**{name: rest.pop(name) for name in FileBatch._fields})
        attribute = Attribute(rest.pop("attribute"), rest.pop("value_prefix"))
        return rest.pop("memory"), files, attribute, rest

    def close(self) -> None:
        """Close the files."""
        self._ops.close(self.fd)
        os.close(self.root[0])
