"""Contenders of a benchmark: tiers to measure, and the directories that they write in.

Tiers and baselines write to new directories inside a temporary one. On ext4, finding a free inode
is slow after many were freed recently, which would slow down tiers with one file per block more in
each round. Therefore used files are only truncated, and removed at the end of the benchmark. The
directories are spread over the disk, away from recently freed inodes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

from kvoffload_async.config import REQUIRED, OffloadConfig, parse_size_bytes
from kvoffload_async.errors import InputError, OffloadError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.facade.tier_options import options_of
from kvoffload_async.runtime.machine import temporary_directory
from kvoffload_async.types import (
    BlockIds,
    JobMetadata,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)

WARM_UP: Final = 2
EXTENT_BYTES: Final = 1 << 20
"""Maximum bytes per read or write call of a baseline, unless one block is larger."""
_SPARE_BYTES: Final = 64 << 20

# Linux's FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL, as on x86 and ARM.
_LONG_BYTES: Final = struct.calcsize("l")
_GET_FLAGS: Final = 2 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 1
_SET_FLAGS: Final = 1 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 2
_TOP_DIRECTORY: Final = 0x20000


class Place:
    """A directory for measurements; a context manager that restores its previous state."""

    def __init__(self, directory: str | None, key: str) -> None:
        """Set the directory's path; nothing is created yet.

        Args:
            directory: Where to write; None for the temporary directory.
            key: Name of the user's option, for messages.
        """
        self.path = Path(directory or temporary_directory()).absolute()
        self._key = key

    def __enter__(self) -> Self:
        """Create the directory if missing, and a temporary directory in it.

        Raises:
            InputError: It cannot be created.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with ExitStack() as stack, self._as_unwritable():
            for path in reversed(missing):
                stack.callback(_remove_if_empty, path)
            self.path.mkdir(parents=True, exist_ok=True)
            own = tempfile.TemporaryDirectory(
                prefix="kvoffload-bench-", dir=self.path, ignore_cleanup_errors=True
            )
            self._own = Path(stack.enter_context(own))
            _spread(self._own)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._stack.close()

    def check_room(self, needed_bytes: int) -> None:
        """Check the free space before the measurement starts.

        Raises:
            InputError: There is too little free space.
        """
        needed_bytes += _SPARE_BYTES
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < needed_bytes:
            raise InputError(
                f"{self._key}: {str(self.path)!r} has {free_bytes} bytes free and a round needs "
                f"{needed_bytes}; make room, name another directory, or use fewer --total-bytes"
            )

    def warm_up(self, content: memoryview, num_bytes: int) -> None:
        """Write and remove `WARM_UP` times `num_bytes`, to warm up the page cache's memory.

        A virtual machine may have returned free memory to its host; the first access to such a page
        of the cache is ten times slower. Touching the pages before every turn makes the turns
        equal. The factor is needed because the kernel does not reuse exactly these pages.

        Raises:
            InputError: The file cannot be written.
        """
        with (
            self.new_directory() as directory,
            self._as_unwritable(),
            Path(directory, "warm-up").open("wb", buffering=0) as file,
        ):
            for start in range(0, WARM_UP * num_bytes, EXTENT_BYTES):
                offset = start % content.nbytes
                file.write(content[offset : offset + EXTENT_BYTES])

    @contextmanager
    def new_directory(self) -> Iterator[str]:
        """Create an empty directory for one measurement; its files are truncated afterwards.

        Raises:
            InputError: It cannot be created.
        """
        with self._as_unwritable():
            directory = tempfile.mkdtemp(dir=self._own)
        try:
            yield directory
        finally:
            for folder, _, names in os.walk(directory):
                for name in names:
                    os.truncate(Path(folder, name), 0)

    @contextmanager
    def _as_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._key}: cannot write to {str(self.path)!r} ({error.strerror}); name another"
            ) from error


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # never created, or used by others meanwhile
        path.rmdir()


