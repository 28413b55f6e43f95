"""A directory with `fs` tiers on it, and what lies there."""

import os
from collections.abc import Sequence
from pathlib import Path

from faulty_files import FileCall
from sealed_names import TEXT

from kvoffload_async.block_io.choice import implementation
from kvoffload_async.testing.harness import DEADLINE_S, ManagerHarness, TierHarness, content_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, AttributeDigester
from kvoffload_async.tiers.fs.layout import Namespace, counted_bytes
from kvoffload_async.tiers.fs.operations import LoadFailure, StoreItem, Verify, changes_of
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.tiers.fs.tier import FsTier
from kvoffload_async.tiers.fs.usage import FILE_NAME, Usage, read_usage
from kvoffload_async.tiers.fs.walk import Inventory, take_inventory
from kvoffload_async.tiers.fs.writers import WriterRegistry
from kvoffload_async.types import OffloadKey

BLOCK = 4096
TRIES = 2 if implementation().name == "native" else 1
"""How often a tier tries to write a file: what native code could not is checked by Python's."""
FIELDS = {"model_name": "m/x", "block_bytes": BLOCK}
KIB = 1024
WRITER = "1-0123456789ab"


class FsDirectory:
    """One namespace below one directory."""

    def __init__(self, root: Path, rank: int = 0, *, is_vllms: bool = False) -> None:
        self.root = root
        self.rank = rank
        self.namespace = Namespace(str(root), FIELDS, rank, is_vllms=is_vllms)
        self.folder = Path(self.namespace.folder)

    def tier(
        self,
        ops: FileOps | None = None,
        *,
        capacity_bytes: int | None = None,
        policy: str = "lru",
        high: float = 1.0,
        low: float = 0.95,
        verify: str = "when_present",
        **settings,
    ) -> FsTier:
        """Create a tier; its blocks are encrypted if `verify` is "encrypted"."""
        if verify == "encrypted":
            verify, settings["encryption_keys"] = "required", (EncryptionKey(TEXT.encode()),)
        return FsTier(
            FsSettings(
                root_dir=str(self.root),
                run_config=FIELDS,
                rank=self.rank,
                verify=Verify(verify),
                capacity_bytes=capacity_bytes,
                high_watermark=high,
                trust_vllm_directory=self.namespace.is_vllms,
                low_watermark=low,
                eviction_policy=policy,
                ops=ops,
                **settings,
            )
        )

    def files(
        self,
        ops: FileOps | None = None,
        *,
        verify: str = "when_present",
        reuses_inodes: bool = False,
        **options,
    ) -> BlockFiles:
        """The block files alone, without a tier around them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = FsSettings(
            root_dir=str(self.root),
            run_config=FIELDS,
            verify=Verify(verify),
            capacity_bytes=1 << 40,
            trust_vllm_directory=not reuses_inodes,
            **options,
        )
        writers = WriterRegistry(ops or FileOps(), str(self.folder))
        writers.writer_id = WRITER
        return BlockFiles(ops or FileOps(), self.namespace, writers, settings, BLOCK)

    def open(self, ops: FileOps | None = None, *, num_slots: int = 64, **options) -> TierHarness:
        return TierHarness(self.tier(ops, **options), num_slots, BLOCK)

    def manage(
        self,
        ops: FileOps | None = None,
        *,
        io_timeout_s: float = 30.0,
        timeout_s: float = DEADLINE_S,
        **options,
    ) -> ManagerHarness:
        tier = self.tier(ops, **options)
        return ManagerHarness(tier, 64, BLOCK, timeout_s, io_timeout_s=io_timeout_s)

    def path(self, key: OffloadKey) -> Path:
        return Path(self.namespace.get_file_name(key))

    def is_listed(self, call: FileCall) -> bool:
        """Tell whether a call lists what is directly in the namespace, as each walk begins."""
        return (call.name, call.path) == ("open", str(self.folder))

    def inventory(self) -> Inventory:
        roots = map(str, self.folder.iterdir())
        return take_inventory(FileOps(), self.namespace, roots)

    def disk_bytes(self) -> int:
        """What the namespace takes, beside its folders as they were made."""
        return self.inventory().total_bytes + counted_bytes(self.folder.stat())

    def counted_bytes(self) -> int:
        """What the shared count says is there."""
        return self.usage().settled_bytes

    def usage(self) -> Usage:
        usage = read_usage(FileOps(), str(self.folder))
        assert usage is not None
        return usage

    def has_count(self) -> bool:
        return (self.folder / FILE_NAME).exists()

    def temps(self) -> list[str]:
        """Every temporary file below the whole directory."""
        return sorted(str(path) for path in self.root.rglob("*.tmp"))

    def blocks(self) -> set[OffloadKey]:
        return set(self.inventory().blocks) if self.folder.exists() else set()

    def attribute_of(self, key: OffloadKey) -> bytes:
        return AttributeDigester(self.namespace.layout_of(BLOCK)).attribute_value(
            key, memoryview(content_of(key, BLOCK).tobytes())
        )

    def put(
        self, key: OffloadKey, content: bytes | None = None, *, has_digest: bool = False
    ) -> Path:
        """Write a block as somebody else would, by default as vLLM does: without a checksum."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content_of(key, BLOCK).tobytes() if content is None else content)
        if has_digest:
            os.setxattr(path, ATTRIBUTE, self.attribute_of(key))
        return path

    def every_block_is_whole(self, *, is_encrypted: bool = False) -> bool:
        """Whether every published file has full length, and the bytes of its key or encrypted."""
        files = {key: self.path(key).read_bytes() for key in self.blocks()}
        return all(
            len(found) == BLOCK and (found != content_of(key, BLOCK).tobytes()) is is_encrypted
            for key, found in files.items()
        )


def item(key: OffloadKey, index: int = 0, *, may_write: bool = True, victim=None) -> StoreItem:
    return StoreItem(index, key, index, may_write, victim)


def store(
    files: BlockFiles, *items: StoreItem, content: bytes | memoryview | None = None
) -> Sequence[StoreItem]:
    """Store blocks with the bytes of their keys, or with others; return them with the results."""
    rows = {
        one.slot: bytearray(content_of(one.key, BLOCK)) if content is None else content
        for one in items
    }
    files.store(items, lambda slot: memoryview(rows[slot]))
    return items


def store_key(
    files: BlockFiles, key: OffloadKey, content: bytes | memoryview | None = None, **options
) -> StoreItem:
    (outcome,) = store(files, item(key, **options), content=content)
    return outcome


def grown_by(outcome: StoreItem) -> int:
    """By how many bytes a store has changed the disk usage."""
    return sum(num_bytes for _, num_bytes in changes_of([outcome]))


def load(files: BlockFiles, *keys: OffloadKey) -> tuple[dict[int, LoadFailure], list[bytearray]]:
    rows = [bytearray(BLOCK) for _ in keys]
    failures: list[LoadFailure] = []
    pieces = zip(keys, rows, strict=True)
    files.load([(i, key, memoryview(row)) for i, (key, row) in enumerate(pieces)], failures)
    return {failure.index: failure for failure in failures}, rows


def load_key(files: BlockFiles, key: OffloadKey) -> LoadFailure | None:
    """Load one block; what is served must be right."""
    failures, (row,) = load(files, key)
    assert failures or bytes(row) == content_of(key, BLOCK).tobytes()
    return failures.get(0)
