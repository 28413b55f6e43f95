"""Walks over a namespace, bucket by bucket, in endless cycles.

A cycle is a walk over all buckets. It finds existing blocks, corrects the count, and removes
leftovers of dead writers and crashes. Entries of dead writers are removed after all buckets were
swept. A step covers as many buckets as its time budget allows, at least one.

Run on an I/O thread, one call at a time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat as stat_module
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kvoffload_async.tiers.files.ops import FileOps, names_in
from kvoffload_async.tiers.fs.layout import (
    REST,
    TEMP_SUFFIX,
    Namespace,
    bucket_of,
    counted_bytes,
    top_folder_bucket,
)
from kvoffload_async.tiers.fs.usage import NUM_BUCKETS, UsageFile
from kvoffload_async.tiers.fs.writers import WriterRegistry
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_TEMP_PARTS = 5
_MOST_EXAMINED = 8192
"""Number of blocks after which a page of a listing ends, whatever it has found."""


class StoppedError(Exception):
    """A walk was stopped by its caller."""


@dataclass(slots=True)
class Inventory:
    """Blocks, bytes and temporary files found by a walk.

    Attributes:
        blocks: Key -> modification time in s.
        total_bytes: Disk bytes of everything, unknown files and growth of folders included.
        temps: Paths of temporary files -> disk bytes.
    """

    blocks: dict[OffloadKey, float] = field(default_factory=dict)
    total_bytes: int = 0
    temps: dict[str, int] = field(default_factory=dict)


def take_inventory(
    ops: FileOps,
    namespace: Namespace,
    roots: Iterable[str],
    should_stop: Callable[[], bool] = lambda: False,
) -> Inventory:
    """Walk over folders and files of a namespace; entries removed meanwhile are skipped.

    Args:
        ops: The system calls.
        namespace: The namespace.
        roots: Paths of entries of the namespace's folder.
        should_stop: Called before each root.

    Raises:
        StoppedError: `should_stop` returned true.
        OSError: A folder or file cannot be read.
    """
    found = Inventory()
    for root in roots:
        if should_stop():
            raise StoppedError
        try:
            status = ops.stat(root)
        except FileNotFoundError:
            continue
        _take_in(found, namespace, root, status)
        if stat_module.S_ISDIR(status.st_mode):
            for path, status in ops.walk(root):
                _take_in(found, namespace, path, status)
    return found


def _take_in(found: Inventory, namespace: Namespace, path: str, status: os.stat_result) -> None:
    size_bytes = counted_bytes(status)
    found.total_bytes += size_bytes
    if path[len(namespace.folder) + 1] == "." or not stat_module.S_ISREG(status.st_mode):
        return
    key = namespace.key_of(path)
    if key is not None:
        found.blocks[key] = status.st_mtime
    elif path.endswith(TEMP_SUFFIX):
        found.temps[path] = size_bytes


def keys_after(
    ops: FileOps,
    namespace: Namespace,
    after: OffloadKey | None,
    count: int,
    until_s: float = math.inf,
) -> tuple[list[OffloadKey], OffloadKey | None]:
    """Return keys of the next blocks, in the order of keys; reads whole buckets.

    Args:
        ops: The system calls.
        namespace: The namespace.
        after: Key after which to begin; None: with the first one.
        count: Maximum number of keys.
        until_s: Time until which the blocks were stored, in seconds since 1970.

    Returns:
        The keys, and the one after which to continue, of a block that may be younger; None at the
        end.

    Raises:
        OSError: A folder cannot be read.
    """
    found: list[OffloadKey] = []
    num_examined, last = 0, after
    roots = block_roots(ops, namespace)
    for bucket in range(0 if after is None else bucket_of(after), REST):
        blocks = take_inventory(ops, namespace, roots.get(bucket, ())).blocks
        keys = sorted(key for key in blocks if after is None or key > after)
        found += [key for key in keys if blocks[key] <= until_s]
        if len(found) >= count:
            return found[:count], found[count - 1]
        num_examined, last = num_examined + len(keys), keys[-1] if keys else last
        if num_examined >= _MOST_EXAMINED:
            return found, last
    return found, None


def block_roots(ops: FileOps, namespace: Namespace) -> dict[int, list[str]]:
    """Return the paths of the namespace's entries, by bucket."""
    roots: defaultdict[int, list[str]] = defaultdict(list)
    for name in names_in(ops, namespace.folder):
        bucket = top_folder_bucket(name)
        roots[REST if bucket is None else bucket].append(f"{namespace.folder}/{name}")
    return roots


