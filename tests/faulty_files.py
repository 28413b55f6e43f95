"""The system calls of the tiers on disk, with faults: calls are counted, rules say what fails."""

from __future__ import annotations

import errno
import os
import signal
import stat as stat_module
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes


@dataclass(frozen=True, slots=True)
class FileCall:
    """One call, as rules see it.

    Attributes:
        number: Counted over all methods, from 1.
        name: The method.
        path: What it is about; for a descriptor, what that was opened as.
        flags: The flags of `open`; for a descriptor, those that it was opened with.
        thread_id: Who called.
    """

    number: int
    name: str
    path: str
    flags: int
    thread_id: int


@dataclass(slots=True, eq=False)
class Hang:
    """Calls that do not return until they are released.

    Attributes:
        entered: Set when the first call hangs.
    """

    entered: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let the calls go on, now and from now on."""
        self._released.set()

    def wait(self) -> None:
        """Hang."""
        self.entered.set()
        self._released.wait()


@dataclass(slots=True, eq=False)
class Rule:
    """Which calls it takes, how many of them, and what it does to these."""

    on: frozenset[str] | None
    at: int | None
    when: Callable[[FileCall], bool] | None
    times: int | None
    act: Callable[[], None] | None = None
    max_bytes: int | None = None
    kills_torn: bool = False

    def takes(self, call: FileCall) -> bool:
        """Tell whether the rule is for a call; if so, that counts."""
        if self.times == 0 or (self.on is not None and call.name not in self.on):
            return False
        if self.at not in {None, call.number} or not (self.when is None or self.when(call)):
            return False
        if self.times is not None:
            self.times -= 1
        return True


_TEARABLE = {"pwrite", "pwritev", "fallocate"}
_ABSENT = {errno.ENODATA, errno.EOPNOTSUPP}


class FaultyFileOps(FileOps):
    """The operating system's calls, with faults.

    Attributes:
        calls: Every call so far.
        open_fds: Descriptors that were opened here and not closed -> (path, flags).
    """

    def __init__(self, *, small_root: str | None = None, small_bytes: int = 0) -> None:
        """Start without faults.

        Args:
            small_root: A folder that stands for a filesystem of `small_bytes`: what would take
                more disk below it fails with ENOSPC.
            small_bytes: The size of that filesystem, in allocated bytes.
        """
        super().__init__()
        self.calls: list[FileCall] = []
        self.open_fds: dict[int, tuple[str, int]] = {}
        self._rules: list[Rule] = []
        self._hangs: list[Hang] = []
        self._mutex = threading.Lock()
        self._small_root = small_root
        self._small_bytes = small_bytes

    # -- rules ----------------------------------------------------------------------------------

    def fail(
        self,
        error: int | Exception,
        *,
        on: str | None = None,
        at: int | None = None,
        when: Callable[[FileCall], bool] | None = None,
        times: int | None = None,
    ) -> None:
        """Make calls raise an error instead of being made (a `close` is made, too).

        Args:
            error: The error, or the number of an OSError.
            on: Methods, separated by blanks; by default all.
            at: The number of the only call.
            when: Which calls.
            times: How many calls, at most.
        """

        def act() -> None:
            if isinstance(error, Exception):
                raise error
            raise OSError(error, f"injected: {os.strerror(error)}")

        self._add(Rule(_names(on), at, when, times, act))

    def shorten(self, max_bytes: int, *, on: str, times: int | None = None) -> None:
        """Make calls that write or read move at most `max_bytes`."""
        self._add(Rule(_names(on), None, None, times, max_bytes=max_bytes))

    def hang(
        self,
        *,
        on: str | None = None,
        at: int | None = None,
        when: Callable[[FileCall], bool] | None = None,
        times: int | None = None,
    ) -> Hang:
        """Make calls wait for the release before they are made."""
        hang = Hang()
        self._hangs.append(hang)
        self._add(Rule(_names(on), at, when, times, hang.wait))
        return hang

    def kill(self, at: int, *, torn: bool = False) -> None:
        """Kill this process by SIGKILL before a call; `torn`: a write, or allocation, gets half."""
        self._add(Rule(None, at, None, None, None if torn else _kill, kills_torn=torn))

    def heal(self) -> None:
        """Drop every rule, and release every hang."""
        with self._mutex:
            self._rules.clear()
        for hang in self._hangs:
            hang.release()

    # -- what was called ------------------------------------------------------------------------

    @property
    def thread_ids(self) -> set[int]:
        """The threads that made calls."""
        return {call.thread_id for call in self.calls}

    def counts(self, since: int = 0) -> Counter[str]:
        """Return how often each method was called, the first `since` calls left out."""
        return Counter(call.name for call in self.calls[since:])

    # -- the calls ------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        self._before("open", path, flags)
        if flags & os.O_CREAT and not Path(path).exists():
            self._take_room(path, 0)
        fd = super().open(path, flags)
        self.open_fds[fd] = (path, flags)
        return fd

    def close(self, fd: int) -> None:
        path, flags = self.open_fds.pop(fd, ("", 0))
        try:
            self._before("close", path, flags)
        finally:
            super().close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        rule = self._before_fd("pwrite", fd)
        if rule is not None and rule.kills_torn:
            super().pwrite(fd, data[: max(1, len(data) // 2)], offset)
            _kill()
        if rule is not None and rule.max_bytes is not None:
            data = data[: rule.max_bytes]
        size_bytes = os.fstat(fd).st_blocks * 512
        self._take_room(self.open_fds[fd][0], offset + len(data) - size_bytes)
        return super().pwrite(fd, data, offset)

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        rule = self._before_fd("pread_into", fd)
        if rule is not None and rule.max_bytes is not None:
            buffer = buffer[: rule.max_bytes]
        return super().pread_into(fd, buffer, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        rule = self._before_fd("pwritev", fd)
        total_bytes = sum(map(len, buffers))
        if rule is not None and rule.kills_torn:
            super().pwritev(fd, _head(buffers, max(1, total_bytes // 2)), offset)
            _kill()
        if rule is not None and rule.max_bytes is not None:
            buffers = _head(buffers, rule.max_bytes)
        size_bytes = os.fstat(fd).st_blocks * 512
        self._take_room(self.open_fds[fd][0], offset + sum(map(len, buffers)) - size_bytes)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        rule = self._before_fd("preadv", fd)
        if rule is not None and rule.max_bytes is not None:
            buffers = _head(buffers, rule.max_bytes)
        return super().preadv(fd, buffers, offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        rule = self._before_fd("fallocate", fd)
        if rule is not None and rule.kills_torn:
            super().fallocate(fd, max(1, size_bytes // 2))
            _kill()
        self._take_room(self.open_fds[fd][0], size_bytes - os.fstat(fd).st_blocks * 512)
        super().fallocate(fd, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        self._before_fd("reserve", fd)
        self._take_room(self.open_fds[fd][0], size_bytes - os.fstat(fd).st_blocks * 512)
        super().reserve(fd, size_bytes)

    def fstat(self, fd: int) -> os.stat_result:
        self._before_fd("fstat", fd)
        return super().fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        self._before("stat", path)
        return super().stat(path)

    def leads_to(self, path: str) -> os.stat_result:
        self._before("stat", f"{path}/.")
        return super().leads_to(path)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._before_fd("truncate", fd)
        super().truncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        self._before_fd("fdatasync", fd)
        super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self._before_fd("fsync", fd)
        super().fsync(fd)

    def set_xattr(self, fd: int, name: str, value: bytes) -> None:
        self._before_fd("set_xattr", fd)
        super().set_xattr(fd, name, value)

    def get_xattr(self, fd: int, name: str) -> bytes | None:
        try:
            self._before_fd("get_xattr", fd)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        return super().get_xattr(fd, name)

    def rename(self, source: str, target: str) -> None:
        self._before("rename", source)
        super().rename(source, target)
        for fd, (path, flags) in list(self.open_fds.items()):
            if path == source:
                self.open_fds[fd] = (target, flags)

    def publish(self, source: str, target: str) -> None:
        self._before("publish", source)
        super().publish(source, target)

    def unlink(self, path: str) -> None:
        self._before("unlink", path)
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._before("mkdir", path)
        self._take_room(path, 1)
        super().mkdir(path)

    def make_folders(self, path: str) -> None:
        self._before("make_folders", path)
        super().make_folders(path)

    def rmdir(self, path: str) -> None:
        self._before("rmdir", path)
        super().rmdir(path)

    def lock(self, fd: int, *, wait: bool) -> bool:
        self._before_fd("lock", fd)
        return super().lock(fd, wait=wait)

    def unlock(self, fd: int) -> None:
        self._before_fd("unlock", fd)
        super().unlock(fd)

    def is_locked(self, fd: int) -> bool:
        self._before_fd("is_locked", fd)
        return super().is_locked(fd)

    def sync_entry(self, path: str) -> None:
        self._before("sync_entry", path)
        super().sync_entry(path)

    def utime(self, path: str) -> None:
        self._before("utime", path)
        super().utime(path)

    def entries(self, folder: str) -> list[tuple[str, os.stat_result]]:
        self._before("entries", folder)
        return super().entries(folder)

    def walk(self, root: str) -> Iterator[tuple[str, os.stat_result]]:
        self._before("walk", root)
        yield from super().walk(root)

    # -- inside ---------------------------------------------------------------------------------

    def _add(self, rule: Rule) -> None:
        with self._mutex:
            self._rules.append(rule)

    def _before_fd(self, name: str, fd: int) -> Rule | None:
        path, flags = self.open_fds.get(fd, ("", 0))
        return self._before(name, path, flags)

    def _before(self, name: str, path: str, flags: int = 0) -> Rule | None:
        """Count a call and apply the first rule that takes it."""
        with self._mutex:
            call = FileCall(len(self.calls) + 1, name, path, flags, threading.get_ident())
            self.calls.append(call)
            rule = next((rule for rule in self._rules if rule.takes(call)), None)
        if rule is not None and rule.kills_torn and name not in _TEARABLE:
            _kill()
        if rule is not None and rule.act is not None:
            rule.act()
        return rule

    def _take_room(self, path: str, more_bytes: int) -> None:
        """Raise ENOSPC if a call would take more disk than the small filesystem has left."""
        root = self._small_root
        if root is None or more_bytes <= 0 or not path.startswith(root):
            return
        used = sum(disk_bytes(status) for _, status in super().walk(root))
        if used + -(-more_bytes // 4096) * 4096 > self._small_bytes:
            raise OSError(errno.ENOSPC, f"injected: {os.strerror(errno.ENOSPC)}", path)


def is_direct(call: FileCall) -> bool:
    """Tell whether a call is about a file that bypasses the page cache; for rules."""
    return bool(call.flags & os.O_DIRECT)


def is_temp(call: FileCall) -> bool:
    """Tell whether a call is about a temporary file; for rules."""
    return call.path.endswith(".tmp")


def is_block(call: FileCall) -> bool:
    """Tell whether a call is about a published block; for rules."""
    return call.path.endswith(".bin")


def regular_files(root: str) -> list[str]:
    """Return every regular file below a folder, in order."""
    return sorted(
        path for path, status in FileOps().walk(root) if stat_module.S_ISREG(status.st_mode)
    )


def _head(buffers: Sequence[memoryview], max_bytes: int) -> list[memoryview]:
    """Return the first `max_bytes` of several buffers."""
    head: list[memoryview] = []
    for buffer in buffers:
        head.append(buffer[:max_bytes])
        max_bytes -= len(head[-1])
        if not max_bytes:
            break
    return head


def _names(on: str | None) -> frozenset[str] | None:
    return None if on is None else frozenset(on.split())


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the signal is on its way
