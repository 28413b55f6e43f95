"""The primary's memory as one mapping that several processes share, and no file left behind.

The mapping needs a name only until every participant has it. Whoever comes first makes the file,
exclusively, in a directory that lies in memory; the others open it and wait for its full size; and
the last one to arrive removes the name, so that from then on no kind of ending can leak it. Until
then everybody keeps a shared lock on the file: a file that nobody locks belongs to participants
that were killed on their way, and is removed by whoever starts next.

In the file: the rows of the primary, one flag byte a slot, one arrival byte a participant.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvoffload_async.errors import ConfigError, StateError
from kvoffload_async.runtime.buffer import PAGE_BYTES, PrimaryBuffer

_PREFIX = "kvoffload-"
_POLL_S = 0.005


class SharedBuffer(PrimaryBuffer):
    """A `PrimaryBuffer` that several participants map, in one process or in several.

    Attributes:
        slot_flags: One byte a slot, shape `[num_slots]`, zero at first: what participants tell
            each other about a slot.
        is_creator: Whether this participant made the file.
    """

    def __init__(
        self,
        name: str,
        num_slots: int,
        stride_bytes: int,
        *,
        participant: int,
        num_participants: int,
        directory: str | Path = "/dev/shm",  # noqa: S108 - where POSIX shared memory lies
        join_timeout_s: float = 30.0,
        free_bytes: Callable[[Path], int | None] | None = None,
    ) -> None:
        """Make the mapping or join it; waits for whoever makes it.

        Args:
            name: The same for all participants, and for nobody else.
            num_slots: Rows.
            stride_bytes: Bytes of a row.
            participant: This one's number, from 0.
            num_participants: How many there will be.
            directory: Where the file lies until all have arrived; of a filesystem in memory.
            join_timeout_s: Seconds until the file must have its full size.
            free_bytes: Tells how many bytes a directory has room for, None for "no limit".

        Raises:
            ConfigError: There is no room for it, or another engine uses the name.
            TimeoutError: Whoever makes the file did not do so in time.
        """
        self._directory = Path(directory)
        self._path = self._directory / (_PREFIX + re.sub(r"[^\w.-]", "_", name))
        rows_bytes = num_slots * stride_bytes
        self._arrivals_at = rows_bytes + num_slots
        size_bytes = -(-(self._arrivals_at + num_participants) // PAGE_BYTES) * PAGE_BYTES
        deadline_s = time.monotonic() + join_timeout_s
        _remove_orphans(self._directory)
        self._file, self.is_creator = _enter(self._path, deadline_s)
        self._has_left = False
        try:
            if self.is_creator:
                _require_room(size_bytes, self._directory, free_bytes or free_space_bytes)
                os.ftruncate(self._file, size_bytes)
            else:
                _await_size(self._file, size_bytes, self._path, deadline_s)
            mapping = mmap.mmap(self._file, size_bytes)
            if self.is_creator:
                # A page that could not be had later would be a bus error in the middle of a copy.
                _reserve(self._file, size_bytes, self._directory)
            self._arrive(participant, num_participants)
        except BaseException as error:
            # Timed out: whoever was to make it is gone, and nobody else would remove the name.
            self.leave(remove=self.is_creator or isinstance(error, TimeoutError))
            raise
        self.slot_flags = memoryview(mapping)[rows_bytes : self._arrivals_at]
        super().__init__(num_slots, stride_bytes, mapping=mapping)

    @property
    def has_name(self) -> bool:
        """Whether the file still has a name: some participant has not arrived yet."""
        return not self._has_left and os.fstat(self._file).st_nlink > 0

    def release(self) -> bool:
        """Unmap the memory, see `PrimaryBuffer`; a name that is still there goes as well."""
        self.leave(remove=True)
        self.slot_flags.release()
        return super().release()

    # -- inside ---------------------------------------------------------------------------------

    def _arrive(self, participant: int, num_participants: int) -> None:
        """Note the arrival; the last one removes the name.

        By writing and reading the file and not through the mapping: the system puts these in one
        order for all processes, so that the last to arrive sees that it is.
        """
        if os.pread(self._file, 1, self._arrivals_at + participant) == b"\1":
            raise ConfigError(
                f"engine_id: participant {participant} of {self._path.name} is there already; two "
                "engines share one engine_id: give each its own"
            )
        os.pwrite(self._file, b"\1", self._arrivals_at + participant)
        arrived = os.pread(self._file, num_participants, self._arrivals_at)
        if arrived == b"\1" * num_participants:
            self._unlink()

    def leave(self, *, remove: bool) -> None:
        """Let go of the file; the mapping stays."""
        if self._has_left:
            return
        self._has_left = True
        if remove:
            self._unlink()
        os.close(self._file)

    def _unlink(self) -> None:
        """Remove the name, unless it is another file's by now."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == os.fstat(self._file).st_ino:
                self._path.unlink()


def free_space_bytes(directory: Path) -> int | None:
    """Return how many bytes a directory's filesystem has room for; None if it has no limit."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize if space.f_blocks else None


def _enter(path: Path, deadline_s: float) -> tuple[int, bool]:
    """Open the file and lock it; return its descriptor, and whether it was made here."""
    while True:
        for flags in (os.O_CREAT | os.O_EXCL, 0):
            try:
                file = os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            except (FileExistsError, FileNotFoundError):
                continue
            # Without a name by now: it was taken for an orphan before it was locked.
            if _try_lock(file, fcntl.LOCK_SH) and os.fstat(file).st_nlink:
                return file, bool(flags)
            os.close(file)
        if not _pause(deadline_s):
            raise TimeoutError(f"{path} could neither be made nor opened in time")


def _await_size(file: int, size_bytes: int, path: Path, deadline_s: float) -> None:
    while (found := os.fstat(file)).st_size != size_bytes:
        if found.st_size:
            raise ConfigError(
                f"cpu_bytes_to_use: {path} has {found.st_size} bytes and not {size_bytes}; every "
                "participant must have the same configuration"
            )
        if not found.st_nlink:
            raise StateError(f"whoever was to make {path} has failed; see its own error")
        if not _pause(deadline_s):
            raise TimeoutError(
                f"{path} did not reach its size of {size_bytes} bytes in time: whoever makes it "
                "has ended or hangs; end the other processes of this engine and start it again"
            )


def _require_room(
    size_bytes: int, directory: Path, free_bytes: Callable[[Path], int | None]
) -> None:
    available = free_bytes(directory)
    if available is not None and size_bytes > available:
        raise _no_room(size_bytes, directory, f"only {available} are free there")


def _reserve(file: int, size_bytes: int, directory: Path) -> None:
    """Have the memory now, all of it."""
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError as error:
        raise _no_room(size_bytes, directory, str(error)) from error


def _no_room(size_bytes: int, directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cpu_bytes_to_use: the primary takes {size_bytes} bytes of shared memory in {directory}, "
        f"but {why}; use less, or enlarge it (mount -o remount,size=..., or --shm-size of a "
        "container)"
    )


def _remove_orphans(directory: Path) -> None:
    """Remove the files of participants that were all killed before the last one arrived."""
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or another user's
        try:
            # Locked and named: nobody but us may remove the name, so it is this file's.
            if _try_lock(file, fcntl.LOCK_EX) and os.fstat(file).st_nlink:
                path.unlink()
        finally:
            os.close(file)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pause(deadline_s: float) -> bool:
    """Let a moment pass; False if the deadline has passed instead."""
    left_s = deadline_s - time.monotonic()
    threading.Event().wait(min(_POLL_S, max(0.0, left_s)))
    return left_s > 0
