"""The contenders of a bench: this package's tiers and its peers', behind the same few calls.

Tiers and baselines write to new directories in one of this bench's own. ext4 searches long for an
inode where many were freed in the last minutes, which would slow down those tiers that make one
file per block, each round more than the one before. So what is in a directory is emptied when it
has been used, and removed only when everything is measured; and the directories are spread over
the disk, away from what others have removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol, Self, cast

from kvoffload_async.config import OffloadConfig, nearest, parse_size_bytes, reject_unknown
from kvoffload_async.errors import InputError, OffloadError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_factory import (
    SecondaryTierFactory,
    accepted_options,
    constructor_parameters,
)
from kvoffload_async.registry import load_class
from kvoffload_async.types import (
    BlockIds,
    JobMetadata,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)

WARM_UP: Final = 2
EXTENT_BYTES: Final = 1 << 20
"""What plain writes and reads move in a call: large enough, and a tier can join as much."""
_SPARE_BYTES: Final = 64 << 20

# Linux's FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL, as on x86 and ARM.
_LONG_BYTES: Final = struct.calcsize("l")
_GET_FLAGS: Final = 2 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 1
_SET_FLAGS: Final = 1 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 2
_TOP_DIRECTORY: Final = 0x20000


class Place:
    """A directory that is measured in; a context manager that leaves it as it was."""

    def __init__(self, directory: str | None, key: str) -> None:
        """Name it; nothing is made yet.

        Args:
            directory: Where to write; None for the system's temporary directory.
            key: What the directory is called where the user gives it.
        """
        self.path = Path(directory or tempfile.gettempdir()).absolute()
        self._key = key
        self._stack = ExitStack()
        self._own: Path  # made by `__enter__`

    def __enter__(self) -> Self:
        """Make a directory in it, and before that what is missing of itself.

        Raises:
            InputError: That is not possible.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        for path in reversed(missing):
            self._stack.callback(_remove_if_empty, path)
        with ExitStack() as undo, self._as_unusable("cannot write to"):
            undo.push(self._stack)
            self.path.mkdir(parents=True, exist_ok=True)
            own = tempfile.TemporaryDirectory(
                prefix="kvoffload-bench-", dir=self.path, ignore_cleanup_errors=True
            )
            self._own = Path(self._stack.enter_context(own))
            _spread(self._own)
            undo.pop_all()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._stack.close()

    @property
    def device(self) -> int:
        """Which filesystem it is on."""
        return self.path.stat().st_dev

    def check_room(self, needed_bytes: int) -> None:
        """Find out now rather than in the middle of a round.

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
        """Write and remove more than is about to be stored: `WARM_UP` times `num_bytes`.

        A virtual machine may have given its free memory back, and then needs ten times as long for
        a page of the cache that it touches first. So that nobody pays for whose turn it is, the
        pages are touched before every turn; the kernel does not hand out exactly the last ones.

        Raises:
            InputError: It cannot be written.
        """
        with (
            self.new_directory() as directory,
            self._as_unusable("cannot write to"),
            Path(directory, "warm-up").open("wb", buffering=0) as file,
        ):
            for start in range(0, WARM_UP * num_bytes, EXTENT_BYTES):
                offset = start % content.nbytes
                file.write(content[offset : offset + EXTENT_BYTES])

    @contextmanager
    def new_directory(self) -> Iterator[str]:
        """Make an empty directory for one use; what is in it is emptied afterwards.

        Raises:
            InputError: It cannot be made.
        """
        with self._as_unusable("cannot write to"):
            directory = tempfile.mkdtemp(dir=self._own)
        try:
            yield directory
        finally:
            for folder, _, names in os.walk(directory):
                for name in names:
                    os.truncate(Path(folder, name), 0)

    @contextmanager
    def _as_unusable(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._key}: {what} {str(self.path)!r} ({error.strerror}); name another"
            ) from error


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # never made, or somebody else has put something there meanwhile
        path.rmdir()


def _spread(path: Path) -> None:
    """Have ext4 treat the directories in this one as unrelated, as it does those in its root."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # other filesystems know no such flag
            flags = struct.unpack("l", fcntl.ioctl(folder, _GET_FLAGS, bytes(_LONG_BYTES)))[0]
            fcntl.ioctl(folder, _SET_FLAGS, struct.pack("l", flags | _TOP_DIRECTORY))
    finally:
        os.close(folder)


