"""The contract of maintenance: inspecting and cleaning stores without opening a tier.

A *store* is the persistent state of one tier: a namespace directory of `fs`, a folder of `slab`.
Each call of `StoreMaintenance` returns an asynchronous iterator of findings; the work proceeds as
the caller iterates:

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

from kvoffload_async.types import TENANT_TAG, OffloadKey


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of maintenance: an observation or an action."""


@dataclass(frozen=True, slots=True)
class Problem(Finding):
    """An error that maintenance does not fix.

    Attributes:
        text: The error and its cause, in one line.
        what: The affected file or block; empty if the whole store is affected.
    """

    text: str
    what: str = ""


@dataclass(frozen=True, slots=True)
class Removal(Finding):
    """A file, folder or block that was removed or, in a dry run, would be.

    Attributes:
        what: The file, folder or block.
        reason: Why it was removed.
        freed_bytes: Disk space freed; 0 for a block whose space stays allocated.
    """

    what: str
    reason: str
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Summary(Finding):
    """The totals of a maintenance run; always the last finding.

    Attributes:
        title: Title for a table of summaries.
        rows: Label and value of each figure, human-readable; all stores of a kind share the labels.
        figures: The figures as a JSON object.
        stopped_after: Position at which the work was stopped, for
            `MaintenanceControl.resume_after`. Empty if it ran to the end, or if this kind of store
            cannot resume.
    """

    title: str
    rows: Sequence[tuple[str, str]] = field(repr=False)
    figures: Mapping[str, Any]
    stopped_after: str = ""


Findings: TypeAlias = AsyncGenerator[Finding, None]
"""Iterator over findings; closing it early stops the work cleanly and releases all locks."""


def _ignore(_amount: int) -> None:
    """Ignore progress reports."""


MAX_LISTED: Final = 10
"""Default maximum number of blocks that a summary lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceControl:
    """Progress callbacks and limits for maintenance. Callbacks run on the event loop.

    Attributes:
        expect: Called with an amount of work planned, in units chosen by the store.
        advance: Called with an amount of work done.
        should_stop: Polled between units of work; once it returns true, the rest is skipped and the
            summary covers the work done.
        max_listed: Maximum number of corrupt and unreadable blocks that the summary of `verify`
            lists, in addition to their count; None: all. Each is also yielded as a finding.
        resume_after: Position from an earlier `Summary.stopped_after`; empty: start at the
            beginning.
    """

    expect: Callable[[int], None] = _ignore
    advance: Callable[[int], None] = _ignore
    should_stop: Callable[[], bool] = lambda: False
    max_listed: int | None = MAX_LISTED
    resume_after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOptions:
    """Options of `gc`: what it removes besides leftovers of dead writers and empty folders.

    Attributes:
        older_than_s: Minimum age in seconds since the last change for removing unknown files and
            temporary files of unknown writers.
        corrupt: Whether to remove blocks that fail verification.
        unknown_files: Whether to remove files that are neither blocks nor part of a store.
        dry_run: Change nothing; report what would be removed.
        max_age_s: Remove blocks last written or renewed more than this many seconds ago; None: no
            age limit. For stores whose tier does not limit them (`bounds_blocks`), like
            `keep_bytes`.
        keep_bytes: Keep the newest blocks up to this total size; None: keep all.
        tenant_tag: Remove all blocks of the tenant with this tag; None: of none.
    """

    older_than_s: float = 3600.0
    corrupt: bool = False
    unknown_files: bool = False
    dry_run: bool = False
    max_age_s: float | None = None
    keep_bytes: int | None = None
    tenant_tag: bytes | None = None

    def selects(self, key: OffloadKey | None) -> bool:
        """Return whether a key is of the tenant whose blocks are to be removed."""
        return key is not None and key[TENANT_TAG] == self.tenant_tag


class StoreMaintenance(ABC):
    """Maintains one store. Tiers may have it open, unless the implementation refuses.

    The implementation is responsible for: never blocking the loop; polling `should_stop` at least
    every few seconds; removing nothing that a live writer owns; ending with one `Summary`.

    Any iterator raises `InputError` if the store is locked by another process or cannot be written,
    and `OSError` if an essential part of it cannot be read.

    Thread: loop.
    """

    tier_type: ClassVar[str]
    """Type name of the tiers that use these stores."""
    report_key: ClassVar[str]
    """Key under which a report lists the summaries of these stores."""
    appearance: ClassVar[str]
    """How a store of this kind is recognised, as text for users."""
    has_generic_name: ClassVar[bool] = False
    """Whether such a store is recognised by its name alone. Then another kind that finds its own
    files in the same folder takes precedence."""
    takes_urls: ClassVar[bool] = False
    """Whether stores are located by URL instead of by directory."""
    bounds_blocks: ClassVar[bool] = False
    """Whether `gc` removes blocks by age and size; for stores whose tier has no such limit."""
    resumes: ClassVar[bool] = False
    """Whether `verify` and `gc` can resume where an earlier run was stopped."""

    folder: str
    """Path or URL of the store."""

    def use_integrity_key_file(self, path: str) -> None:
        """Use the integrity key in a file for verification; ignored by stores without such keys.

        Raises:
            ConfigError: The file is unusable.
        """
        del path

    def use_encryption_key_files(self, paths: Sequence[str]) -> None:
        """Use the encryption keys in files for verification; see `use_integrity_key_file`."""
        del paths

    @classmethod
    @abstractmethod
    async def find(cls, directory: str) -> Sequence[Self]:
        """Return the stores at or directly inside a directory, sorted by name.

        Args:
            directory: Absolute path.

        Raises:
            InputError: The directory cannot be read.
        """

    @property
    def name(self) -> str:
        """The store's display name: the name of its folder."""
        return PurePath(self.folder).name

    @abstractmethod
    def inspect(self, control: MaintenanceControl) -> Findings:
        """Count the store's contents; changes nothing."""

    @abstractmethod
    def verify(self, control: MaintenanceControl) -> Findings:
        """Read every block and check its digest; changes nothing."""

    @abstractmethod
    def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        """Remove leftovers and, if selected, corrupt or expired blocks; see `GcOptions`."""
