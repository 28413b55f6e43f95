"""The contract of maintenance, held by every kind of store: see `StoreMaintenance`."""

import asyncio
import fcntl
import itertools
import threading
from contextlib import aclosing
from pathlib import Path

import pytest
from tiers.kept import (
    NUM_BLOCKS,
    OPTIONS,
    contents,
    damage_a_block,
    damage_every_block,
    keep_blocks,
)

from kvoffload_async.abc.maintenance import (
    GcOptions,
    MaintenanceControl,
    Problem,
    Removal,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.facade.maintenance import find_stores, maintenance_kinds
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.tiers.files import maintenance as files_maintenance
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.maintenance import inspection as fs_verification
from kvoffload_async.tiers.slab.maintenance import inspection as slab_verification

CORRUPT = GcOptions(corrupt=True)
CALLS = {
    "inspect": lambda store, control: store.inspect(control),
    "verify": lambda store, control: store.verify(control),
    "gc": lambda store, control: store.gc(CORRUPT, control),
}
every_call = pytest.mark.parametrize("call", CALLS)


@pytest.fixture(params=OPTIONS)
def kind(request):
    return request.param


@pytest.fixture
def store(kind, tmp_path):
    keep_blocks(kind, tmp_path)
    (store,) = asyncio.run(find_stores(tmp_path))
    return store


def collected(iterator):
    async def collect():
        async with aclosing(iterator) as findings:
            return [finding async for finding in findings]

    return asyncio.run(collect())


def run(call, store, control=None):
    return collected(CALLS[call](store, control or MaintenanceControl()))


@every_call
def test_of_a_sound_store_there_is_a_summary_and_nothing_else(store, call):
    before = contents(store.folder)
    (summary,) = run(call, store)
    assert isinstance(summary, Summary)
    assert summary.figures["name"] == store.name
    assert summary.rows
    assert contents(store.folder) == before


@every_call
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_is_expected_is_what_is_done(store, call, is_damaged):
    if is_damaged:
        damage_a_block(store.tier_type, store.folder)
    expected, done = [], []
    run(call, store, MaintenanceControl(expect=expected.append, advance=done.append))
    assert sum(expected) == sum(done)
    assert sum(done) > 0 or (call == "inspect" and store.tier_type == "slab")


def test_a_corrupt_block_is_a_problem_then_a_removal_then_gone(store):
    damage_a_block(store.tier_type, store.folder)
    problem, summary = run("verify", store)
    assert isinstance(problem, Problem)
    assert problem.text.startswith(f"corrupt: {problem.what}: ")
    assert len(summary.figures["verification"]["corrupt"]) == 1
    removal, _ = run("gc", store)
    assert isinstance(removal, Removal)
    assert removal.what == problem.what
    assert removal.reason in problem.text
    (summary,) = run("verify", store)
    assert summary.figures["verification"]["checked"] == NUM_BLOCKS - 1


@pytest.mark.parametrize(("max_listed", "num_listed"), [(10, 10), (3, 3), (None, NUM_BLOCKS)])
def test_every_bad_block_is_found_and_counted_and_the_first_are_listed(
    store, max_listed, num_listed
):
    damage_every_block(store.folder)
    *problems, summary = run("verify", store, MaintenanceControl(max_listed=max_listed))
    assert len({problem.what for problem in problems}) == NUM_BLOCKS
    found = summary.figures["verification"]
    assert (found["corrupt_blocks"], found["unreadable_blocks"]) == (NUM_BLOCKS, 0)
    assert (found["checked"], found["verified"]) == (NUM_BLOCKS, 0)
    assert len(found["corrupt"]) == num_listed
    assert found["unreadable"] == []
    assert ("corrupt", str(NUM_BLOCKS)) in summary.rows


def test_a_dry_run_finds_the_same_and_changes_nothing(store):
    damage_a_block(store.tier_type, store.folder)
    before = contents(store.folder)
    dry = collected(store.gc(GcOptions(corrupt=True, dry_run=True), MaintenanceControl()))
    assert contents(store.folder) == before
    assert any(isinstance(finding, Problem) for finding in dry)  # it is wrong still
    real = run("gc", store)
    removals = [[f for f in found if isinstance(f, Removal)] for found in (dry, real)]
    assert removals[0] == removals[1] != []


@every_call
def test_once_stopped_the_rest_is_left_out(store, call):
    damage_a_block(store.tier_type, store.folder)
    before = contents(store.folder)
    *_, summary = run(call, store, MaintenanceControl(should_stop=lambda: True))
    assert summary.figures.get("verification", {}).get("checked", 0) == 0
    assert contents(store.folder) == before


@pytest.fixture
def small_batches(monkeypatch):
    """Work in many small steps, so that there is a middle."""
    monkeypatch.setattr(fs_verification, "BATCH_BYTES", 1)
    monkeypatch.setattr(slab_verification, "BATCH_BYTES", 1)
    monkeypatch.setattr(files_maintenance, "IO_THREADS", 1)


@pytest.mark.usefixtures("small_batches")
def test_cancelling_gc_ends_its_threads_and_gives_the_store_back(store):
    async def cancel_in_the_middle():
        steps = itertools.count()

        def advance(_amount):
            if next(steps) == 5:
                task.cancel()

        async def work():
            async with aclosing(store.gc(CORRUPT, MaintenanceControl(advance=advance))) as findings:
                return [finding async for finding in findings]

        task = asyncio.create_task(work())
        await asyncio.wait([task])
        assert task.cancelled()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(cancel_in_the_middle())
    assert is_free(store)
    assert isinstance(run("gc", store)[-1], Summary)


@pytest.mark.usefixtures("small_batches")
def test_whoever_closes_it_early_gives_the_store_back(store):
    damage_a_block(store.tier_type, store.folder)

    async def first():
        async with aclosing(store.gc(CORRUPT, MaintenanceControl())) as findings:
            return await anext(findings)

    assert isinstance(asyncio.run(first()), Removal)
    assert is_free(store)


def is_free(store):
    """Whether neither a lock nor a writer's entry is left."""
    if store.tier_type == "fs":
        return not list(Path(store.folder, ".writers").iterdir())
    with Path(store.folder, "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True


class Gate:
    """Keeps a thread in a call until the test has cancelled who waits for it."""

    def __init__(self):
        self.is_reached, self.may_end, self.num_ended = asyncio.Event(), threading.Event(), 0
        self.loop = asyncio.get_running_loop()

    def pass_through(self, *_arguments):
        self.loop.call_soon_threadsafe(self.is_reached.set)
        assert self.may_end.wait(60)
        self.num_ended += 1

    async def cancel_inside(self, work):
        task = asyncio.create_task(work)
        await self.is_reached.wait()
        for _ in range(10):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        self.may_end.set()
        await asyncio.wait([task])
        assert task.cancelled()


async def last_of(iterator):
    async with aclosing(iterator) as items:
        return [item async for item in items][-1]


def read_through(io, call):
    """Read a file that `call` opens."""

    def opener(path, flags):
        call()
        return FileOps.open(io.ops, path, flags)

    io.ops.open = opener
    return io.read_file(__file__, 1)


@pytest.mark.parametrize(
    "work",
    [
        lambda io, call: io.run(call, 1),
        lambda io, call: last_of(io.share_out(iter([1]), call)),
        read_through,
    ],
    ids=["run", "share_out", "read_file"],
)
def test_a_cancellation_waits_for_the_thread_that_is_in_a_call(work):
    async def cancel():
        gate = Gate()
        io = files_maintenance.MaintenanceIo(FileOps(), MaintenanceControl())
        await gate.cancel_inside(work(io, gate.pass_through))
        assert gate.num_ended == 1

    asyncio.run(cancel())


@pytest.mark.parametrize("step", ["lock", "rename"])
def test_a_store_is_given_back_only_when_the_call_in_it_has_ended(store, step, monkeypatch):
    if step == "rename" and store.tier_type == "fs":
        step = "unlink"
    damage_a_block(store.tier_type, store.folder)

    async def cancel():
        gate, method = Gate(), getattr(FileOps, step)

        def slow(self, *arguments, **options):
            result = method(self, *arguments, **options)
            gate.pass_through()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(FileOps, step, slow)
            await gate.cancel_inside(last_of(store.gc(CORRUPT, MaintenanceControl())))

    asyncio.run(cancel())
    assert is_free(store)
    assert isinstance(run("gc", store)[-1], Summary)


def test_what_a_check_raises_comes_out(store, monkeypatch):
    def fail(self, batch):
        raise RuntimeError("a defect")

    monkeypatch.setattr(fs_verification.BlockChecker, "check", fail)
    monkeypatch.setattr(slab_verification.SlotChecker, "check", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        run("gc", store)
    assert is_free(store)


def test_a_kind_is_found_by_the_tiers_type():
    for name in OPTIONS:
        kind = SecondaryTierFactory.get_tier_class(name).maintenance()
        assert kind.tier_type == name
        assert kind in maintenance_kinds()
    assert SecondaryTierFactory.get_tier_class("example").maintenance() is None


def test_several_kinds_in_a_directory_are_all_found(tmp_path):
    for name in OPTIONS:
        keep_blocks(name, tmp_path)
    stores = asyncio.run(find_stores(tmp_path))
    assert [store.tier_type for store in stores] == list(OPTIONS)


def test_a_folder_whose_name_says_another_kind_than_its_files_is_that_of_its_files(tmp_path):
    keep_blocks("slab", tmp_path, model="m_0123456789ab")
    (store,) = asyncio.run(find_stores(tmp_path))
    assert (store.tier_type, store.name) == ("slab", "m_0123456789ab_r0")


def cabinets_in(directory):
    return [str(path) for path in Path(directory).glob("cabinet")]


class Cabinet(StoreMaintenance):
    """A third kind: any folder called cabinet."""

    tier_type = "cabinet"
    report_key = "cabinets"
    appearance = "a folder called cabinet"

    def __init__(self, folder):
        self.folder = folder

    @classmethod
    async def find(cls, directory):
        return [cls(folder) for folder in cabinets_in(directory)]

    async def inspect(self, control):
        yield Problem("dusty")
        yield Summary("Cabinets", [("books", "3")], {"name": self.name, "books": 3})

    verify = inspect
    gc = None


class CabinetTier(ExampleTier):
    @classmethod
    def maintenance(cls):
        return Cabinet


@pytest.fixture
def third_kind(monkeypatch):
    """Two more tiers are registered: one with a kind of its own, and a broken one."""
    get_tier_class, names = SecondaryTierFactory.get_tier_class, SecondaryTierFactory.names()

    def get(name):
        if name == "broken":
            raise ConfigError("no good")
        return CabinetTier if name == "cabinet" else get_tier_class(name)

    monkeypatch.setattr(SecondaryTierFactory, "names", lambda: [*names, "cabinet", "broken"])
    monkeypatch.setattr(SecondaryTierFactory, "get_tier_class", get)


@pytest.mark.usefixtures("third_kind")
def test_a_tier_from_elsewhere_brings_its_own_maintenance(tmp_path):
    (tmp_path / "cabinet").mkdir()
    (store,) = asyncio.run(find_stores(tmp_path))
    assert run("inspect", store)[0] == Problem("dusty")


@pytest.mark.usefixtures("third_kind")
def test_where_there_is_no_store_it_says_what_was_looked_for(tmp_path):
    with pytest.raises(InputError) as refused:
        asyncio.run(find_stores(tmp_path))
    for text in (
        "no fs store (a folder called <model>_<digest>_r<rank>)",
        "no cabinet store (a folder called cabinet)",
        "broken cannot be asked: no good",
    ):
        assert text in str(refused.value)