class UnfitError(OffloadError):
    """Somebody cannot be measured: it fails, it hangs, or it returns other bytes than it got."""


class Result(Protocol):
    """How a job has ended."""

    @property
    def job_id(self) -> int: ...

    @property
    def success(self) -> bool: ...


class Manager(Protocol):
    """A secondary tier as a scheduler calls it; names and meaning are vLLM's."""

    def submit_store(self, job: Any, /) -> None: ...  # noqa: ANN401 - each has a class of its own

    def submit_load(self, job: Any, /) -> None: ...  # noqa: ANN401 - each has a class of its own

    def get_finished_jobs(self) -> Iterable[Result]: ...

    def on_schedule_end(self, context: Any, /) -> None: ...  # noqa: ANN401 - as above

    def lookup(self, key: Any, request: Any, /) -> Any: ...  # noqa: ANN401 - as above


class OpenTier(Protocol):
    """A tier that is open on an empty store.

    Attributes:
        manager: What is measured.
        request: What `lookup` gets beside the key.
        step: What `on_schedule_end` gets.
    """

    @property
    def manager(self) -> Manager: ...

    @property
    def request(self) -> object: ...

    @property
    def step(self) -> object: ...

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> object:
        """Return what the manager's submit methods take."""
        ...

    def close(self) -> None:
        """Close it, and wait for that."""
        ...


class Contender(Protocol):
    """What is opened anew in every round.

    Attributes:
        name: What it is called in the figures.
        options: As the user gave them.
        place: Where it writes; None if it takes no directory.
    """

    name: str
    options: Mapping[str, Any]
    place: Place | None

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return how much it takes until it writes over what it has; None if it never does."""
        ...

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenTier:
        """Open it on an empty store.

        Args:
            view: The primary's rows.
            directory: A new directory in its place.
            stored_bytes: What will be stored in it.
        """
        ...


_DIRECTORY: Final = "root_dir"
_CAPACITY: Final = "capacity_bytes"
_TIER_SPARE_BYTES: Final = 16 << 20
"""Beside the blocks: indexes, journals, and what a rehearsal needs of a tier's least size."""
_MODEL: Final = "bench"
_SPEC: Final = SimpleNamespace(config=OffloadConfig(model=_MODEL))
"""In the place of a spec: names the model of blocks that are made up."""


class OpenOwnTier:
    """A `SecondaryTierManager` on threads of its own; see `OpenTier`."""

    def __init__(self, manager: SecondaryTierManager) -> None:
        self.manager = manager
        self.request = ReqContext("bench")
        self.step = ScheduleEndContext()

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> JobMetadata:
        """Return a job."""
        return JobMetadata(job_id, tuple(keys), rows, is_load, self.request)

    def close(self) -> None:
        """Close it.

        Raises:
            UnfitError: It could not be closed cleanly.
        """
        report = self.manager.shutdown()
        if not report.is_clean:
            raise UnfitError(f"{self.manager.tier_type}: did not close: {report}")


