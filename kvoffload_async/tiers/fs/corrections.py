"""How walks correct the count, bucket by bucket. Thread: an I/O thread, under the count's lock."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload_async.tiers.fs.counts import Usage, changed_since


@dataclass(slots=True)
class BucketScan:
    """What a walk has found in a bucket, until the count is corrected by it.

    Attributes:
        bucket: Which.
        disk_bytes: What was there, less what was swept.
        swept_bytes: Folders that the walk has removed.
        changed: The bucket's counter of changes before the walk.
        waits_for: Writers whose operations ran beside the walk, and how many they had begun; None
            before that was looked at.
        is_exact: Whether the count was set to it.
    """

    bucket: int
    disk_bytes: int
    swept_bytes: int
    changed: int
    waits_for: dict[str, int] | None = None
    is_exact: bool = False


def is_corrected(usage: Usage, bucket_scan: BucketScan) -> bool:
    """Correct the count by a walk; tell whether that is done."""
    writers = usage.writers
    if bucket_scan.waits_for is None:
        bucket_scan.waits_for = {
            name: writer.begun for name, writer in writers.items() if writer.oldest != writer.begun
        }
    bucket_scan.waits_for = {
        name: begun
        for name, begun in bucket_scan.waits_for.items()
        if name in writers and not writers[name].has_ended(begun)
    }
    if bucket_scan.waits_for:
        return False
    settled_bytes, moved_bytes = _moved(usage, bucket_scan)
    found_bytes = bucket_scan.disk_bytes
    bucket_scan.is_exact = not moved_bytes
    if settled_bytes is None or abs(settled_bytes - found_bytes) > moved_bytes:
        # Which of the changes the walk has seen is not known: rather too much than too little.
        usage.set(bucket_scan.bucket, found_bytes + moved_bytes)
    if bucket_scan.swept_bytes:  # other walks may have seen it: they are not exact
        usage.change(bucket_scan.bucket, bucket_scan.swept_bytes, bucket_scan.swept_bytes)
    return True


def raise_by(usage: Usage, bucket_scan: BucketScan) -> None:
    """Correct the count upwards by a walk beside which an operation has not ended."""
    settled_bytes, moved_bytes = _moved(usage, bucket_scan)
    found_bytes = bucket_scan.disk_bytes
    if settled_bytes is None:
        usage.set(bucket_scan.bucket, found_bytes + moved_bytes)
    elif found_bytes > settled_bytes + moved_bytes + usage.all_reserved_bytes:
        usage.set(bucket_scan.bucket, found_bytes)


def _moved(usage: Usage, bucket_scan: BucketScan) -> tuple[int | None, int]:
    """Return a bucket's settled bytes, and what was changed in it since before the walk."""
    settled_bytes, changed = usage.bucket(bucket_scan.bucket)
    return settled_bytes, changed_since(changed, bucket_scan.changed)
