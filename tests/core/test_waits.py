"""A request never waits in vain: on healthy tiers each wait for room ends long before its limit."""

from core.terms import HIT, MISS, PENDING, RETRY, k
from core.world import World

DEFERRAL_S = 30.0
STEP_S = 0.1


def prompt(name, length):
    return [k(f"{name}{index}") for index in range(length)]


def world_with(prompts, num_slots, **options):
    """Return a world whose tier has these prompts."""
    world = World(num_slots, 1, copies_each=None, deferral_s=DEFERRAL_S, **options)
    world.fill(0, [key for keys in prompts.values() for key in keys])
    return world


def begin(world, name, keys, *, has_positions=True):
    positions = {key: index for index, key in enumerate(keys)} if has_positions else {}
    return world.begin(name, key_positions=positions)


class Scheduler:
    """Asks for each waiting request in each step; loads what is decided, and ends it then.

    Every copy ends in the step in which it begins.

    Attributes:
        hits: Request -> blocks that it has loaded.
        decided_s: Request -> when it was decided.
        holders: Requests whose blocks are hits, but which are not scheduled.
    """

    def __init__(self, world, prompts, *, holders=(), has_positions=True):
        self.world, self.prompts = world, prompts
        self.contexts = {
            name: begin(world, name, keys, has_positions=has_positions)
            for name, keys in prompts.items()
        }
        self.holders = set(holders)
        self.hits, self.decided_s = {}, {}

    def step(self):
        world, ended = self.world, list(self.world.reads)
        for name, ctx in self.contexts.items():
            if name not in self.hits:
                self._ask(name, ctx)
        for read in ended:
            world.loaded(read)
            world.finish(read.ctx)
        world.step(STEP_S)
        world.finish_all()
        world.check()

    def _ask(self, name, ctx):
        keys = self.prompts[name]
        answers = [self.world.lookup(ctx, key) for key in keys]
        if {PENDING, RETRY} & set(answers) or name in self.holders:
            return
        count = answers.index(MISS) if MISS in answers else len(keys)
        self.hits[name], self.decided_s[name] = count, self.world.now_s
        if count:
            assert answers[:count] == [HIT] * count
            self.world.load(ctx, keys[:count])
        else:
            self.world.finish(ctx)

    def serve(self, seconds):
        """Serve until all but the holders have loaded; return the seconds that it took."""
        began_s = self.world.now_s
        while len(self.hits) + len(self.holders) < len(self.contexts):
            assert self.world.now_s - began_s < seconds, f"decided: {self.decided_s}"
            self.step()
        assert self.world.planner.counters.deferrals_expired == 0
        return self.world.now_s - began_s

    @property
    def promoted(self):
        return self.world.planner.tiers[0].counters.loaded_blocks


def test_a_run_of_all_slots_does_not_wait_for_blocks_that_wait_for_it():
    """Pending blocks had no slots to be copied with, as a request that waited for theirs held all.

    The tier's copies of stores need no slots of promotions, so a full primary empties.
    """
    prompts = {"r": prompt("r", 16)}
    world = world_with(prompts, 16)
    world.primary.drops_pending = False
    writer = world.begin("w")
    for index in range(16):
        world.store(writer, [f"w{index}"])
    assert world.planner.cascades.queues[0].count
    scheduler = Scheduler(world, prompts)
    scheduler.serve(2.0)
    assert scheduler.hits == {"r": world.planner.room.budget}


def test_hits_of_a_request_that_is_not_scheduled_hold_others_up_for_a_second():
    """Its blocks were held as long as it asked: all others waited to their limit, and computed."""
    prompts = {"holder": prompt("h", 27)}
    prompts |= {f"r{index}": prompt(f"r{index}.", 6) for index in range(4)}
    world = world_with(prompts, 32)
    scheduler = Scheduler(world, prompts, holders={"holder"})
    assert scheduler.serve(3.0) > 1.0
    assert set(scheduler.hits.values()) == {6}


def test_of_a_prompt_longer_than_the_primary_the_head_is_hit_though_its_order_is_unknown():
    """Its own tail, looked up first to last, kept its head out for ever."""
    prompts = {"r": prompt("r", 40)}
    scheduler = Scheduler(world_with(prompts, 16), prompts, has_positions=False)
    scheduler.serve(1.0)
    assert scheduler.hits == {"r": 15}
    assert scheduler.promoted == 15


def test_a_backlog_longer_than_the_limit_of_a_deferral_expires_for_nobody():
    """Time in line behind others counted: of 16 requests, 14 were computed."""
    prompts = {f"r{index:02}": prompt(f"r{index}.", 14) for index in range(40)}
    world = world_with(prompts, 16)
    world.planner.deferral_s = 2.0
    scheduler = Scheduler(world, prompts)
    assert scheduler.serve(60.0) > 2 * world.planner.deferral_s
    assert set(scheduler.hits.values()) == {14}


def test_of_a_run_longer_than_tickets_may_be_the_head_comes_at_once_and_nothing_in_vain():
    """Refused for its last two blocks, a request gave back the 48 that it had, and joined again."""
    prompts = {f"r{index}": prompt(f"r{index}.", 62) for index in range(4)}
    scheduler = Scheduler(world_with(prompts, 64), prompts)
    scheduler.serve(3.0)
    assert set(scheduler.hits.values()) == {58}
    assert scheduler.promoted == 4 * 58


