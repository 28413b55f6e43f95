"""The count's protocol, explored exhaustively: processes at work, kills at any point, and walks.

A state is what is on disk, what is counted, and how far each process and walk is. Every order of
steps is tried; a process that is suspended is one that takes no step. The arithmetic is the
product's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvoffload_async.tiers.fs.usage import NUM_BUCKETS, Sum, Usage, WriterCount

UNIT = 512
"""Bytes of a block."""
CAPACITY = 3 * UNIT
JOBS = [("new", 0), ("new", 1), ("recycle", 0, 1), ("recycle", 1, 0), ("evict", 0), ("evict", 1)]
FIRST = 9
"""Number of the total at the beginning."""


class Process(NamedTuple):
    """A process that is in a job, idle, or dead.

    Attributes:
        left: Jobs that it may still begin.
        job: The job; None if it is idle.
        marks: The marks when it began.
        step: Steps that were taken of it.
        is_alive: Whether it was not killed.
    """

    left: int
    job: tuple | None = None
    marks: tuple = ()
    step: int = 0
    is_alive: bool = True


class Walk(NamedTuple):
    """A walk by a process that does nothing else.

    Attributes:
        phase: "begin", "publish", "visit" or "over".
        dead: Processes that were dead when it began.
        first: First bucket that was published last.
        position: The next bucket.
        end: End of the buckets that were published.
        found: Blocks found since then.
    """

    phase: str = "begin"
    dead: frozenset = frozenset()
    first: int = 0
    position: int = 0
    end: int = 0
    found: int = 0


class State(NamedTuple):
    """The disk (blocks of each bucket, temporary files), the processes, the walks, and the count.

    The count is that of the total; and name, reserved bytes, moving bytes and walk of the writers.
    """

    disk: tuple = (1, 1)
    temps: frozenset = frozenset()
    processes: tuple = (Process(1), Process(1))
    walks: tuple = (Walk(),)
    count: tuple = (
        (2 * UNIT, 0, FIRST, NUM_BUCKETS, NUM_BUCKETS),
        (("0", 0, 0, Sum().fields), ("1", 0, 0, Sum().fields)),
    )


def read(state: State) -> Usage:
    total, writers = state.count
    usage = Usage(total=Sum(*total))
    for name, reserved_bytes, moving_bytes, walk in writers:
        usage.writers[name] = WriterCount(reserved_bytes, moving_bytes, 0, Sum(*walk))
    return usage


def written(usage: Usage) -> tuple:
    writers = [
        (name, w.reserved_bytes, w.moving_bytes, w.walk.fields)
        for name, w in sorted(usage.writers.items())
    ]
    return usage.total.fields, tuple(writers)


# -- what processes do ----------------------------------------------------------------------------


def add(disk: tuple, bucket: int, number: int) -> tuple:
    return tuple(n + number * (at == bucket) for at, n in enumerate(disk))


def put(state: State, at: int, process: Process, **changes) -> State:
    processes = (*state.processes[:at], process, *state.processes[at + 1 :])
    return state._replace(processes=processes, **changes)


def begun(state: State, at: int) -> Iterator[State]:
    """Reserve room for a new block, or publish that one is moved or removed."""
    process = state.processes[at]
    for job in JOBS if process.left else ():
        usage = read(state)
        writer = usage.writers.get(str(at))
        if writer is None or (job[0] == "new" and usage.total_bytes + UNIT > CAPACITY):
            continue
        writer.reserved_bytes = UNIT * (job[0] == "new")
        writer.moving_bytes = UNIT * (job[0] != "new")
        marks = tuple(sorted(usage.marks.items()))
        yield put(state, at, Process(process.left - 1, job, marks), count=written(usage))


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


def reported(state: State, at: int) -> State:
    process = state.processes[at]
    usage = read(state)
    kind, bucket = process.job[:2]
    if kind == "new":
        usage.change([(bucket, UNIT)], dict(process.marks))
    elif process.step == 2:
        added = [(process.job[2], UNIT)] if kind == "recycle" else []
        usage.change([*added, (bucket, -UNIT)], dict(process.marks))
    writer = usage.writers[str(at)]
    writer.reserved_bytes = writer.moving_bytes = 0
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
        yield reported(state, at)
    yield put(state, at, process._replace(is_alive=False, marks=()))


# -- what walks do --------------------------------------------------------------------------------


def put_walk(state: State, at: int, walk: Walk, **changes) -> State:
    return state._replace(walks=(*state.walks[:at], walk, *state.walks[at + 1 :]), **changes)


def visited(state: State, at: int) -> State:
    """Sweep files of the dead in the next bucket, and sum up the rest without the living's."""
    walk, bucket = state.walks[at], state.walks[at].position
    temps = {t for t in state.temps if t[0] != bucket or t[1] not in walk.dead}
    kept = sum(t[0] == bucket and not state.processes[t[1]].is_alive for t in temps)
    found = walk.found + state.disk[bucket] + kept
    walk = walk._replace(position=bucket + 1, found=found)
    return put_walk(state, at, walk, temps=frozenset(temps))


