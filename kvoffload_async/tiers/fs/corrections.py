"""Corrections of the count by walks, per bucket; run on an I/O thread under the count's lock."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload_async.tiers.fs.counts import Usage, changed_since


@dataclass(slots=True)
class BucketScan:
    """Result of a walk over a bucket, kept until the count is corrected.

    Attributes:
        bucket: The bucket.
        disk_bytes: Its disk bytes, without swept files.
        swept_bytes: Disk bytes of folders removed by the walk.
        changed: The bucket's change counter before the walk.
        waits_for: Writers with operations concurrent to the walk, and the number of operations
            that they had begun; None before this was determined.
        is_exact: Whether the count was set to `disk_bytes`.
    """

    bucket: int
    disk_bytes: int
    swept_bytes: int
    changed: int
    waits_for: dict[str, int] | None = None
    is_exact: bool = False


def is_corrected(usage: Usage, bucket_scan: BucketScan) -> bool:
    """Correct the count by a walk; return False if operations must be awaited first."""
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
        # It is unknown which changes the walk has seen: count too much rather than too little.
        usage.set(bucket_scan.bucket, found_bytes + moved_bytes)
    if bucket_scan.swept_bytes:  # marks concurrent walks as inexact
        usage.change(bucket_scan.bucket, bucket_scan.swept_bytes, bucket_scan.swept_bytes)
    return True


def raise_by(usage: Usage, bucket_scan: BucketScan) -> None:
    """Raise a bucket's count if a walk, with operations still unfinished, found more bytes."""
    settled_bytes, moved_bytes = _moved(usage, bucket_scan)
    found_bytes = bucket_scan.disk_bytes
    if settled_bytes is None:
        usage.set(bucket_scan.bucket, found_bytes + moved_bytes)
    elif found_bytes > settled_bytes + moved_bytes + usage.all_reserved_bytes:
        usage.set(bucket_scan.bucket, found_bytes)


def _moved(usage: Usage, bucket_scan: BucketScan) -> tuple[int | None, int]:
    """Return a bucket's settled bytes, and the bytes changed in it since before the walk."""
    settled_bytes, changed = usage.bucket(bucket_scan.bucket)
    return settled_bytes, changed_since(changed, bucket_scan.changed)