class OwnTier:
    """A tier that `SecondaryTierFactory` makes; see `Contender`.

    A tier that needs a capacity and is given none gets one that a round does not exhaust.
    """

    def __init__(self, tier_config: Mapping[str, Any]) -> None:
        """Check a tier's configuration, `type` included; nothing is opened.

        Raises:
            InputError: It cannot be imported, or its directory is no path.
            ConfigError: The tier, an option or a value is unknown.
        """
        config = dict(tier_config)
        self.name: str = config["type"]
        self.options: Mapping[str, Any] = {k: v for k, v in config.items() if k != "type"}
        cls = _class_of(config)
        accepted = accepted_options(cls)
        self._sizes_itself = (
            _CAPACITY in accepted
            and _CAPACITY not in config
            and constructor_parameters(cls)[_CAPACITY].default is Parameter.empty
        )
        self.place = None
        if _DIRECTORY in accepted:
            directory = config.pop(_DIRECTORY, None)
            if directory is not None and not isinstance(directory, str):
                raise InputError(f"--tier: {_DIRECTORY}: {directory!r} is not valid; give a path")
            self.place = Place(directory, f"--tier {self.name}: {_DIRECTORY}")
        self._config = config
        self.check(1, ())

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenOwnTier:
        """Open it; raises what its constructor raises."""
        config = self._configured(directory, stored_bytes)
        return OpenOwnTier(SecondaryTierFactory.create_secondary_tier(config, view, _SPEC))

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return its capacity, given or made up."""
        given = self._configured(None, stored_bytes).get(_CAPACITY)
        return None if given is None else parse_size_bytes(given, _CAPACITY)

    def check(self, stored_bytes: int, block_sizes: Collection[int]) -> None:
        """Check its configuration for blocks of so many bytes; raises ConfigError."""
        directory = None if self.place is None else str(self.place.path)
        config = self._configured(directory, stored_bytes)
        for block_bytes in block_sizes or (None,):
            geometry = _SPEC.config if block_bytes is None else _geometry(block_bytes)
            SecondaryTierFactory.check_config(config, geometry)

    def check_capacity(self, stored_bytes: int) -> None:
        """Refuse a capacity that a round would exhaust: it would measure evictions and misses.

        Raises:
            InputError: The user has given such a one.
            ConfigError: It is no size.
        """
        given = self._config.get(_CAPACITY)
        if given is not None and parse_size_bytes(given, _CAPACITY) < stored_bytes:
            raise InputError(
                f"--tier {self.name}: {_CAPACITY}: {given!r} is less than the {stored_bytes} bytes "
                "that a round stores; give more, or use fewer --total-bytes or a smaller --one-job"
            )

    def _configured(self, directory: str | None, stored_bytes: int) -> dict[str, Any]:
        config = dict(self._config)
        if self.place is not None:
            config[_DIRECTORY] = directory
        if self._sizes_itself:
            config[_CAPACITY] = stored_bytes + stored_bytes // 4 + _TIER_SPARE_BYTES
        return config


def _geometry(block_bytes: int) -> OffloadConfig:
    return OffloadConfig(model=_MODEL, block_bytes=block_bytes)


def _class_of(config: Mapping[str, Any]) -> type:
    module_path = config.get("module_path")
    try:
        if isinstance(module_path, str):
            return load_class(module_path, config["type"], "module_path")
        return SecondaryTierFactory.get_tier_class(config["type"])
    except (ImportError, AttributeError) as error:
        raise InputError(f"--tier {config['type']}: cannot be imported: {error}") from error


class Entry(NamedTuple):
    """Where a peer's adapter is, what it takes, and how its engine is installed."""

    module: str
    class_name: str
    options: tuple[str, ...]
    remedy: str


PEERS: Final[Mapping[str, Entry]] = {
    "vllm-fs": Entry(
        "kvoffload_async.integrations.vllm.peer",
        "VllmFsPeer",
        ("n_read_threads", "n_write_threads", "direct_io"),
        "pip install vllm, or a build of it for this machine",
    ),
    "lmcache-fs": Entry(
        "kvoffload_async.integrations.lmcache.peer",
        "LmcacheFsPeer",
        ("num_workers", "use_odirect"),
        "pip install lmcache",
    ),
}


def load_peer(peer_config: Mapping[str, Any]) -> Contender:
    """Import and return a peer: `type` is its name, beside `root_dir` and options of its own.

    Raises:
        InputError: There is no such peer, its engine is not installed, or an option is unusable.
    """
    config = dict(peer_config)
    name = config.pop("type")
    if name not in PEERS:
        raise InputError(
            f"--peer {name}: unknown{nearest(name, PEERS)}; allowed: {', '.join(PEERS)}"
        )
    entry = PEERS[name]
    reject_unknown(config, ["root_dir", *entry.options], f"--peer {name}")
    directory = config.pop("root_dir", None)
    if directory is not None and not isinstance(directory, str):
        raise InputError(f"--peer {name}: root_dir: {directory!r} is not valid; give a path")
    place = Place(directory, f"--peer {name}: root_dir")
    try:
        peer = load_class(entry.module, entry.class_name)(name, config, place)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"--peer {name} cannot be measured here: {error}; remedy: {entry.remedy}"
        ) from error
    return cast("Contender", peer)
