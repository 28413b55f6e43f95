"""What `kvoffload store` shows of slab stores to people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvoffload_async.cli.store.slab.inspection import SlabInspection
from kvoffload_async.cli.store.slab.mending import Mended
from kvoffload_async.cli.store.slab.verification import SlabVerification
from kvoffload_async.cli.store.tables import Rows, columns_table, shown, verification_rows


def slab_inspection_table(inspections: Sequence[SlabInspection]) -> Table:
    """Return what is in each store."""
    return columns_table(
        "Slab stores", [(found.name, _inspection_rows(found)) for found in inspections]
    )


def slab_verification_table(results: Sequence[tuple[str, SlabVerification]]) -> Table:
    """Return how many blocks of each store are as they should be."""
    return columns_table("Blocks", [(name, _verification_rows(found)) for name, found in results])


def mended_table(title: str, results: Sequence[Mended]) -> Table:
    """Return what was removed and written anew."""
    if any(found.dry_run for found in results):
        title = "Would be removed"
    return columns_table(title, [(found.name, _mended_rows(found)) for found in results])


def _inspection_rows(found: SlabInspection) -> Rows:
    return [
        ("model", "unknown" if found.model is None else shown(found.model)),
        ("bytes of a block", "unknown" if found.block_bytes is None else f"{found.block_bytes:,}"),
        ("in use by process", found.in_use_by or "none"),
        ("blocks", f"{found.blocks:,}"),
        ("sealed / suspect", f"{found.sealed:,} / {found.suspect:,}"),
        ("slots, free of all", f"{found.free_slots:,} of {found.slots:,}"),
        ("segments", f"{found.segments:,}"),
        ("bytes on disk", f"{found.disk_bytes:,}"),
        ("bytes of the journal", f"{found.journal_bytes:,}"),
        ("damaged / torn", f"{found.damaged_bytes:,} / {found.torn_bytes:,}"),
        ("temporary files", f"{len(found.temps):,}"),
        ("strangers", f"{len(found.strangers):,}"),
    ]


def _verification_rows(found: SlabVerification) -> Rows:
    return [*verification_rows(found), ("changed meanwhile", f"{found.changed:,}")]


def _mended_rows(found: Mended) -> Rows:
    return [
        ("blocks kept", f"{found.blocks:,}"),
        ("blocks dropped", f"{len(found.dropped):,}"),
        ("files of killed writers", f"{len(found.temps):,}"),
        ("strangers", f"{len(found.strangers):,}"),
        ("bytes of files", f"{found.freed_bytes:,}"),
        ("manifest written anew", "yes" if found.manifest_rebuilt else "no"),
        ("journal written anew", "yes" if found.journal_rebuilt else "no"),
    ]
