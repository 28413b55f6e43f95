"""The primary's memory as a mapping shared by several processes, without leaking a file.

The file needs a name only until every participant has mapped it. The first participant creates the
file exclusively in an in-memory filesystem; the others open it and wait for its full size; the last
one to arrive removes the name, after which no crash can leak it. Until then an unlocked file
belongs to killed participants, and is removed by the next starting process of the same user: every
participant holds a shared lock on the file while it uses the memory.

The directory is usually writable by all users, so names are not trustworthy. A file is used or
removed only if it belongs to this user, is a regular file without access for others, and has a
single name; all other files are left untouched.

Contents of the file: one mark, one note and the size of a cell per participant, in whole pages; the
rows of the primary; one flag byte per slot. Cells of unequal size, for instance of pipeline ranks
with different numbers of layers, make rows of the largest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from kvoffload_async.errors import ConfigError, StateError
from kvoffload_async.runtime.buffer import PAGE_BYTES, Pages, PrimaryBuffer, rows_within
from kvoffload_async.runtime.machine import space_of
from kvoffload_async.system_calls import REMEDY, RefusedCallError, naming_refusal

NOTE_BYTES = 16
_CELL_BYTES = 8
_ANNOUNCED, _ARRIVED = 1, 2
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory lies
_PREFIX = "kvoffload-"
_POLL_S = 0.005
_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it before Python 3.14
_POPULATED_BYTES = 64 << 20  # by one call, which holds the GIL


class SharedBuffer(PrimaryBuffer):
    """A `PrimaryBuffer` mapped by several participants, in one or several processes.

    Attributes:
        slot_flags: One byte per slot, shape `[num_slots]`, initially zero: state shared between
            participants.
        is_creator: Whether this participant created the file.
        cell_bytes: Bytes of a cell; a row has one per worker.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int,
        cell_bytes: int,
        *,
        num_cells: int = 1,
        participant: int,
        num_participants: int,
        unequal: Collection[int] = (),
        directory: str | Path = SHARED_MEMORY,
        join_timeout_s: float = 30.0,
        note: bytes = b"",
    ) -> None:
        """Create the mapping or join it; waits for its creator.

        Args:
            name: Unique name, the same for all participants.
            size_bytes: Maximum bytes of all rows.
            cell_bytes: Bytes of a cell in a row, as this participant knows it.
            num_cells: Cells per row.
            participant: Number of this participant, from 0.
            num_participants: Total number of participants.
            unequal: Participants whose `cell_bytes` may differ. All of them must arrive at the same
                time: each participant waits for their sizes, and takes the largest.
            directory: Directory of the file until all have arrived, on an in-memory filesystem.
            join_timeout_s: Seconds until the sizes are known and the file has its own.
            note: Message for the other participants, at most `NOTE_BYTES`.

        Raises:
            ConfigError: There is not enough space, another engine uses the name, the participants'
                sizes differ, or the file is not a private file of this user.
            TimeoutError: The creator, or one of `unequal`, did not come in time.
        """
        self._directory = Path(directory)
        self._path = self._directory / file_name(name)
        self._num_participants = num_participants
        self._notes_at = num_participants
        self._cells_at = self._notes_at + num_participants * NOTE_BYTES
        header_bytes = _whole_pages(self._cells_at + num_participants * _CELL_BYTES)
        deadline_s = time.monotonic() + join_timeout_s
        _remove_orphans(self._directory)
        self._file, self.is_creator = _enter(self._path, deadline_s)
        self._is_file_open = True
        mapping = None
        try:
            self.cell_bytes = self._agree(participant, cell_bytes, unequal, deadline_s)
            num_slots, stride_bytes = rows_within(size_bytes, self.cell_bytes, num_cells)
            rows_bytes = num_slots * stride_bytes
            mapped_bytes = _whole_pages(rows_bytes + num_slots)
            file_bytes = header_bytes + mapped_bytes
            if self.is_creator:
                _require_room(mapped_bytes, self._directory)
                os.ftruncate(self._file, file_bytes)
            else:
                _await_size(self._file, file_bytes, self._path, deadline_s, header_bytes)
            mapping = Pages(self._file, mapped_bytes, offset=header_bytes)
            if self.is_creator:
                # Reserve all pages: a missing page would raise SIGBUS during a copy.
                _reserve(self._file, file_bytes, self._directory)
            self._arrive(participant, note.ljust(NOTE_BYTES, b"\0"))
            _populate(mapping, mapped_bytes * participant // num_participants)
        except BaseException as error:
            # On timeout the creator is gone, and nobody else would remove the name.
            self._undo(mapping, remove=self.is_creator or isinstance(error, TimeoutError))
            raise
        self.slot_flags = memoryview(mapping)[rows_bytes : rows_bytes + num_slots]
        super().__init__(num_slots, stride_bytes, mapping=mapping)

    def has_arrived(self, participant: int) -> bool:
        """Return whether a participant has mapped this memory."""
        return participant not in self._missing(_ARRIVED)

    def notes(self, timeout_s: float = 30.0) -> list[bytes]:
        """Return the participants' notes, in participant order; waits until all have arrived.

        Raises:
            TimeoutError: Some have not arrived in time.
        """
        self._await_marks(range(self._num_participants), _ARRIVED, time.monotonic() + timeout_s)
        notes = self._read(self._notes_at, NOTE_BYTES)
        return [notes[at : at + NOTE_BYTES] for at in range(0, len(notes), NOTE_BYTES)]

    def remove_name(self) -> None:
        """Unlink the shared file if it still has a name; the memory is kept."""
        if self._is_file_open:
            _remove_name(self._path, self._file)

    def release(self, *, is_idle: bool = True) -> bool:
        """Release the memory as `PrimaryBuffer` does, and unlink the file if it still has a name.

        The pages are shared: they are freed when the last participant releases them, even if other
        address ranges are still mapped.
        """
        try:
            self.remove_name()
        finally:
            is_unmapped = super().release(is_idle=is_idle)
        return is_unmapped

    # -- internal -------------------------------------------------------------------------------

    # Participants use file I/O here instead of the mapping: the kernel orders it for all processes,
    # so that the last participant knows that it is the last.

    def _agree(
        self, participant: int, cell_bytes: int, unequal: Collection[int], deadline_s: float
    ) -> int:
        """Announce this participant's cell size; return the size that all participants use."""
        self._require_new(participant)
        at = self._cells_at + participant * _CELL_BYTES
        os.pwrite(self._file, struct.pack("<Q", cell_bytes), at)
        os.pwrite(self._file, bytes([_ANNOUNCED]), participant)
        self._await_marks(unequal, _ANNOUNCED, deadline_s)
        count = self._num_participants
        announced = unequal or {*range(count)}.difference(self._missing(_ANNOUNCED))
        cells: Sequence[int] = struct.unpack(f"<{count}Q", self._read(self._cells_at, _CELL_BYTES))
        sizes = {number: cells[number] for number in announced}
        if not unequal and len(set(sizes.values())) > 1:
            raise ConfigError(
                f"cpu_bytes_to_use: the participants of {self._path} announced cells of unequal "
                f"size: {sizes} (participant: bytes); all participants must have the same "
                "configuration"
            )
        return max(sizes.values())

    def _arrive(self, participant: int, note: bytes) -> None:
        """Record this participant's arrival; the last participant unlinks the file."""
        self._require_new(participant)
        os.pwrite(self._file, note, self._notes_at + participant * NOTE_BYTES)
        os.pwrite(self._file, bytes([_ARRIVED]), participant)
        if not self._missing(_ARRIVED):
            _remove_name(self._path, self._file)

    def _require_new(self, participant: int) -> None:
        if participant not in self._missing(_ARRIVED):
            raise ConfigError(
                f"engine_id: participant {participant} of {self._path.name} exists already; two "
                "engines share one engine_id: give each its own"
            )

    def _missing(self, mark: int) -> list[int]:
        """Return the participants that have not reached `mark`: announced, or arrived."""
        return [number for number, found in enumerate(self._read(0, 1)) if found < mark]

    def _await_marks(self, participants: Collection[int], mark: int, deadline_s: float) -> None:
        while missing := sorted({*participants}.intersection(self._missing(mark))):
            if not _pause(deadline_s):
                raise TimeoutError(
                    f"participants {missing} of {self._path.name} have not arrived in time: they "
                    "have ended, hang, or are on another host; see their errors"
                )

    def _read(self, at: int, width: int) -> bytes:
        """Return one field of all participants; zeros where nothing has been written yet."""
        size_bytes = self._num_participants * width
        return os.pread(self._file, size_bytes, at).ljust(size_bytes, b"\0")

    def _undo(self, mapping: Pages | None, *, remove: bool) -> None:
        """Close the file and the mapping after a failed arrival."""
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
                    # Filesystems without support free the pages with the last mapping.
                    with contextlib.suppress(OSError):
                        self._map.madvise(mmap.MADV_REMOVE)
            finally:
                self._close_file()
        self.slot_flags.release()
        super()._unmap(is_idle=is_idle)
        self._close_file()

    def _is_last(self) -> bool:
        """Give up the shared lock; return whether no other participant uses the memory.

        Each participant holds the lock from arrival to release or death.
        """
        # A failed upgrade to an exclusive lock drops the shared one, see flock(2); closing the file
        # would not, because the mapping has its own descriptor.
        return self._is_file_open and _try_lock(self._file, fcntl.LOCK_EX)

    def _close_file(self) -> None:
        if self._is_file_open:
            self._is_file_open = False
            os.close(self._file)


def file_name(name: str) -> str:
    """Return the file name for a region's name and the current user.

    The name is hashed, because it may be any text; the user's id separates users.
    """
    return f"{_user_prefix()}{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def free_space_bytes(directory: Path) -> int | None:
    """Return the free bytes of a directory's filesystem; None if they are unlimited or unknown."""
    space = space_of(directory)
    return None if space is None else space.f_bavail * space.f_frsize


def _enter(path: Path, deadline_s: float) -> tuple[int, bool]:
    """Open and lock the shared file; return its descriptor, and whether this call created it."""
    while True:
        for create in (True, False):
            try:
                file = _open_private(path, create=create)
            except (FileExistsError, FileNotFoundError):
                continue
            with _closing_on_error(file):
                # Without a name: it was removed as an orphan before it was locked.
                if _try_lock(file, fcntl.LOCK_SH) and os.fstat(file).st_nlink:
                    return file, create
            os.close(file)
        if not _pause(deadline_s):
            raise TimeoutError(f"{path} could be neither created nor opened in time")


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _await_size(
    file: int, size_bytes: int, path: Path, deadline_s: float, header_bytes: int
) -> None:
    while (found := os.fstat(file)).st_size != size_bytes:
        if found.st_size > header_bytes:
            raise ConfigError(
                f"cpu_bytes_to_use: {path} has {found.st_size} bytes instead of {size_bytes}; all "
                "participants must have the same configuration"
            )
        if not found.st_nlink:
            raise StateError(f"the creator of {path} has failed; see its error")
        if not _pause(deadline_s):
            raise TimeoutError(
                f"{path} did not reach its size of {size_bytes} bytes in time: its creator "
                "has ended or hangs; end the other processes of this engine and restart it"
            )


def _require_room(size_bytes: int, directory: Path) -> None:
    available = free_space_bytes(directory)
    if available is not None and size_bytes > available:
        raise _no_room(size_bytes, directory, f"only {available} are free")


def _reserve(file: int, size_bytes: int, directory: Path) -> None:
    """Allocate all pages of the file now."""
    try:
        with naming_refusal("fallocate"):
            os.posix_fallocate(file, 0, size_bytes)
    except RefusedCallError as error:
        raise ConfigError(
            f"cpu_bytes_to_use: shared memory cannot be allocated here ({error}); {REMEDY}"
        ) from error
    except OSError as error:
        raise _no_room(size_bytes, directory, str(error)) from error


def _populate(mapping: Pages, first: int) -> None:
    """Pre-fault all pages of the mapping: first those from byte `first` on, then those before.

    Participants begin in different places, since the first one to reach a page clears it. Before
    Linux 5.14, pages are mapped by their first accesses.
    """
    first -= first % PAGE_BYTES
    with contextlib.suppress(OSError):
        for begin, end in (first, len(mapping)), (0, first):
            for at in range(begin, end, _POPULATED_BYTES):
                mapping.madvise(_MADV_POPULATE_WRITE, at, min(_POPULATED_BYTES, end - at))


def _no_room(size_bytes: int, directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cpu_bytes_to_use: the primary needs {size_bytes} bytes of shared memory in {directory}, "
        f"but {why}; use less, or enlarge it (mount -o remount,size=..., or --shm-size of a "
        "container)"
    )


def _remove_orphans(directory: Path) -> None:
    """Remove files of participants that were all killed before the last one arrived."""
    for path in directory.glob(f"{_user_prefix()}*"):
        try:
            if _objection(path.lstat()):
                continue  # do not even open it
            file = _open_private(path)
        except (FileNotFoundError, ConfigError):
            continue  # removed, and possibly replaced
        try:
            if _try_lock(file, fcntl.LOCK_EX):
                _remove_name(path, file)
        finally:
            os.close(file)


def _user_prefix() -> str:
    return f"{_PREFIX}{os.geteuid()}-"


def _open_private(path: Path, *, create: bool = False) -> int:
    """Open a file that is private to this user, without blocking; return its descriptor.

    Raises:
        ConfigError: The file exists and is not private to this user.
        FileExistsError: `create` is set, and the file exists.
        FileNotFoundError: The file does not exist.
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
    """Return why a file is not private to this user, or has several names; otherwise empty."""
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
        "this engine did not create it: remove it, or choose another engine_id"
    )


def _remove_name(path: Path, file: int) -> None:
    """Unlink an open file, unless another file has replaced it."""
    # In a directory where only owners may remove names, another user's file stays.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if os.path.samestat(path.lstat(), os.fstat(file)):
            path.unlink()


def _try_lock(file: int, kind: int) -> bool:
    try:
        with naming_refusal("flock"):
            fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pause(deadline_s: float) -> bool:
    """Sleep briefly; return False if the deadline has passed."""
    left_s = deadline_s - time.monotonic()
    threading.Event().wait(min(_POLL_S, max(0.0, left_s)))
    return left_s > 0
