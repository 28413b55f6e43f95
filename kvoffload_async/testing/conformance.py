"""Tests of the whole tier contract: subclass `TierConformance` and define one fixture.

    class TestMyTier(TierConformance):
        @pytest.fixture
        def tier(self, tmp_path):
            return lambda: MyTier(root=tmp_path)

The fixture returns a *factory*. Every call creates a new, unopened tier over the same storage;
every test gets storage of its own, with room for about twenty blocks of `slot_bytes`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import AsyncTier
from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    CorruptBlockError,
    RepeatedKeyError,
    StateError,
    TierClosedError,
    TierError,
    Trouble,
    UnknownSlotError,
)
from kvoffload_async.testing.fakes import Fault, FaultPlan, FaultyTier
from kvoffload_async.testing.harness import (
    DEADLINE_S,
    ManagerHarness,
    TierHarness,
    expect,
    expect_failures,
    expect_rows,
    expect_untouched,
    key_of,
    make_job,
    promise,
)
from kvoffload_async.types import JobMetadata, JobResult, LookupResult, OffloadKey, ReqContext

TierFactory = Callable[[], AsyncTier]
_Operation = Callable[[JobMetadata], Coroutine[Any, Any, BlockFailures]]

K = [key_of(number) for number in range(20)]

_LONG_S = 3600.0

_FAULTS = {
    Fault.NONE: 5.0,
    Fault.IO_ERROR_BEFORE: 1.0,
    Fault.IO_ERROR_AFTER: 1.0,
    Fault.SOME_BLOCKS: 2.0,
    Fault.SLOW: 1.0,
    Fault.HANG: 0.5,
    Fault.CANCELLED: 1.0,
}


def _listed(harness: TierHarness, age_s: float | None = None) -> list[OffloadKey]:
    """Return the keys of a listing in pages of three, in order; it must end in a few pages."""
    listed: list[OffloadKey] = []
    cursor: str | None = None
    for _ in K:
        if age_s is None:
            page = harness.tier.list_keys(cursor, 3)
        else:
            page = harness.tier.list_older(cursor, 3, age_s)
        keys, cursor = harness.run(page)
        expect("whether a page of 3 keys has at most 3", len(keys) <= 3, True)  # noqa: PLR2004
        listed += keys
        if cursor is None:
            break
    return sorted(listed)


class TierConformance:
    """The contract of `AsyncTier`, tested directly and through a `SecondaryTierManager`.

    Attributes:
        num_slots: Rows of the primary in these tests; at least 16.
        slot_bytes: Bytes per row.
        timeout_s: Deadline of each wait.
        fault_seeds: Seeds of the fault-injection test.
        short_io_timeout_s: Job deadline in the fault-injection test, after which a job is overdue.
        traffic_runs: Rounds of random jobs in the test without faults.
    """

    num_slots = 64
    slot_bytes = 4096
    timeout_s = DEADLINE_S
    fault_seeds = range(5)
    short_io_timeout_s = 0.25
    traffic_runs = 40

    def damage(self, tier: AsyncTier, key: OffloadKey) -> bool:
        """Corrupt a stored block without the tier's knowledge; return False if not possible."""
        return False

    # -- the tier alone --------------------------------------------------------------------------

    @promise("a block loads with the bytes that were stored, whatever the slots.")
    def test_a_stored_block_loads_with_equal_bytes(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            expect_failures("store of K[0..3]", harness.store(K[:4], [3, 0, 5, 1]), {})
            expect_failures("load of K[0..3]", harness.load(K[:4], [9, 7, 2, 4]), {})
            expect_rows("load of K[0..3]", harness, dict(zip([9, 7, 2, 4], K[:4], strict=True)))

    @promise(
        "a block that the tier does not have "
        "fails with BlockMissingError; the others of the job load."
    )
    def test_a_missing_block_fails_alone_and_as_missing(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            harness.store(K[:2])
            failures = harness.load([K[2], K[0], K[3], K[1]])
            missing = {0: BlockMissingError, 2: BlockMissingError}
            expect_failures("load of [K[2], K[0], K[3], K[1]]", failures, missing)
            expect_rows("load together with missing blocks", harness, {1: K[0], 3: K[1]})

    @promise("a block with wrong bytes fails with CorruptBlockError; the others of the job load.")
    def test_a_damaged_block_fails_alone_and_as_corrupt(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            harness.store(K[:3])
            if not self.damage(harness.tier, K[1]):
                return
            failures = harness.load(K[:3])
            expect_failures("load of K[0..2], K[1] damaged", failures, {1: CorruptBlockError})
            expect_rows("load together with a damaged block", harness, {0: K[0], 2: K[2]})

    @promise("storing a block that is present succeeds.")
    def test_a_present_block_is_stored_again_with_success(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            harness.store(K[:2])
            expect_failures("store of K[0..2], the first two again", harness.store(K[:3]), {})
            expect_failures("load of K[0..2]", harness.load(K[:3], [6, 7, 8]), {})
            expect_rows("load of K[0..2]", harness, {6 + i: K[i] for i in range(3)})

    @promise("a job accesses only its own slots, and a store only reads them.")
    def test_other_slots_than_the_jobs_are_untouched(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            harness.store(K[:2], [4, 6])
            harness.load(K[:3], [8, 10, 12])
            others = set(range(self.num_slots)) - {4, 6, 8, 10, 12}
            expect_untouched("store from slots 4 and 6, load into 8, 10, 12", harness, others)
            expect_rows("after the store of slots 4 and 6", harness, {4: K[0], 6: K[1]})

    @promise("a job without blocks succeeds.")
    def test_an_empty_job_succeeds(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            expect_failures("store of no block", harness.store([]), {})
            expect_failures("load of no block", harness.load([]), {})

    @promise("contains() returns those of the keys that can be loaded.")
    def test_contains_tells_what_loads(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            harness.store(K[:3])
            found = harness.contains([K[4], K[1], K[0]])
            expect("contains([K[4], K[1], K[0]]) after a store of K[0..2]", found, {K[0], K[1]})
            expect("contains([])", harness.contains([]), frozenset())

    @promise(
        "capabilities.persistent says whether blocks survive a restart; "
        "an exclusive tier announces them in open()."
    )
    def test_blocks_survive_a_restart_exactly_if_persistent(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            harness.store(K[:3])
            capabilities = harness.tier.capabilities
        with self._open(tier) as harness:
            if capabilities.exclusive:
                found = harness.announced() & set(K)
                kept = set(K[:3]) if capabilities.persistent else set()
                expect("blocks announced by open() after a restart", found, kept)
            if capabilities.persistent:
                expect("contains(K[0..3]) after a restart", harness.contains(K[:4]), set(K[:3]))
                expect_failures("load of K[0..2] after a restart", harness.load(K[:3]), {})
                expect_rows("load after a restart", harness, dict(enumerate(K[:3])))

    @promise(
        "if capabilities.deletes, a block that delete() does not return is absent, also after a "
        "restart, and can be stored anew; the others stay."
    )
    def test_a_deleted_block_is_gone_until_it_is_stored_anew(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            if not harness.tier.capabilities.deletes:
                return
            harness.store(K[:5])
            expect("contains(K[0..4])", harness.contains(K[:5]), set(K[:5]))
            left = harness.run(harness.tier.delete([K[1], K[9], K[3]]))
            expect("blocks left by delete([K[1], K[9], K[3]])", left, {})
            found = harness.contains([*K[:5], K[9]])
            expect("contains(K[0..4, 9]) after it", found, {K[0], K[2], K[4]})
            missing = {1: BlockMissingError, 3: BlockMissingError}
            expect_failures("load of K[0..4] after it", harness.load(K[:5]), missing)
            expect_failures("store of K[1] anew", harness.store([K[1]], [7]), {})
            expect_failures("load of K[1]", harness.load([K[1]], [8]), {})
            expect_rows("load of a block stored anew", harness, {8: K[1]})
        with self._open(tier) as harness:
            found = harness.contains(K[:5]) | (harness.announced() & set(K))
            if harness.tier.capabilities.persistent:
                expect("blocks after a restart", found, {K[0], K[1], K[2], K[4]})
            expect("whether K[3] is there after a restart", K[3] in found, False)

    @promise(
        "if capabilities.lists, list_keys() lists every block, page by page; if capabilities.ages, "
        "list_older() those of an age."
    )
    def test_a_listing_has_every_block(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            able = harness.tier.capabilities
            harness.store(K[:7])
            if able.lists:
                expect("keys listed after a store of K[0..6]", _listed(harness), sorted(K[:7]))
            if able.ages:
                expect("keys listed of any age", _listed(harness, -_LONG_S), sorted(K[:7]))
                expect(f"keys listed from {_LONG_S:g} s on", _listed(harness, _LONG_S), [])

    @promise(
        "the contents of a tier with capabilities.exclusive change only through "
        "one instance: a second one is refused, or has other contents."
    )
    def test_an_exclusive_tier_shares_its_contents_with_nobody(self, tier: TierFactory) -> None:
        with self._open(tier) as first:
            if not first.tier.capabilities.exclusive:
                return
            try:
                second = self._open(tier)
            except (ConfigError, TierError):
                return  # refusing to share its storage is allowed
            with second:
                expect_failures("store of K[0..1] by the first", first.store(K[:2]), {})
                unannounced = [key for key in K[:2] if key not in second.announced()]
                failures = second.load(unannounced)
                expect(
                    "positions that fail in a load of the first's blocks by the second",
                    sorted(failures),
                    list(range(len(unannounced))),
                )

    @promise("bounds says how many jobs the tier can run at once.")
    def test_as_many_jobs_run_at_once_as_the_bounds_say(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            bounds = harness.tier.bounds
            stores = min(bounds.concurrent_stores, len(K))
            loads = min(bounds.concurrent_loads, len(K), self.num_slots - len(K))
            harness.fill(K, range(len(K)))
            store_jobs = [harness.job([K[i]], [i], is_promotion=False) for i in range(stores)]
            ended = harness.run(_all(harness.tier.store, store_jobs))
            expect(f"failures of {stores} stores at once", ended, [{}] * stores)
            load_jobs = [
                harness.job([K[i % stores]], [len(K) + i], is_promotion=True) for i in range(loads)
            ]
            ended = harness.run(_all(harness.tier.load, load_jobs))
            expect(f"failures of {loads} loads at once", ended, [{}] * loads)
            rows = {len(K) + i: K[i % stores] for i in range(loads)}
            expect_rows(f"{loads} loads at once", harness, rows)

    @promise("close() may be called after an open() that failed.")
    def test_closing_after_a_failed_open_is_harmless(self, tier: TierFactory) -> None:
        unopened = tier()
        asyncio.run(asyncio.wait_for(unopened.close(), self.timeout_s))

    @promise("describe() returns one line for log and messages.")
    def test_it_describes_itself_in_one_line(self, tier: TierFactory) -> None:
        with self._open(tier) as harness:
            line = harness.tier.describe()
            expect("lines of describe()", len(line.splitlines()), 1)

    @promise(
        "the class declares each option with a description, the remedies of errors and situations, "
        "and the maintenance of its stores."
    )
    def test_the_class_declares_options_remedies_and_maintenance(self, tier: TierFactory) -> None:
        cls = type(tier())
        options = [] if cls.declares is None else cls.declares.described()
        unsaid = [option.name for option in options if not option.summary]
        expect("options without a description below the field", unsaid, [])
        advised: Iterable[tuple[object, object]] = cls.remedies.items()
        others = [s for s, _ in advised if not (isinstance(s, Trouble) or _is(s, TierError))]
        expect("remedies for neither a Trouble nor a TierError", others, [])
        wordless = [text for _, text in advised if not text or not isinstance(text, str)]
        expect("remedies without a text", wordless, [])
        stores = cls.maintenance()
        is_kind = stores is None or _is(stores, StoreMaintenance)
        expect("whether maintenance() is None or a StoreMaintenance", is_kind, True)

    # -- behind the manager ---------------------------------------------------------------------

    @promise(
        "every job ends with one result, whatever fails, hangs or is "
        "cancelled, and a block that is reported as loaded has its bytes."
    )
    def test_every_job_has_one_result_in_any_order_with_faults(self, tier: TierFactory) -> None:
        for seed in self.fault_seeds:
            faulty = FaultyTier(tier(), FaultPlan(seed, _FAULTS))
            with self._manage(faulty, io_timeout_s=self.short_io_timeout_s) as harness:
                try:
                    _Traffic(harness, random.Random(seed)).run(40)
                finally:
                    harness.on_loop(faulty.release)
                orphaned = {result.job_id for result in harness.results if result.orphaned}
                harness.wait_released(orphaned)
                report = harness.shutdown()
                expect("jobs that run after the shutdown", report.unfinished_jobs, ())
                expect("error of the shutdown", report.error, None)

    @promise("blocks stored through the manager are found and loaded through it.")
    def test_the_manager_finds_what_it_stored(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            stored = harness.submit_store(K[:3], range(3))
            harness.wait()
            expect("error of the store", harness.result_of(stored).error, None)
            self._expect_lookup(harness, K[0], LookupResult.HIT)
            self._expect_lookup(harness, K[9], LookupResult.MISS)
            loaded = harness.submit_load(K[:3], [10, 11, 12])
            harness.wait()
            expect("error of the load", harness.result_of(loaded).error, None)
            expect_rows("load of K[0..2]", harness, {10 + i: K[i] for i in range(3)})

    @promise(
        "a load with a missing block has one result, which fails and names the blocks that landed."
    )
    def test_a_missing_key_is_one_failed_result_with_the_others_landed(
        self, tier: TierFactory
    ) -> None:
        """Regression test for vLLM issue 42529: such a load had no result at all."""
        with self._manage(tier()) as harness:
            harness.submit_store(K[:2], range(2))
            harness.wait()
            job = harness.submit_load([K[0], K[5], K[1]], [10, 11, 12])
            harness.wait()
            result = harness.result_of(job)
            expect("success of a load of [K[0], K[5], K[1]]", result.success, False)
            expect("blocks that landed", result.successful_keys, frozenset(K[:2]))
            expect("class of the load's error", type(result.error), BlockMissingError)

    @promise("a job without blocks has a result, too.")
    def test_an_empty_job_has_a_result(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            jobs = [harness.submit_store([], []), harness.submit_load([], [])]
            harness.wait()
            errors = [harness.result_of(job).error for job in jobs]
            expect("errors of the empty store and load", errors, [None, None])

    @promise("drain_jobs() returns when every job has a result.")
    def test_many_jobs_drain_with_a_result_each(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            harness.fill(K, range(len(K)))
            for job_id, key in enumerate(K, 1000):
                harness.submit(make_job(job_id, [key], [job_id - 1000], is_promotion=False))
            drained = harness.manager.drain_jobs(self.timeout_s)
            expect(f"drain_jobs({self.timeout_s:g})", drained, True)
            expect("results of the drained jobs", len(harness.collect()), len(K))
            expect("has_pending_work()", harness.manager.has_pending_work(), False)

    @promise("every job ends with one result, in any order and number.")
    def test_no_job_of_many_is_forgotten(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            for seed in range(self.traffic_runs):
                _Traffic(harness, random.Random(seed)).run(self.num_slots)

    @promise("a job whose id is in use fails; the first one goes on.")
    def test_a_job_id_in_use_fails_and_the_first_job_goes_on(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            first = harness.submit_store(K[:1], [0])
            harness.submit(make_job(first.job_id, [K[1]], [1], is_promotion=False))
            harness.wait()
            successes = sorted(result.success for result in harness.results)
            expect("successes of two jobs with one id", successes, [False, True])

    @promise("a job that names a key twice fails and moves no block.")
    def test_a_job_that_names_a_key_twice_fails_and_moves_nothing(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            harness.submit_store(K[:2], [0, 1])
            harness.wait()
            store = harness.submit_store([K[2], K[3], K[2]], [2, 3, 4])
            load = harness.submit_load([K[0], K[0]], [5, 6])
            harness.wait()
            for job in (store, load):
                error = harness.result_of(job).error
                expect("class of the job's error", type(error), RepeatedKeyError)
            self._expect_lookup(harness, K[3], LookupResult.MISS)
            expect_untouched("a load that names K[0] twice", harness, {5, 6})
            self._expect_lookup(harness, K[0], LookupResult.HIT)

    @promise("a job that names a slot outside the primary fails and moves no block.")
    def test_a_job_that_names_a_slot_that_is_not_there_fails_and_moves_nothing(
        self, tier: TierFactory
    ) -> None:
        with self._manage(tier()) as harness:
            harness.submit_store(K[:1], [0])
            harness.wait()
            jobs = [
                harness.submit(make_job(job_id, K[:2], [1, slot], is_promotion=is_promotion))
                for job_id, (slot, is_promotion) in enumerate(
                    itertools.product([self.num_slots, -1], [True, False]), 900
                )
            ]
            harness.wait()
            for job in jobs:
                error = harness.result_of(job).error
                expect("class of the job's error", type(error), UnknownSlotError)
            expect_untouched("jobs with a slot that is not there", harness, {1})
            self._expect_lookup(harness, K[1], LookupResult.MISS)
            self._expect_lookup(harness, K[0], LookupResult.HIT)

    @promise("a job with more keys than slots is refused at the call.")
    def test_unequal_lengths_are_refused_at_the_call(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            for is_promotion in (False, True):
                try:
                    harness.submit(make_job(1, K[:2], [0], is_promotion=is_promotion))
                except StateError:
                    continue
                raise AssertionError("a job with two keys and one slot was accepted")

    @promise("a job submitted after the shutdown fails at once.")
    def test_a_job_after_shutdown_fails_at_once(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            harness.shutdown()
            job = harness.submit_store(K[:1], [0])
            harness.collect()
            error = harness.result_of(job).error
            expect("class of the job's error", type(error), TierClosedError)

    @promise("results can be collected after the shutdown.")
    def test_results_survive_shutdown(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            for number in range(8):
                harness.submit_store([K[number]], [number])
            harness.manager.on_schedule_end()
            harness.manager.shutdown(self.timeout_s)
            expect("results before they are collected", harness.results, [])
            harness.collect()
            expect("results per job", harness.reported(), harness.submitted)

    @promise("a second shutdown returns the report of the first.")
    def test_shutdown_twice_is_shutdown_once(self, tier: TierFactory) -> None:
        with self._manage(tier()) as harness:
            first, second = (harness.manager.shutdown(s) for s in (self.timeout_s, 0.0))
            expect("report of the second shutdown is that of the first", second is first, True)

    # -- internal -------------------------------------------------------------------------------

    def _open(self, tier: TierFactory) -> TierHarness:
        return TierHarness(tier(), self.num_slots, self.slot_bytes, self.timeout_s)

    def _manage(self, tier: AsyncTier, *, io_timeout_s: float = 30.0) -> ManagerHarness:
        return ManagerHarness(
            tier, self.num_slots, self.slot_bytes, self.timeout_s, io_timeout_s=io_timeout_s
        )

    def _expect_lookup(
        self, harness: ManagerHarness, key: OffloadKey, expected: LookupResult
    ) -> None:
        expect(f"lookup of K[{K.index(key)}]", self._lookup(harness, key), expected)

    def _lookup(self, harness: ManagerHarness, key: OffloadKey) -> LookupResult:
        """Look up a key as a scheduler does: once per step until the answer is final."""
        ctx = ReqContext(f"lookup {key.hex()}")
        harness.manager.on_new_request(ctx)
        answer = harness.manager.lookup(key, ctx)
        if answer is LookupResult.RETRY:
            harness.manager.on_schedule_end()
            harness.wait(lambda: harness.manager.lookup(key, ctx) is not LookupResult.RETRY)
            answer = harness.manager.lookup(key, ctx)
        harness.manager.on_request_finished(ctx)
        return answer


def _is(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


async def _all(operation: _Operation, jobs: Sequence[JobMetadata]) -> list[BlockFailures]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(operation(job)) for job in jobs]
    return [task.result() for task in tasks]


class _Traffic:
    """Random jobs; each owns its slots until its copy has ended."""

    def __init__(self, harness: ManagerHarness, draw: random.Random) -> None:
        self._harness = harness
        self._draw = draw
        self._free = set(range(len(harness.rows)))
        self._jobs: dict[int, tuple[list[OffloadKey], list[int], bool]] = {}

    def run(self, num_jobs: int) -> None:
        for _ in range(num_jobs):
            if self._draw.random() < 0.3:  # noqa: PLR2004 - some of the time
                self._take_in(self._harness.collect())
            count = self._draw.randint(0, 3)
            if count > len(self._free):
                break
            self._submit(self._draw.sample(K, count))
        self._harness.wait()
        self._take_in(self._harness.results)

    def _submit(self, keys: list[OffloadKey]) -> None:
        slots = self._draw.sample(sorted(self._free), len(keys))
        self._free -= set(slots)
        is_load = self._draw.random() < 0.5  # noqa: PLR2004 - as many loads as stores
        submit = self._harness.submit_load if is_load else self._harness.submit_store
        self._jobs[submit(keys, slots).job_id] = (keys, slots, is_load)

    def _take_in(self, results: list[JobResult]) -> None:
        for result in results:
            keys, slots, is_load = self._jobs.pop(result.job_id, ([], [], False))
            landed = set(keys) if result.success else set(result.successful_keys or ())
            for key, slot in zip(keys, slots, strict=True):
                if is_load and key in landed:
                    expect_rows("a block reported as loaded", self._harness, {slot: key})
            if not result.orphaned:
                self._free |= set(slots)