def test_a_store_that_was_cut_for_the_head_of_the_queue_has_room_when_the_head_leaves():
    """No slot becomes free or evictable then; without a sign, no scheduler would offer again."""
    prompts = {"holder": prompt("h", 14), "head": prompt("r", 14)}
    world = world_with(prompts, 20, accept_prefix=True)
    contexts = {name: begin(world, name, keys) for name, keys in prompts.items()}
    for name, keys in prompts.items():
        for key in keys:
            world.lookup(contexts[name], key)
    world.step(STEP_S)
    writer, wanted = world.begin("w"), prompt("w", 6)
    granted = world.planner.prepare_store(wanted, writer)
    assert 0 < len(granted.keys_to_store) < len(wanted)
    room_made = world.primary.room_made
    world.finish(contexts["head"])
    assert world.primary.room_made - room_made >= len(granted.keys_left_out)
    again = world.planner.prepare_store(granted.keys_left_out, writer)
    assert again.keys_to_store == granted.keys_left_out


def test_a_request_that_looks_on_while_it_loads_keeps_its_ticket_for_the_later_load():
    run = prompt("r", 6)
    world = world_with({"r": run}, 20)
    ctx = begin(world, "r", run)
    assert world.lookups(ctx, run[:4]) == [PENDING] * 4
    world.step(STEP_S)
    world.finish_all()
    assert world.lookups(ctx, run[:4]) == [HIT] * 4
    world.load(ctx, run[:2])
    assert world.lookups(ctx, run) == [HIT] * 4 + [PENDING] * 2
    world.step(STEP_S)
    assert world.planner.requests[ctx].ticket
    world.finish_all()
    world.wind_down()


def test_a_pin_that_must_wait_for_room_waits_behind_those_who_came_before():
    prompts = {"holder": prompt("h", 14), "head": prompt("r", 14)}
    world = world_with(prompts, 20)
    contexts = {name: begin(world, name, keys) for name, keys in prompts.items()}
    for name, keys in prompts.items():
        world.lookups(contexts[name], keys)
    stored = prompt("s", 2)
    writer = world.begin("w")
    world.store(writer, stored)
    world.step(STEP_S)
    assert world.lookups(writer, stored) == [HIT] * 2
    assert world.planner.hold(stored, writer) is None
    assert list(world.planner.room.queue) == [
        world.planner.requests[contexts["head"]],
        world.planner.requests[writer],
    ]


def test_a_head_for_which_the_policy_finds_too_few_victims_is_granted_once_it_finds_them():
    run = prompt("r", 4)
    world = world_with({"r": run}, 8)
    reserve, world.primary.reserve = world.primary.reserve, lambda keys: []
    ctx = begin(world, "r", run)
    world.lookups(ctx, run)
    world.step(STEP_S)
    assert not world.planner.requests[ctx].ticket
    world.primary.reserve = reserve
    world.store(world.begin("w"), prompt("s", 1))  # something has changed
    world.step(STEP_S)
    assert len(world.planner.requests[ctx].ticket) == len(run)


def test_a_prompt_is_looked_up_after_single_blocks_of_it_and_unknown_requests_may_be_scheduled():
    run = prompt("r", 4)
    world = world_with({"r": run}, 8)
    ctx = begin(world, "r", run)
    world.lookup(ctx, run[0])
    assert world.planner.lookup_prefix(run, ctx) == (4, True)
    world.end_step(["nobody"])
    world.finish_all()
    assert world.planner.lookup_prefix(run, ctx) == (4, False)


def test_a_block_that_is_being_written_is_a_miss_where_no_slot_is_left_to_tickets():
    """Such a request was told to wait, refused, and told to wait anew, in each step."""
    world = world_with({"r": prompt("r", 1)}, 2)
    holder = world.begin("holder")
    world.lookup(holder, prompt("r", 1)[0])
    world.step(STEP_S)
    world.orphan()
    assert world.planner.room.budget == 0
    world.offer(world.begin("writer"), "w")
    waiting = world.begin("waiting")
    assert world.lookup(waiting, "w") is PENDING
    world.step(STEP_S)
    assert world.lookup(waiting, "w") is MISS
    world.release()
    world.wind_down()


def test_a_promotion_that_is_given_up_for_room_has_its_result_in_that_step():
    """Else the sums of the statistics did not hold until the next step."""
    prompts = {"r": prompt("r", 2), "s": prompt("s", 2)}
    world = world_with(prompts, 3)
    contexts = {name: begin(world, name, keys) for name, keys in prompts.items()}
    planner = world.planner
    for _ in range(30):
        for name, keys in prompts.items():
            world.lookups(contexts[name], keys)
        world.step(STEP_S)
        in_flight = sum(len(list(tier.jobs.unreported())) for tier in planner.tiers)
        assert planner.counters.jobs_submitted - planner.counters.job_results == in_flight
        (tier,) = planner.tiers
        assert tier.counters.submitted_jobs - tier.counters.finished_jobs == in_flight
    assert planner.orphaned, "given up, as the tier is silent"
    world.finish_all()
    world.wind_down()
