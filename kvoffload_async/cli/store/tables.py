"""What `kvoffload store` shows to people."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from kvoffload_async.cli.store.collection import Collected
from kvoffload_async.cli.store.inspection import Inspection
from kvoffload_async.cli.store.verification import Verification
from kvoffload_async.cli.store.verified import Verified

Rows = list[tuple[str, str]]
"""What a figure is called, and what it is."""


def inspection_table(inspections: Sequence[Inspection]) -> Table:
    """Return what is in each namespace."""
    return columns_table("Store", [(found.name, _inspection_rows(found)) for found in inspections])


def verification_table(results: Sequence[tuple[str, Verification]]) -> Table:
    """Return how many blocks of each namespace are as they should be."""
    return columns_table("Blocks", [(name, verification_rows(found)) for name, found in results])


def collection_table(results: Sequence[Collected]) -> Table:
    """Return what was removed from each namespace."""
    title = "Would be removed" if any(found.dry_run for found in results) else "Removed"
    return columns_table(title, [(found.name, _collection_rows(found)) for found in results])


def shown(name: str) -> str:
    """Return a file's name as text that every terminal takes."""
    text = os.fsencode(name).decode(errors="replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def columns_table(title: str, namespaces: Sequence[tuple[str, Rows]]) -> Table:
    """Return a table with a column for each of several; all have the same rows."""
    table = Table(title=title, title_justify="left")
    table.add_column("namespace", style="bold")
    for name, _ in namespaces:
        table.add_column(Text(shown(name)), justify="right", overflow="fold")
    for rows in zip(*(rows for _, rows in namespaces), strict=True):
        table.add_row(rows[0][0], *(Text(value) for _, value in rows))
    return table


def _inspection_rows(found: Inspection) -> Rows:
    temps = (found.temps_of_living, found.temps_of_dead, found.temps_foreign)
    count = "none" if found.counted_bytes is None else f"{found.counted_bytes:,}"
    return [
        ("model", "unknown" if found.model is None else shown(found.model)),
        ("blocks", f"{found.blocks:,}"),
        ("bytes in blocks", f"{found.block_length_bytes:,}"),
        ("bytes in blocks, as allocated", f"{found.block_disk_bytes:,}"),
        ("bytes on disk", f"{found.disk_bytes:,}"),
        ("bytes counted", count),
        ("writers, living / dead", f"{found.living_writers:,} / {found.dead_writers:,}"),
        ("temporary, of living / dead / unknown", " / ".join(f"{n:,}" for n in temps)),
        ("bytes in temporary files", f"{found.temp_bytes:,}"),
        ("strangers", f"{found.strangers:,} of {found.stranger_bytes:,} bytes"),
        ("oldest block", _time(found.oldest_s)),
        ("newest block", _time(found.newest_s)),
    ]


def verification_rows(found: Verified[Any]) -> Rows:
    """Return how many blocks of one store are as they should be."""
    return [
        ("blocks read", f"{found.checked:,}"),
        ("sealed, and right", f"{found.sealed:,}"),
        ("unsealed", f"{found.unsealed:,}"),
        ("corrupt", f"{len(found.corrupt):,}"),
        ("unreadable", f"{len(found.unreadable):,}"),
    ]


def _collection_rows(found: Collected) -> Rows:
    return [
        ("temporary files of dead writers", f"{len(found.temps_of_dead):,}"),
        ("old temporary files of unknown ones", f"{len(found.temps_foreign):,}"),
        ("entries of dead writers", f"{len(found.writers):,}"),
        ("corrupt blocks", f"{len(found.corrupt):,}"),
        ("strangers", f"{len(found.strangers):,}"),
        ("empty folders", f"{len(found.folders):,}"),
        ("bytes on disk", f"{found.freed_bytes:,}"),
    ]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