def of_walk(state: State, at: int) -> Iterator[State]:
    walk, name = state.walks[at], f"walker {at}"
    usage = read(state)
    if walk.phase == "begin":
        dead = frozenset(n for n, process in enumerate(state.processes) if not process.is_alive)
        usage.writers[name] = WriterCount(walk=Sum(number=at + 1))
        yield put_walk(state, at, Walk("publish", dead), count=written(usage))
    elif walk.phase == "publish" and walk.position < 2:
        first = walk.position
        for end in range(first + 1, 3):
            usage = read(state)
            usage.writers[name].walk.advance(first, first, end, 0)
            now = walk._replace(phase="visit", first=first, end=end, found=0)
            yield put_walk(state, at, now, count=written(usage))
    elif walk.phase == "publish":
        usage.writers[name].walk.advance(2, NUM_BUCKETS, NUM_BUCKETS, 0)
        usage.end_walk(usage.writers[name], {str(number) for number in walk.dead})
        yield put_walk(state, at, Walk("over"), count=written(usage))
    elif walk.phase == "visit":
        if walk.position < walk.end:
            yield visited(state, at)
        now = walk.position
        usage.writers[name].walk.advance(walk.first, now, now, walk.found * UNIT)
        now = walk._replace(phase="publish", first=0, end=0, found=0)
        if walk.position > walk.first:
            yield put_walk(state, at, now, count=written(usage))


# -- what holds -----------------------------------------------------------------------------------


def total(state: State) -> int:
    return (sum(state.disk) + len(state.temps)) * UNIT


def check(state: State) -> None:
    """More may be counted than there is, and never less."""
    assert total(state) <= min(CAPACITY, read(state).total_bytes), state


def check_end(state: State) -> None:
    """After everybody has stopped, one quiet walk makes the count that of the disk."""
    state = state._replace(walks=(*state.walks, Walk()))
    at = len(state.walks) - 1
    while state.walks[at].phase != "over":
        state = next(of_walk(state, at))
    usage = read(state)
    assert not state.temps
    assert usage.total_bytes == usage.settled_bytes == total(state), state
    assert not usage.moving_bytes


def explore(first: State) -> int:
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        check(state)
        following = [
            *(new for at in range(len(state.processes)) for new in of_process(state, at)),
            *(new for at in range(len(state.walks)) for new in of_walk(state, at)),
        ]
        if all(p.job is None or not p.is_alive for p in state.processes):
            check_end(state)
        new = set(following) - seen
        seen |= new
        todo += new
    return len(seen)


ONE_WALK = State()
TWO_WALKS = State(
    processes=(Process(1),),
    walks=(Walk(), Walk()),
    count=(State().count[0], State().count[1][:1]),
)


@pytest.mark.no_cover
@pytest.mark.parametrize("first", [ONE_WALK, TWO_WALKS], ids=["one walk", "two walks"])
def test_no_order_of_steps_and_kills_makes_the_count_too_small_or_wrong_for_ever(first):
    assert explore(first) > 10_000


change, advance = Sum.change, Sum.advance


def removed_whether_seen_or_not(self, changes, before):
    change(self, changes, {self.number: self.begun})


def visited_unpublished(self, first, done, _begun, found_bytes):
    advance(self, first, done, done, found_bytes)


def gone_without_a_trace(self, writer_id):
    del self.writers[writer_id]


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("directory", "name", "mistake", "first"),
    [
        (Sum, "change", removed_whether_seen_or_not, ONE_WALK),
        (Sum, "advance", visited_unpublished, ONE_WALK),
        (Usage, "moving_bytes", 0, ONE_WALK),
        (Usage, "remove_dead", gone_without_a_trace, TWO_WALKS),
    ],
)
def test_a_planted_mistake_is_found(monkeypatch, directory, name, mistake, first):
    monkeypatch.setattr(directory, name, mistake)
    with pytest.raises(AssertionError):
        explore(first)
