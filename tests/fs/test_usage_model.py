"""The count's protocol, explored exhaustively: processes at work, kills at any point, and a walk.

A state is what is on disk, what is counted, and how far each process is. Every order of steps is
tried; a process that is suspended is one that takes no step. The arithmetic is the product's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest

from kvoffload_async.tiers.fs.usage import (
    NUM_BUCKETS,
    BucketScan,
    Usage,
    WriterCount,
    is_corrected,
    raise_by,
)

UNIT = 512
"""Bytes of a block: one unit of a bucket's counter of changes."""
CAPACITY = 3 * UNIT
JOBS = [("new", 0), ("new", 1), ("recycle", 0, 1), ("recycle", 1, 0), ("evict", 0), ("evict", 1)]


class Process(NamedTuple):
    """A process that is in a job, idle, or dead.

    Attributes:
        job: The job; None if it is idle.
        step: Steps that were taken of it.
        left: Jobs that it may still begin.
        is_alive: Whether it was not killed.
    """

    left: int
    job: tuple | None = None
    step: int = 0
    is_alive: bool = True


class Walk(NamedTuple):
    """A walk, with the scans of its buckets: (bucket, found bytes, changes before, waits for)."""

    phase: str = "begin"
    presumed_ever: int = 0
    dead: frozenset = frozenset()
    before: tuple = ()
    scans: tuple = ()
    is_exact: bool = True
    retained_bytes: int = 0


class State(NamedTuple):
    disk: tuple = (1, 1)
    temps: frozenset = frozenset()
    processes: tuple = (Process(1), Process(1))
    # Settled bytes and changes of both buckets; name, reserved bytes, operations begun and ended of
    # the writers; bytes presumed used and written off.
    count: tuple = ((UNIT, 0), (UNIT, 0), (("0", 0, 0, 0), ("1", 0, 0, 0)), 0, 0)
    walk: Walk = Walk()


