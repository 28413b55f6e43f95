"""What is in a slab store, in figures, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload_async.tiers.files.maintenance import MaintenanceIo
from kvoffload_async.tiers.slab.layout import BAD_JOURNAL, segment_name
from kvoffload_async.tiers.slab.maintenance.stores import (
    Contents,
    SlabStore,
    read_contents,
    user_of,
)
from kvoffload_async.tiers.slab.records import HAS_DIGEST, SUSPECT


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabInspection:
    """What one store is like. Bytes on disk are as allocated.

    Attributes:
        name: Its folder's name.
        model: The model's name, and `rank` whose blocks these are, if the manifest says.
        block_bytes: Length of a block, if the manifest says.
        in_use_by: The id of the process that has it open; None if nobody has.
        blocks: Blocks that are there: `with_digest` have one, `suspect` ones were recorded before
            damage to the journal.
        segments: Files of blocks, with `slots` in them, `free_slots` of them without a block.
        disk_bytes: Everything, the folder included.
        journal_bytes: Length of the journal: `damaged_bytes` in the middle of it cannot be read,
            and `torn_bytes` at its end, which is what a killed writer leaves.
        temps: Files that somebody was writing when he was killed; of a store in use, being written.
        unknown_files: Files and folders that are no part of a store.
        problems: What is wrong, a line each.
    """

    name: str
    model: str | None
    rank: int | None
    block_bytes: int | None
    in_use_by: str | None
    blocks: int
    with_digest: int
    suspect: int
    segments: int
    slots: int
    free_slots: int
    disk_bytes: int
    journal_bytes: int
    damaged_bytes: int
    torn_bytes: int
    temps: tuple[str, ...]
    unknown_files: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The figures for people."""
        block_bytes = "unknown" if self.block_bytes is None else f"{self.block_bytes:,}"
        return [
            ("model", "unknown" if self.model is None else self.model),
            ("bytes of a block", block_bytes),
            ("in use by process", self.in_use_by or "none"),
            ("blocks", f"{self.blocks:,}"),
            ("with a digest / suspect", f"{self.with_digest:,} / {self.suspect:,}"),
            ("slots, free of all", f"{self.free_slots:,} of {self.slots:,}"),
            ("segments", f"{self.segments:,}"),
            ("bytes on disk", f"{self.disk_bytes:,}"),
            ("bytes of the journal", f"{self.journal_bytes:,}"),
            ("damaged / torn", f"{self.damaged_bytes:,} / {self.torn_bytes:,}"),
            ("temporary files", f"{len(self.temps):,}"),
            ("unknown files", f"{len(self.unknown_files):,}"),
        ]


async def inspect_slab(io: MaintenanceIo, store: SlabStore) -> tuple[SlabInspection, Contents]:
    """Look at a store; changes nothing.

    Raises:
        OSError: A file cannot be read.
    """
    user = await io.run(user_of, io.ops, store)
    contents = await io.run(read_contents, io.ops, store)
    return inspection_of(store, contents, user), contents


def inspection_of(store: SlabStore, contents: Contents, user: str | None) -> SlabInspection:
    """Return a store's figures, given what its files say and who has it open."""
    manifest, scanned, flags = contents.manifest, contents.scanned, contents.live["flags"]
    is_known = manifest is not None
    slots = sum(contents.slots.values())
    return SlabInspection(
        name=store.name,
        model=str(manifest.fields.get("model_name")) if manifest else None,
        rank=manifest.rank if manifest else None,
        block_bytes=manifest.block_bytes if manifest else None,
        in_use_by=user,
        blocks=len(contents.live),
        with_digest=int((flags & HAS_DIGEST != 0).sum()),
        suspect=int((flags & SUSPECT != 0).sum()),
        segments=len(contents.found.segments),
        slots=slots,
        free_slots=slots - len(contents.live),
        disk_bytes=contents.found.allocated_bytes,
        journal_bytes=contents.journal_bytes,
        damaged_bytes=scanned.lost_bytes,
        torn_bytes=contents.journal_bytes - scanned.end_bytes if is_known else 0,
        temps=tuple(contents.found.temps),
        unknown_files=tuple(contents.found.unknown_files),
        problems=tuple(_problems(contents, user)),
    )


def _problems(contents: Contents, user: str | None) -> list[str]:
    problems = []
    if contents.is_newer:  # and of the rest nobody here knows what it should be
        return [str(contents.manifest_problem)]
    if contents.manifest_problem:
        problems.append(f"{contents.manifest_problem}; no tier can open this; see repair")
    if contents.found.segments and not contents.found.has_journal:
        problems.append("the journal is missing: nothing says which blocks these are")
    if contents.scanned.lost_bytes:
        problems.append(f"{contents.scanned.lost_bytes} bytes of the journal are damaged")
    if contents.scanned.num_gaps:
        problems.append(f"frames of the journal are missing in {contents.scanned.num_gaps} places")
    if not contents.is_trusted and contents.found.has_journal:
        problems.append(
            "the store was not closed before the machine went down, or its journal has lost its end"
        )
    if contents.found.has_bad_journal:
        problems.append(f"{BAD_JOURNAL}: a journal that could not be read, kept when it was found")
    for number, refusal in sorted(contents.found.refused.items()):
        name = segment_name(number)
        problems.append(f"{name} is refused: {refusal.why}; look whose it is, and remove it")
    if contents.found.temps and user is None:
        problems.append(f"{len(contents.found.temps)} files that a killed writer has left")
    return problems
