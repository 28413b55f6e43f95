"""What requests found is told to the tiers, once a step."""

from itertools import pairwise

from core.terms import PENDING, k, ks
from core.world import World

from kvoffload_async.core.cascades import RecentKeys
from kvoffload_async.types import ENGINE_REQ_ID, ReqContext


class Own:
    """A world whose jobs all end well at the end of a step."""

    def __init__(self, *kinds, num_slots=8):
        self.world = World(num_slots, len(kinds), kinds=dict(enumerate(kinds)))
        self.planner = self.world.planner
        self.stored = []

    @property
    def touched(self):
        return [(tier, list(keys)) for tier, keys in self.world.touched]

    def begin(self, req_id, names):
        positions = {k(name): i for i, name in enumerate(names, 1)}
        return self.world.begin(req_id, key_positions=positions)

    def store(self, names):
        ctx = self.begin("writer", names)
        self.world.store(ctx, names)
        self.world.finish(ctx)
        self.step()
        self.step()
        self.world.touched.clear()
        self.stored.clear()

    def find(self, names, req_id="reader"):
        ctx = self.begin(req_id, names)
        self.world.load(ctx, names)
        self.world.loaded()
        self.world.finish(ctx)

    def step(self, seconds=1.0):
        self.world.step(seconds)
        self.stored += [
            (tier, list(job.keys), job.req_context.req_id)
            for tier, job in self.world.running.values()
            if not job.is_promotion
        ]
        self.world.finish_all()
        self.world.check()


def test_what_a_request_found_is_touched_in_every_tier_head_to_tail():
    own = Own("exact", "exact")
    own.store("abc")
    own.find("abc")
    assert own.touched == [], "at the end of the step"
    own.step()
    assert own.touched == [(0, ks("abc")), (1, ks("abc"))]
    own.step()
    assert len(own.touched) == 2


def test_all_requests_of_a_step_are_told_together_the_latest_first():
    own = Own("exact")
    own.store("abcd")
    own.find("abc", "first")
    own.find("ad", "second")
    own.step()
    assert own.touched == [(0, ks("adbc"))]


def test_what_a_request_has_stored_itself_is_not_touched():
    own = Own("exact")
    ctx = own.begin("r", "a")
    own.world.store(ctx, "a")
    own.world.finish(ctx)
    own.step()
    assert own.touched == []


def test_a_use_by_nobody_in_particular_is_told_too():
    own = Own("exact")
    own.store("a")
    own.planner.touch(ks("a"), ReqContext("unknown"))
    own.step()
    assert own.touched == [(0, ks("a"))]


def test_what_an_exact_tier_has_lost_is_offered_to_it_again():
    own = Own("exact", "exact")
    own.store("abc")
    own.world.lose(1, k("b"))
    own.find("abc")
    own.step()
    assert own.touched == [(0, ks("abc")), (1, ks("ac"))]
    assert own.stored == [(1, ks("b"), ENGINE_REQ_ID)]
    own.find("abc", "again")
    own.step()
    assert own.touched[-1] == (1, ks("abc"))


def test_what_is_on_its_way_to_a_tier_or_gone_from_the_primary_is_not_offered():
    own = Own("exact", num_slots=2)
    ctx = own.begin("r", "ab")
    own.world.store(ctx, "ab")
    own.find("a", "reader")
    own.planner.touch(ks("x"), ReqContext("unknown"))
    own.planner.end_step()
    assert [b.count for b in own.planner.cascades.queues] == [0]
    own.world.finish_all()
    own.world.wind_down()


def test_a_probed_tier_hears_of_a_key_once_a_minute_and_is_asked_nothing():
    own = Own("probed")
    own.store("a")
    for number in range(240):
        own.find("a", f"r{number}")
        own.step(1.0)
    assert len(own.touched) == 2
    assert not own.planner.tiers[0].index.is_waiting


def test_a_promoted_block_is_offered_to_the_faster_tiers_that_lack_it():
    own = Own("exact", "probed", "probed", "exact")
    own.world.fill(3, ks("ab"))
    own.planner.tiers[2].health.loads.permits = lambda now_s: False  # never asked
    ctx = own.begin("r", "ab")
    while own.world.lookup(ctx, "a") is not PENDING:
        own.step()
    own.step()
    own.world.lookup(ctx, "a")
    own.step()
    assert [(index, keys) for index, keys, _ in own.stored] == [(0, ks("a")), (1, ks("a"))]


# -- once a minute ------------------------------------------------------------------------------


def test_a_key_passes_at_most_once_in_a_minute_and_at_least_once_in_two():
    recent = RecentKeys()
    passed = {name: [] for name in "abc"}
    for second in range(600):
        for name, every in (("a", 1), ("b", 7), ("c", 45)):
            if second % every == 0 and recent.admitted(ks(name), float(second)):
                passed[name].append(second)
    for times in passed.values():
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert min(gaps) >= 60
        assert max(gaps) <= 180


def test_after_a_long_silence_everything_passes():
    recent = RecentKeys()
    assert recent.admitted(ks("a"), 0.0) == ks("a")
    assert recent.admitted(ks("b"), 1000.0) == ks("b")
    assert len(recent) == 1


def test_no_more_keys_are_remembered_than_the_tables_hold():
    recent = RecentKeys(most_keys=100)
    for second in range(0, 600, 10):
        recent.admitted(ks(range(second * 100, second * 100 + 60)), float(second))
        assert len(recent) <= 200
    assert recent.admitted(ks(range(70)), 5000.0) == ks(range(70))
    assert recent.admitted(ks(range(70, 140)), 5000.0) == ks(range(70, 100))
