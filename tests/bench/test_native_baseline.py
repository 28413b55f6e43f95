"""The baseline that is the bare native engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.bench import baseline
from kvoffload_async.bench.baseline import Payload
from kvoffload_async.bench.contender import Place, UnfitError
from kvoffload_async.bench.plan import Jobs, Plan

native_io = pytest.importorskip("kvoffload_async.block_io.native_io")

BLOCK = 4096
PLAN = Plan.parse(
    "4KiB", "4KiB", keys_per_job=1, one_job=0, in_flight=2, rounds=1, threads=2, steady=True
)


@st.composite
def jobs_and_files(draw):
    block_bytes = draw(st.sampled_from([64 << 10, 256 << 10, 1 << 20, 4 << 20, 192 << 10]))
    jobs = Jobs(draw(st.integers(1, 8)), draw(st.integers(1, 40)), block_bytes)
    return jobs, list(range(10, 10 + draw(st.integers(1, 4))))


@given(jobs_and_files())
def test_every_block_has_a_place_of_its_own_and_files_fill_alike(drawn):
    jobs, files = drawn
    found = []
    for first in range(0, jobs.num_keys, jobs.keys_per_job):
        blocks = range(first, first + jobs.keys_per_job)
        runs = list(baseline.runs_of(blocks, jobs, files))
        assert sum(run.length for run in runs) == len(blocks)
        found += [(r.fd, r.offset // jobs.block_bytes + i) for r in runs for i in range(r.length)]
    assert len(set(found)) == jobs.num_keys
    sizes = [max((at + 1 for file, at in found if file == each), default=0) for each in files]
    extent = max(1, (1 << 20) // jobs.block_bytes)
    assert max(sizes) - min(sizes) <= extent
    assert max(sizes) <= -(-jobs.num_keys // (extent * len(files))) * extent


@pytest.mark.parametrize(
    ("num_jobs", "keys_per_job", "block_bytes"), [(3, 5, BLOCK), (1, 40, 64 << 10), (5, 1, 2 << 20)]
)
def test_it_moves_every_byte_to_files_and_back(tmp_path, num_jobs, keys_per_job, block_bytes):
    jobs = Jobs(num_jobs, keys_per_job, block_bytes)
    with Payload(jobs.num_keys, block_bytes) as payload, Place(str(tmp_path), "here") as place:
        samples = baseline.NativeBaseline(place).measure(PLAN, payload, jobs)
        assert samples.keys() == {"store", "load"}
        assert payload.wrong_rows(jobs.num_keys) == 0
    assert list(tmp_path.iterdir()) == []


class Broken:
    """An engine whose batches fail."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def take(self):
        return [(ticket, ({0: 5}, digests)) for ticket, (_, digests) in self._engine.take()]


class Forgetful(Broken):
    """An engine that loads nothing, although its batches succeed."""

    def extents(self, memory, _is_store, *arguments):
        return self._engine.extents(memory, True, *arguments)

    def take(self):
        return self._engine.take()


def test_an_engine_that_returns_other_bytes_is_no_baseline(tmp_path, monkeypatch):
    opened = native_io.open_engine
    monkeypatch.setattr(native_io, "open_engine", lambda n: Forgetful(opened(n)))
    with (
        Payload(1, BLOCK) as payload,
        Place(str(tmp_path), "here") as place,
        pytest.raises(UnfitError, match="returned other bytes than were written to it"),
    ):
        baseline.NativeBaseline(place).measure(PLAN, payload, Jobs(1, 1, BLOCK))
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_fails_is_no_baseline(tmp_path, monkeypatch):
    opened = native_io.open_engine
    monkeypatch.setattr(native_io, "open_engine", lambda n: Broken(opened(n)))
    with (
        Payload(1, BLOCK) as payload,
        Place(str(tmp_path), "here") as place,
        pytest.raises(UnfitError, match=r"a native batch has failed: \{0: 5\}"),
    ):
        baseline.NativeBaseline(place).measure(PLAN, payload, Jobs(1, 1, BLOCK))
    assert list(tmp_path.iterdir()) == []
