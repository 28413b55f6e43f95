"""The primary's memory as one mapping that several processes share, and no file left behind.

The mapping needs a name only until every participant has it. Whoever comes first makes the file,
exclusively, in a directory that lies in memory; the others open it and wait for its full size; and
the last one to arrive removes the name, so that from then on no kind of ending can leak it. Until
then a file that nobody locks belongs to participants that were killed on their way, and is removed
by whoever of the same user starts next: everybody keeps a shared lock on the file for as long as it
uses the memory.

The directory is usually open to every user of the machine, so a name proves nothing. A file is used
or removed only if this user owns it, it is a regular file that nobody else may read or write, and
it has no second name; everything else is left untouched.

In the file: the rows of the primary, one flag byte per slot, one arrival byte and one note per
participant.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvoffload_async.errors import ConfigError, StateError
from kvoffload_async.runtime.buffer import PAGE_BYTES, Pages, PrimaryBuffer

NOTE_BYTES = 16
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory lies
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
        directory: str | Path = SHARED_MEMORY,
        join_timeout_s: float = 30.0,
        note: bytes = b"",
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
            note: What the others are told of this one with its arrival, `NOTE_BYTES` at most.
            free_bytes: Tells how many bytes a directory has room for, None for "no limit".

        Raises:
            ConfigError: There is no room for it, another engine uses the name, or the file under
                the name is not a private file of this user.
            TimeoutError: Whoever makes the file did not do so in time.
        """
        self._directory = Path(directory)
        self._path = self._directory / file_name(name)
        rows_bytes = num_slots * stride_bytes
        self._arrivals_at = rows_bytes + num_slots
        self._notes_at = self._arrivals_at + num_participants
        self._num_participants = num_participants
        used_bytes = self._notes_at + num_participants * NOTE_BYTES
        size_bytes = -(-used_bytes // PAGE_BYTES) * PAGE_BYTES
        deadline_s = time.monotonic() + join_timeout_s
        _remove_orphans(self._directory)
        self._file, self.is_creator = _enter(self._path, deadline_s)
        self._is_file_open = True
        mapping = None
        try:
            if self.is_creator:
                _require_room(size_bytes, self._directory, free_bytes or free_space_bytes)
                os.ftruncate(self._file, size_bytes)
            else:
                _await_size(self._file, size_bytes, self._path, deadline_s)
            mapping = Pages(self._file, size_bytes)
            if self.is_creator:
                # A page that could not be had later would be a bus error in the middle of a copy.
                _reserve(self._file, size_bytes, self._directory)
            self._arrive(participant, note.ljust(NOTE_BYTES, b"\0"))
        except BaseException as error:
            # Timed out: whoever was to make it is gone, and nobody else would remove the name.
            self._undo(mapping, remove=self.is_creator or isinstance(error, TimeoutError))
            raise
        self.slot_flags = memoryview(mapping)[rows_bytes : self._arrivals_at]
        super().__init__(num_slots, stride_bytes, mapping=mapping)

    @property
    def has_name(self) -> bool:
        """Whether the file still has a name: some participant has not arrived yet."""
        return self._is_file_open and os.fstat(self._file).st_nlink > 0

    def notes(self, timeout_s: float = 30.0) -> list[bytes]:
        """Return every participant's note, by number; waits until all have arrived.

        Raises:
            TimeoutError: Some have not arrived in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while absent := self._absent():
            if not _pause(deadline_s):
                raise TimeoutError(
                    f"participants {absent} of {self._path.name} have not arrived within "
                    f"{timeout_s} s: they have ended or hang; see their own errors"
                )
        notes = os.pread(self._file, self._num_participants * NOTE_BYTES, self._notes_at)
        return [notes[at : at + NOTE_BYTES] for at in range(0, len(notes), NOTE_BYTES)]

    def remove_name(self) -> None:
        """Remove the file's name if it still has one; the memory stays."""
        if self._is_file_open:
            _remove_name(self._path, self._file)

    def release(self, *, is_idle: bool = True) -> bool:
        """Give the memory back, see `PrimaryBuffer`; a name that is still there goes as well.

        The pages are everybody's, so they stay until the last participant releases them: then they
        go, even where another one's range of addresses is still mapped.
        """
        try:
            self.remove_name()
        finally:
            is_unmapped = super().release(is_idle=is_idle)
        return is_unmapped

    # -- inside ---------------------------------------------------------------------------------

    def _arrive(self, participant: int, note: bytes) -> None:
        """Note the arrival; the last one removes the name.

        By writing and reading the file and not through the mapping: the system puts these in one
        order for all processes, so that the last to arrive sees that it is.
        """
        if os.pread(self._file, 1, self._arrivals_at + participant) == b"\1":
            raise ConfigError(
                f"engine_id: participant {participant} of {self._path.name} is there already; two "
                "engines share one engine_id: give each its own"
            )
        os.pwrite(self._file, note, self._notes_at + participant * NOTE_BYTES)
        os.pwrite(self._file, b"\1", self._arrivals_at + participant)
        if not self._absent():
            _remove_name(self._path, self._file)

    def _absent(self) -> list[int]:
        """Return the participants that have not arrived."""
        arrived = os.pread(self._file, self._num_participants, self._arrivals_at)
        return [number for number, mark in enumerate(arrived) if not mark]

    def _undo(self, mapping: Pages | None, *, remove: bool) -> None:
        """Close what was opened before the arrival has failed."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._close_file)
            if mapping is not None:
                closing.callback(mapping.close)
            if remove:
                self.remove_name()

    def _unmap(self, *, is_idle: bool) -> None:
        if is_idle:
            try:
                if self._is_last():
                    # A filesystem that cannot free them in place frees them with the last mapping.
                    with contextlib.suppress(OSError):
                        self._map.madvise(mmap.MADV_REMOVE)
            finally:
                self._close_file()
        self.slot_flags.release()
        super()._unmap(is_idle=is_idle)
        self._close_file()

    def _is_last(self) -> bool:
        """Tell whether no other participant uses the memory, and count as one that does not.

        By the lock that each has from its arrival to its release, or its death.
        """
        # Whoever asks for an exclusive lock in vain has lost the shared one, see flock(2); closing
        # the file would not do, as the mapping has a descriptor of its own.
        return self._is_file_open and _try_lock(self._file, fcntl.LOCK_EX)

    def _close_file(self) -> None:
        if self._is_file_open:
            self._is_file_open = False
            os.close(self._file)


def file_name(name: str) -> str:
    """Return what the file for a `SharedBuffer` of this name and this user is called.

    A hash, as any text is a name; the user's number, so that users never meet by accident.
    """
    return f"{_user_prefix()}{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def free_space_bytes(directory: Path) -> int | None:
    """Return how many bytes a directory's filesystem has room for; None if it has no limit."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize if space.f_blocks else None


def _enter(path: Path, deadline_s: float) -> tuple[int, bool]:
    """Open the file and lock it; return its descriptor, and whether it was made here."""
    while True:
        for create in (True, False):
            try:
                file = _open_private(path, create=create)
            except (FileExistsError, FileNotFoundError):
                continue
            with _closing_on_error(file):
                # Without a name by now: it was taken for an orphan before it was locked.
                if _try_lock(file, fcntl.LOCK_SH) and os.fstat(file).st_nlink:
                    return file, create
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
    for path in directory.glob(f"{_user_prefix()}*"):
        try:
            if _objection(path.lstat()):
                continue  # not even opened
            file = _open_private(path)
        except (FileNotFoundError, ConfigError):
            continue  # gone, and perhaps another file has taken the name
        try:
            if _try_lock(file, fcntl.LOCK_EX):
                _remove_name(path, file)
        finally:
            os.close(file)


def _user_prefix() -> str:
    return f"{_PREFIX}{os.geteuid()}-"


def _open_private(path: Path, *, create: bool = False) -> int:
    """Open a file that belongs to this user alone, without waiting; return its descriptor.

    Raises:
        ConfigError: There is a file, and it is not a private one of this user.
        FileExistsError: It was to be created.
        FileNotFoundError: It is not there.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    if create:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        file = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _not_private(path, str(error)) from error
    with _closing_on_error(file):
        objection = _objection(os.fstat(file))
        if objection:
            raise _not_private(path, objection)
    return file


@contextlib.contextmanager
def _closing_on_error(file: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(file)
        raise


def _objection(found: os.stat_result) -> str:
    """Return why a file is not this user's alone; empty if it is. One without a name may be."""
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"its mode {stat.S_IMODE(found.st_mode):o} gives rights to other users"
    return f"it has {found.st_nlink} names" if found.st_nlink > 1 else ""


def _not_private(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"engine_id: {path} cannot be the shared memory of user {os.geteuid()}'s engine: {why}; "
        "this engine has not made it: have it removed, or choose another engine_id"
    )


def _remove_name(path: Path, file: int) -> None:
    """Remove the name of an open file, unless it is another file's by now."""
    # Where only the owner may remove a name, another user's file that took it stays.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if os.path.samestat(path.lstat(), os.fstat(file)):
            path.unlink()


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
