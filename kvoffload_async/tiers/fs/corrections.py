"""How walks correct the count, bucket by bucket. Thread: an I/O thread, under the count's lock."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload_async.tiers.fs.counts import Usage, changed_since


@dataclass(slots=True)
class Sighting:
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


def is_corrected(usage: Usage, sighting: Sighting) -> bool:
    """Correct the count by a walk; tell whether that is done."""
    writers = usage.writers
    if sighting.waits_for is None:
        sighting.waits_for = {
            name: writer.begun for name, writer in writers.items() if writer.oldest != writer.begun
        }
    sighting.waits_for = {
        name: begun
        for name, begun in sighting.waits_for.items()
        if name in writers and not writers[name].has_ended(begun)
    }
    if sighting.waits_for:
        return False
    settled_bytes, moved_bytes = _moved(usage, sighting)
    found_bytes = sighting.disk_bytes
    sighting.is_exact = not moved_bytes
    if settled_bytes is None or abs(settled_bytes - found_bytes) > moved_bytes:
        # Which of the changes the walk has seen is not known: rather too much than too little.
        usage.set(sighting.bucket, found_bytes + moved_bytes)
    if sighting.swept_bytes:  # other walks may have seen it: they are not exact
        usage.change(sighting.bucket, sighting.swept_bytes, sighting.swept_bytes)
    return True


def raise_by(usage: Usage, sighting: Sighting) -> None:
    """Correct the count upwards by a walk beside which an operation has not ended."""
    settled_bytes, moved_bytes = _moved(usage, sighting)
    found_bytes = sighting.disk_bytes
    if settled_bytes is None:
        usage.set(sighting.bucket, found_bytes + moved_bytes)
    elif found_bytes > settled_bytes + moved_bytes + usage.all_reserved_bytes:
        usage.set(sighting.bucket, found_bytes)


def _moved(usage: Usage, sighting: Sighting) -> tuple[int | None, int]:
    """Return a bucket's settled bytes, and what was changed in it since before the walk."""
    settled_bytes, changed = usage.bucket(sighting.bucket)
    return settled_bytes, changed_since(changed, sighting.changed)