def read(state: State) -> Usage:
    *buckets, writers, ever, over = state.count
    usage = KNOWN.copy()
    for number, (settled_bytes, changed) in enumerate(buckets):
        usage.change(number, changed * UNIT // 2, changed * UNIT - changed * UNIT // 2)
        usage.set(number, settled_bytes)
    for name, reserved_bytes, begun, oldest in writers:
        usage.writers[name] = WriterCount(reserved_bytes, begun, oldest, 0)
    usage.presumed_ever, usage.presumed_over = ever, over
    return usage


def written(usage: Usage) -> tuple:
    writers = [(n, w.reserved_bytes, w.begun, w.oldest) for n, w in sorted(usage.writers.items())]
    buckets = [usage.bucket(number) for number in (0, 1)]
    return (*buckets, tuple(writers), usage.presumed_ever, usage.presumed_over)


def _known() -> Usage:
    usage = Usage()
    for number in range(NUM_BUCKETS):
        usage.set(number, 0)
    return usage


KNOWN = _known()


# -- what processes do ----------------------------------------------------------------------------


def add(disk: tuple, bucket: int, number: int) -> tuple:
    return tuple(n + number * (at == bucket) for at, n in enumerate(disk))


def put(state: State, at: int, process: Process, **changes) -> State:
    processes = (*state.processes[:at], process, *state.processes[at + 1 :])
    return state._replace(processes=processes, **changes)


def begun(state: State, at: int) -> Iterator[State]:
    """Reserve room for a new block, or announce an operation without new room."""
    process = state.processes[at]
    for job in JOBS if process.left else ():
        usage = read(state)
        writer = usage.writers.get(str(at))
        if writer is None or (job[0] == "new" and usage.total_bytes + UNIT > CAPACITY):
            continue
        writer.reserved_bytes += UNIT * (job[0] == "new")
        writer.begun += 1
        yield put(state, at, Process(process.left - 1, job), count=written(usage))


def on_disk(state: State, at: int) -> State:
    """Take the next step of a job on disk; without its victim, a job has nothing to do."""
    process = state.processes[at]
    kind, bucket = process.job[:2]
    done = process._replace(step=2)
    if kind == "new":
        return put(state, at, done, disk=add(state.disk, bucket, 1))
    if process.step == 1:
        target = process.job[2]
        temps = state.temps - {(target, at)}
        return put(state, at, done, disk=add(state.disk, target, 1), temps=temps)
    if not state.disk[bucket]:
        return put(state, at, process._replace(step=3))
    disk = add(state.disk, bucket, -1)
    if kind == "evict":
        return put(state, at, done, disk=disk)
    temps = state.temps | {(process.job[2], at)}
    return put(state, at, process._replace(step=1), disk=disk, temps=temps)


def settled(state: State, at: int) -> State:
    process = state.processes[at]
    usage = read(state)
    writer = usage.writers[str(at)]
    kind, bucket = process.job[:2]
    if kind == "new":
        usage.change(bucket, UNIT, 0)
        writer.reserved_bytes -= UNIT
    elif process.step == 2:
        usage.change(bucket, 0, UNIT)
        if kind == "recycle":
            usage.change(process.job[2], UNIT, 0)
    writer.oldest = writer.begun
    return put(state, at, Process(process.left), count=written(usage))


def of_process(state: State, at: int) -> Iterator[State]:
    process = state.processes[at]
    if not process.is_alive:
        return
    if process.job is None:
        yield from begun(state, at)
    elif process.step < 2:
        yield on_disk(state, at)
    else:
        yield settled(state, at)
    yield put(state, at, process._replace(is_alive=False))


# -- what the walk does ---------------------------------------------------------------------------


def scanned(state: State, bucket: int) -> State:
    """Sweep files of the dead, and sum up the rest without those of living writers."""
    walk = state.walk
    temps = {t for t in state.temps if t[0] != bucket or t[1] not in walk.dead}
    kept = sum(at == bucket and not state.processes[w].is_alive for at, w in temps)
    scan = (bucket, (state.disk[bucket] + kept) * UNIT, walk.before[bucket], None)
    phase = f"scan {bucket + 1}" if bucket == 0 else "correct"
    walk = walk._replace(phase=phase, scans=(*walk.scans, scan))
    return state._replace(temps=frozenset(temps), walk=walk)


def corrected(state: State, correct: Callable) -> State:
    """Correct the count by all scans that need not wait."""
    usage, walk = read(state), state.walk
    waiting, is_exact, retained_bytes = [], walk.is_exact, walk.retained_bytes
    for bucket, found_bytes, before, waits_for in walk.scans:
        scan = BucketScan(
            bucket, found_bytes, before, None if waits_for is None else dict(waits_for)
        )
        if correct(usage, scan):
            is_exact &= scan.is_exact
            retained_bytes += scan.retained_bytes
        else:
            waiting.append((bucket, found_bytes, before, tuple(sorted(scan.waits_for.items()))))
    phase = "correct" if waiting else "end"
    walk = walk._replace(phase=phase, scans=tuple(waiting), is_exact=is_exact)
    walk = walk._replace(retained_bytes=retained_bytes)
    return state._replace(count=written(usage), walk=walk)


def given_up(state: State) -> State:
    usage = read(state)
    for bucket, found_bytes, before, _ in state.walk.scans:
        raise_by(usage, BucketScan(bucket, found_bytes, before))
    walk = state.walk._replace(phase="end", scans=(), is_exact=False)
    return state._replace(count=written(usage), walk=walk)


def of_walk(state: State, correct: Callable) -> Iterator[State]:
    walk, usage = state.walk, read(state)
    if walk.phase == "begin":
        dead = frozenset(at for at, process in enumerate(state.processes) if not process.is_alive)
        for at in dead & {int(name) for name in usage.writers}:
            usage.reap(str(at))
        walk = Walk("read", usage.presumed_ever, dead)
        yield state._replace(count=written(usage), walk=walk)
    elif walk.phase == "read":
        before = tuple(usage.bucket(number)[1] for number in (0, 1))
        yield state._replace(walk=walk._replace(phase="scan 0", before=before))
    elif walk.phase.startswith("scan"):
        yield scanned(state, int(walk.phase[-1]))
    elif walk.phase == "correct":
        yield corrected(state, correct)
        if any(scan[3] for scan in walk.scans):
            yield given_up(state)
    elif walk.phase == "end":
        if walk.is_exact:
            usage.give_up_presumed(walk.presumed_ever, walk.retained_bytes)
        yield state._replace(count=written(usage), walk=Walk("over"))


# -- what holds -----------------------------------------------------------------------------------


def total(state: State) -> int:
    return (sum(state.disk) + len(state.temps)) * UNIT


def check(state: State) -> None:
    """More may be counted than there is, and what a dead process wrote twice until a walk ends."""
    assert total(state) <= min(CAPACITY, read(state).total_bytes), state


def check_end(state: State) -> None:
    """After everybody has stopped, one quiet walk makes the count that of the disk."""
    state = state._replace(walk=Walk())
    while state.walk.phase != "over":
        state = next(of_walk(state, is_corrected))
    usage = read(state)
    assert not state.temps
    assert usage.total_bytes == usage.settled_bytes == total(state), state


def explore(correct: Callable) -> int:
    seen, todo = {State()}, [State()]
    while todo:
        state = todo.pop()
        check(state)
        following = [*of_process(state, 0), *of_process(state, 1), *of_walk(state, correct)]
        if all(p.job is None or not p.is_alive for p in state.processes):
            check_end(state)
        new = set(following) - seen
        seen |= new
        todo += new
    return len(seen)


@pytest.mark.no_cover
def test_no_order_of_steps_and_kills_makes_the_count_too_small_or_wrong_for_ever():
    assert explore(is_corrected) > 10_000


def without_waiting(usage: Usage, scan: BucketScan) -> bool:
    scan.waits_for = {}
    return is_corrected(usage, scan)


def without_changes(usage: Usage, scan: BucketScan) -> bool:
    scan.changed = usage.bucket(scan.bucket)[1]
    return is_corrected(usage, scan)


@pytest.mark.no_cover
@pytest.mark.parametrize("mistake", [without_waiting, without_changes])
def test_a_planted_mistake_is_found(mistake):
    with pytest.raises(AssertionError):
        explore(partial(mistake))


@pytest.mark.no_cover
def test_room_of_the_dead_given_out_before_their_moves_were_seen_is_found(monkeypatch):
    """Regression: a bucket from which a killed process had taken a victim was lowered at once."""
    reap = Usage.reap

    def forgetful(usage: Usage, writer_id: str) -> None:
        usage.writers[writer_id].begun = usage.writers[writer_id].oldest
        reap(usage, writer_id)

    monkeypatch.setattr(Usage, "reap", forgetful)
    with pytest.raises(AssertionError):
        explore(is_corrected)
