"""What `kvoffload store gc` is asked to remove."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is to be removed besides what dead writers have left, and empty folders.

    Attributes:
        older_than_s: Seconds since the last change after which temporary files of unknown
            writers, and strangers, may go.
        corrupt: Remove blocks that do not verify.
        strangers: Remove files that are no blocks, and no part of a store.
        dry_run: Change nothing, and tell what would be removed.
    """

    older_than_s: float = 3600.0
    corrupt: bool = False
    strangers: bool = False
    dry_run: bool = False