def writer_of(temp: str) -> str | None:
    """Return the writer id in a temporary file's path: `<hash>.bin.<writer id>.<serial>.tmp`."""
    parts = temp.rpartition("/")[2].split(".")
    return parts[-3] if len(parts) >= _TEMP_PARTS else None


def sweep_temps(ops: FileOps, inventory: Inventory, dead: Collection[str]) -> bool:
    """Remove the temporary files of dead writers from disk and from the inventory.

    Returns:
        Whether all of them were removed.
    """
    is_swept = True
    for path in [path for path in inventory.temps if writer_of(path) in dead]:
        try:
            with contextlib.suppress(FileNotFoundError):  # another process has swept it
                ops.unlink(path)
        except OSError as error:
            is_swept = False
            logger.warning("a dead writer's file was not removed: %s", str(error))
        else:
            inventory.total_bytes -= inventory.temps.pop(path)
    return is_swept


_GROWTH = 4
"""Factor by which the number of buckets published at a time may grow. Publishing all at once would
put the changes in all of them in doubt, and one at a time would take many changes of the count."""


@dataclass(slots=True)
class Step:
    """Result of a step of a walk.

    Attributes:
        found: Blocks found -> modification times in s, oldest first.
        cpu_s: CPU seconds used.
        ends_cycle: Whether all buckets have been walked.
        unwalked: Buckets of the cycle that could not be walked.
        error: Error of a bucket that could not be walked, or the error that ended the step early.
    """

    found: dict[OffloadKey, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    ends_cycle: bool = False
    unwalked: frozenset[int] = frozenset()
    error: OSError | None = None


@dataclass(slots=True)
class _Cycle:
    dead: frozenset[str]
    position: int
    """The next bucket to visit."""
    unwalked: set[int] = field(default_factory=set)
    is_swept: bool = True


class NamespaceWalk:
    """The walks of one tier over its namespace."""

    def __init__(
        self,
        ops: FileOps,
        namespace: Namespace,
        writers: WriterRegistry,
        usage: UsageFile | None,
    ) -> None:
        """Start before the first cycle; without `usage`, walks only remove leftovers."""
        self._ops = ops
        self._namespace = namespace
        self._writers = writers
        self._usage = usage
        self._cycle: _Cycle | None = None

    @property
    def is_in_cycle(self) -> bool:
        """Whether a cycle is in progress."""
        return self._cycle is not None

    def begin_anew(self) -> None:
        """Abandon the cycle, because the namespace was replaced."""
        self._cycle = None

    def step(self, budget_s: float, should_stop: Callable[[], bool]) -> Step:
        """Walk over the next buckets.

        If the namespace or its count becomes unusable during the step, the step ends early: the
        blocks found until then must be learned, because their buckets are not visited again.

        Args:
            budget_s: CPU seconds after which no further bucket is begun.
            should_stop: Called often; if true, the current bucket is left for a later step.

        Raises:
            OSError: The namespace or its count cannot be used; no bucket was walked.
        """
        begun_s = time.thread_time()
        cycle = self._cycle = self._cycle or self._begin_cycle()
        step = Step()
        first, count = cycle.position, 1

        def is_over() -> bool:
            is_late = time.thread_time() > begun_s + budget_s
            return should_stop() or (is_late and cycle.position > first)

        try:
            while cycle.position < NUM_BUCKETS and not is_over():
                end = min(cycle.position + count, NUM_BUCKETS)
                self._visit(cycle, end, step, should_stop, is_over)
                spent_s = max(1e-9, time.thread_time() - begun_s)
                affordable = (cycle.position - first) * (budget_s - spent_s) / spent_s
                count = max(1, int(min(_GROWTH * count, affordable)))
            if cycle.position == NUM_BUCKETS:
                self._end_cycle(cycle, step)
        except OSError as error:
            if cycle.position == first:
                raise
            step.error = error
        step.found = {
            key: step.found[key] for key in sorted(step.found, key=step.found.__getitem__)
        }
        step.cpu_s = time.thread_time() - begun_s
        return step

    # -- inside ---------------------------------------------------------------------------------

    def _begin_cycle(self) -> _Cycle:
        dead = self._writers.others().dead
        if self._usage is not None:
            self._usage.begin_walk()
        is_needed = self._usage is not None or dead
        return _Cycle(frozenset(dead), position=0 if is_needed else NUM_BUCKETS)

    def _visit(
        self,
        cycle: _Cycle,
        end: int,
        step: Step,
        should_stop: Callable[[], bool],
        is_over: Callable[[], bool],
    ) -> None:
        """Walk over the buckets up to `end`, or until `is_over`, and count their content."""
        first, found_bytes = cycle.position, 0
        if self._usage is not None:
            self._usage.advance(first, first, end)
        roots = block_roots(self._ops, self._namespace)
        while cycle.position < end and not is_over():
            bucket = cycle.position
            paths = roots.get(bucket, [])
            try:
                if bucket == REST:
                    self._forget_dead(cycle, paths)
                inventory = take_inventory(self._ops, self._namespace, paths, should_stop)
                found_bytes += self._settled_bytes(cycle, bucket, inventory)
            except StoppedError:
                break
            except OSError as error:
                step.error = error
                cycle.unwalked.add(bucket)
            else:
                # No tuple per block: they would trigger full garbage collections of the process,
                # for tens of milliseconds, every few buckets.
                step.found |= inventory.blocks
            cycle.position += 1
        if self._usage is not None:
            try:
                self._usage.advance(first, cycle.position, cycle.position, found_bytes)
            except BaseException:
                cycle.position = first  # its bytes are not counted: it is visited again
                raise

    def _settled_bytes(self, cycle: _Cycle, bucket: int, inventory: Inventory) -> int:
        """Remove a bucket's files of dead writers; return the bytes of its remaining content."""
        cycle.is_swept &= sweep_temps(self._ops, inventory, cycle.dead)
        size_bytes, temps = inventory.total_bytes, inventory.temps
        if temps:  # those of living writers are reserved bytes
            living = {*self._writers.living(), self._writers.writer_id}
            size_bytes -= sum(temps[path] for path in temps if writer_of(path) in living)
        if bucket == REST:
            size_bytes += counted_bytes(self._ops.stat(self._namespace.folder))
        return size_bytes

    def _forget_dead(self, cycle: _Cycle, paths: list[str]) -> None:
        """Sweep files outside of folders, and remove entries of dead writers without leftovers."""
        inventory = take_inventory(self._ops, self._namespace, paths)
        cycle.is_swept &= sweep_temps(self._ops, inventory, cycle.dead)
        if cycle.is_swept and not cycle.unwalked:
            for writer_id in cycle.dead:
                self._writers.forget(writer_id)

    def _end_cycle(self, cycle: _Cycle, step: Step) -> None:
        """End the cycle; correct the recorded disk usage if the whole namespace was walked."""
        if self._usage is not None and not cycle.unwalked:
            self._usage.end_walk()
        step.ends_cycle = True
        step.unwalked = frozenset(cycle.unwalked)
        self._cycle = None