def _spread(path: Path) -> None:
    """Make ext4 distribute a directory's subdirectories over the disk, like those of the root."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not supported by other filesystems
            flags = struct.unpack("l", fcntl.ioctl(folder, _GET_FLAGS, bytes(_LONG_BYTES)))[0]
            fcntl.ioctl(folder, _SET_FLAGS, struct.pack("l", flags | _TOP_DIRECTORY))
    finally:
        os.close(folder)


class UnfitError(OffloadError):
    """A contender cannot be measured: it fails, hangs, or returns wrong bytes."""


class OpenTier:
    """A tier to measure, opened on an empty store, with its own threads.

    Attributes:
        manager: The manager to measure.
        request: Request context passed to `lookup`.
        step: Step context passed to `on_schedule_end`.
    """

    def __init__(self, manager: SecondaryTierManager) -> None:
        self.manager = manager
        self.request = ReqContext("bench")
        self.step = ScheduleEndContext()

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> JobMetadata:
        """Return a job for the manager's submit methods."""
        return JobMetadata(job_id, tuple(keys), rows, is_load, self.request)

    def close(self) -> None:
        """Close the tier; blocks until it is closed.

        Raises:
            UnfitError: It did not close cleanly.
        """
        report = self.manager.shutdown()
        if not report.is_clean:
            raise UnfitError(f"{self.manager.tier_type}: did not close: {report}")


_DIRECTORY: Final = "root_dir"
_CAPACITY: Final = "capacity_bytes"
_TIER_SPARE_BYTES: Final = 16 << 20
"""Space in addition to the blocks: indexes, journals, and a tier's minimum size."""


def _geometry(block_bytes: int) -> OffloadConfig:
    return OffloadConfig(cpu_bytes_to_use=0, block_bytes=block_bytes, model="bench")


_SPEC: Final = SimpleNamespace(config=_geometry(0))
"""Stand-in for a spec: names the model of the benchmark's blocks."""


class Contender:
    """A tier to measure, created by `SecondaryTierFactory`, and opened anew in every round.

    If a required capacity is not configured, it is set to more than a round needs.

    Attributes:
        name: Name in the results.
        options: The user's options.
        place: Where it writes; None if it uses no directory.
    """

    def __init__(self, tier_config: Mapping[str, Any]) -> None:
        """Keep a tier's configuration, including `type`; nothing is opened yet.

        Raises:
            InputError: The tier cannot be imported, or its directory is not a path.
            ConfigError: The tier is unknown.
        """
        config = dict(tier_config)
        self.name: str = config["type"]
        self.options: Mapping[str, Any] = {k: v for k, v in config.items() if k != "type"}
        try:
            accepted = options_of(SecondaryTierFactory.class_of(config))
        except (ImportError, AttributeError) as error:
            raise InputError(f"--tier {self.name}: cannot be imported: {error}") from error
        self._sizes_itself = accepted.get(_CAPACITY) is REQUIRED and _CAPACITY not in config
        self.place: Place | None = None
        if _DIRECTORY in accepted:
            directory = config.pop(_DIRECTORY, None)
            if directory is not None and not isinstance(directory, str):
                raise InputError(f"--tier: {_DIRECTORY}: {directory!r} is not valid; give a path")
            self.place = Place(directory, f"--tier {self.name}: {_DIRECTORY}")
        self._config = config

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenTier:
        """Open the tier on an empty store; raises the errors of its constructor.

        Args:
            view: The primary's rows.
            directory: A new directory in its place.
            stored_bytes: Bytes that will be stored.
        """
        config = self._configured(directory, stored_bytes)
        return OpenTier(SecondaryTierFactory.create_secondary_tier(config, view, _SPEC))

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return the bytes after which the tier overwrites old blocks; None if it never does."""
        given = self._configured(None, stored_bytes).get(_CAPACITY)
        return None if given is None else parse_size_bytes(given, _CAPACITY)

    def check(self, stored_bytes: int, block_sizes: Iterable[int]) -> None:
        """Validate the tier's configuration for rounds of `stored_bytes`, in blocks of these sizes.

        Raises:
            InputError: The configured capacity is below a round's size, which would measure
                evictions and misses.
            ConfigError: An option is unknown, missing or invalid.
        """
        given = self._config.get(_CAPACITY)
        if given is not None and parse_size_bytes(given, _CAPACITY) < stored_bytes:
            raise InputError(
                f"--tier {self.name}: {_CAPACITY}: {given!r} is less than the {stored_bytes} bytes "
                "that a round stores; give more, or use fewer --total-bytes"
            )
        directory = None if self.place is None else str(self.place.path)
        config = self._configured(directory, stored_bytes)
        for block_bytes in block_sizes:
            SecondaryTierFactory.check_config(config, _geometry(block_bytes))

    def _configured(self, directory: str | None, stored_bytes: int) -> dict[str, Any]:
        config = dict(self._config)
        if self.place is not None:
            config[_DIRECTORY] = directory
        if self._sizes_itself:
            config[_CAPACITY] = stored_bytes + stored_bytes // 4 + _TIER_SPARE_BYTES
        return config
