"""The shared count on its own: fixtures that open it, what walks say, and what it says."""

import pytest

from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.operations import DiskChange
from kvoffload_async.tiers.fs.usage import NUM_BUCKETS, Operation, Usage, UsageFile

MANY = 10**9


@pytest.fixture
def living() -> set[str]:
    """The ids of writers that live; the count asks for them."""
    return set()


@pytest.fixture
def opened(directory, living):
    directory.folder.mkdir(parents=True)
    files = []

    def make(writer_id="me", ops=None, *, is_known=True) -> UsageFile:
        usage = UsageFile(ops or FileOps(), str(directory.folder), writer_id, lambda: set(living))
        usage.open()
        living.add(writer_id)
        files.append(usage)
        if is_known and not usage.is_complete:
            walk(usage)
        return usage

    yield make
    for usage in files:
        usage.close()


def grown(added: int = 0, removed: int = 0, bucket: int = 7) -> list[DiskChange]:
    return [(bucket, added), (bucket, -removed)]


def granted(usage: UsageFile, unit_bytes: int, count: int, capacity_bytes: int) -> int:
    """Begin an operation that goes on; return for how many blocks there is room."""
    return usage.begin(unit_bytes, count, capacity_bytes).reserved_bytes // unit_bytes


def count(usage: UsageFile, changes: list[DiskChange], operation: Operation | None = None) -> None:
    """Report to the count what an operation has changed, by default one that has just begun."""
    usage.end(operation or Operation(usage.read().marks), changes)
    usage.report()


def walk(usage: UsageFile, found: dict[int, int] | None = None) -> None:
    """Walk over all buckets, in which there is what was found."""
    usage.begin_walk()
    usage.advance(0, 0, NUM_BUCKETS)
    usage.advance(0, NUM_BUCKETS, NUM_BUCKETS, sum((found or {}).values()))
    usage.end_walk()


def state(usage: UsageFile) -> tuple[int, int, int]:
    read = usage.read()
    return read.settled_bytes, read.reserved_bytes, read.moving_bytes


def reserved(usage: Usage) -> dict[str, int]:
    """Return reserved bytes by writer."""
    return {name: writer.reserved_bytes for name, writer in usage.writers.items()}
