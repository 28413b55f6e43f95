"""The shared count on its own: fixtures that open it, what walks say, and what it says."""

import pytest

from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.outcome import DiskChange
from kvoffload_async.tiers.fs.usage import NUM_BUCKETS, BucketScan, Usage, UsageFile

MANY = 10**9


@pytest.fixture
def living() -> set[str]:
    """The ids of writers that live; the count asks for them."""
    return set()


@pytest.fixture
def opened(place, living):
    place.folder.mkdir(parents=True)
    files = []

    def make(writer_id="me", ops=None, *, is_known=True) -> UsageFile:
        usage = UsageFile(ops or FileOps(), str(place.folder), writer_id, lambda: set(living))
        usage.open()
        living.add(writer_id)
        files.append(usage)
        if is_known and not usage.is_complete:
            walk(usage, {})
        return usage

    yield make
    for usage in files:
        usage.close()


def grown(added: int = 0, removed: int = 0, bucket: int = 7) -> DiskChange:
    change = DiskChange()
    change.add(bucket, added)
    change.remove(bucket, removed)
    return change


def settle(usage: UsageFile, released_bytes: int, change: DiskChange, operation=None) -> None:
    """Tell the count what a job has changed."""
    usage.record(released_bytes, change, operation)
    usage.tell()


def seen(before: Usage, found: dict[int, int]) -> list[BucketScan]:
    return [BucketScan(bucket, size, before.bucket(bucket)[1]) for bucket, size in found.items()]


def walk(usage: UsageFile, found: dict[int, int]) -> list[BucketScan]:
    """Walk over all buckets, in which there is what was found; return what is waited for."""
    everything = dict.fromkeys(range(NUM_BUCKETS), 0) | found
    operation = usage.begin()
    return usage.correct(seen(usage.read(), everything), operation)


def state(usage: UsageFile) -> tuple[int, int, int]:
    read = usage.read()
    return read.settled_bytes, read.all_reserved_bytes, read.presumed_bytes
