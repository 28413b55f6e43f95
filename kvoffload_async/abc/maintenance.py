"""The contract of maintenance: looking after what the tiers of one kind keep, without a tier.

A *store* is what one tier keeps: a namespace in a directory of `fs`, a folder of `slab`. Each call
of `StoreMaintenance` is an asynchronous iterator of findings that works as it is iterated over:

    async with aclosing(store.verify(MaintenanceControl())) as findings:
        async for finding in findings:
            print(finding)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar, Final, Self, TypeAlias


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that maintenance has found or done."""


@dataclass(frozen=True, slots=True)
class Problem(Finding):
    """Something that is wrong, and stays so.

    Attributes:
        text: What is wrong and why, in one line.
        what: The file or block that it is about; empty if it is the store.
    """

    text: str
    what: str = ""


@dataclass(frozen=True, slots=True)
class Removal(Finding):
    """Something that was removed or, in a dry run, would be.

    Attributes:
        what: The file, folder or block.
        reason: Why.
        freed_bytes: What it took on disk; 0 for a block whose place stays.
    """

    what: str
    reason: str
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rewrite(Finding):
    """A file that was written anew, or in a dry run would be; `what` names it."""

    what: str


@dataclass(frozen=True, slots=True)
class Summary(Finding):
    """What it has come to; always the last finding.

    Attributes:
        title: What a table of summaries is called.
        rows: Label and value of each figure, for people; every store of a kind has the same labels.
        figures: The figures as a JSON object.
        stopped_after: Where the work was stopped: what `MaintenanceControl.resume_after` takes.
            Empty if it was not, or if this kind of store begins anew.
    """

    title: str
    rows: Sequence[tuple[str, str]] = field(repr=False)
    figures: Mapping[str, Any]
    stopped_after: str = ""


Findings: TypeAlias = AsyncGenerator[Finding, None]
"""Closing it early ends the work in order: whatever is locked is unlocked then."""


def _ignore(_amount: int) -> None:
    """Nobody follows the progress."""


MAX_LISTED: Final = 10
"""How many of many are listed, where nobody asks for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceControl:
    """How a program follows maintenance, and stops it. The calls are made on the event loop.

    Attributes:
        expect: Told of work that is to be done, in units of the store's own.
        advance: Told of work that is done.
        should_stop: Asked between two pieces of work; once it is true, the rest is left out, and
            the summary is of what was done.
        max_listed: How many corrupt and unreadable blocks the summary of `verify` lists, beside
            how many there are; None: all. Each of them is a finding anyway.
    """

    expect: Callable[[int], None] = _ignore
    advance: Callable[[int], None] = _ignore
    should_stop: Callable[[], bool] = lambda: False
    max_listed: int | None = MAX_LISTED
    resume_after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOptions:
    """What `gc` removes besides what dead writers have left, and empty folders.

    Attributes:
        older_than_s: Seconds since the last change from which on temporary files of unknown
            writers, and unknown files, may go.
        corrupt: Whether to remove blocks that do not verify.
        unknown_files: Whether to remove files that are no blocks, and no part of a store.
        dry_run: Change nothing, and find what would be removed.
        max_age_s: Seconds since a block was written or renewed from which on it goes; None: any.
            This and `keep_bytes` are for stores that no tier bounds (`bounds_blocks`).
        keep_bytes: How much of the blocks may stay, the newest; None: all.
    """

    older_than_s: float = 3600.0
    corrupt: bool = False
    unknown_files: bool = False
    dry_run: bool = False
    max_age_s: float | None = None
    keep_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOptions:
    """What `repair` may rely on.

    Attributes:
        manifest: The manifest of a store of the same layout, for one that has lost its own; kinds
            without manifests ignore it.
    """

    manifest: bytes | None = None


class StoreMaintenance(ABC):
    """Looks after one store. Tiers may be open on it, where the implementation does not refuse.

    The implementation is responsible for: never blocking the loop; asking `should_stop` at least
    every few seconds; removing nothing that a living writer owns; ending with one `Summary`.

    Raises, out of any iterator: `InputError` where the store is in use by somebody who keeps it for
    himself, or cannot be written; `OSError` where what it cannot do without cannot be read.

    Thread: loop.
    """

    tier_type: ClassVar[str]
    """The type of the tiers whose stores these are."""
    report_key: ClassVar[str]
    """Under which key a report lists the summaries of such stores."""
    appearance: ClassVar[str]
    """By what such a store is recognised, for people."""
    has_generic_name: ClassVar[bool] = False
    """Whether a name is all by which it is recognised: then another kind that finds its own files
    in the same folder is right."""
    takes_urls: ClassVar[bool] = False
    """Whether such stores are found by a URL, and not by a directory."""
    bounds_blocks: ClassVar[bool] = False
    """Whether `gc` removes blocks for their age and size: where no tier does."""
    resumes: ClassVar[bool] = False
    """Whether `verify` and `gc` go on where an earlier run was stopped."""

    folder: str
    """Where the store is."""

    def use_integrity_key_file(self, path: str) -> None:
        """Verify with the integrity key in a file from now on; kinds that have none ignore it.

        Raises:
            ConfigError: The file is unusable.
        """
        del path

    @classmethod
    @abstractmethod
    async def find(cls, directory: str) -> Sequence[Self]:
        """Return the stores that a directory is, or that lie in it, by name.

        Args:
            directory: Its absolute path.

        Raises:
            InputError: It cannot be read.
        """

    @property
    def name(self) -> str:
        """What the store is called: its folder's name."""
        return PurePath(self.folder).name

    @abstractmethod
    def inspect(self, control: MaintenanceControl) -> Findings:
        """Count what is there; changes nothing."""

    @abstractmethod
    def verify(self, control: MaintenanceControl) -> Findings:
        """Read every block and compare it with its digest; changes nothing."""

    @abstractmethod
    def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        """Remove what nobody will use."""

    @abstractmethod
    def repair(self, options: RepairOptions, control: MaintenanceControl) -> Findings:
        """Keep all blocks that verify, drop the rest, and make the store usable.

        Raises:
            ConfigError: At the call, before anything is done: an option is unusable.
        """
