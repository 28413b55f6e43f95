"""A world in which a scheduler drives a `TieringOffloadingManager`, and copies blocks by itself."""

import random
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
from fuzz.common import (
    GRACE_S,
    HEALTHY_S,
    IN_MEMORY,
    ON_DISK,
    calm,
    check_sums,
    content,
    damage,
    draw_config,
    holds,
    is_at_rest,
    law,
    prompt,
)
from fuzz.tiers import SlowPool
from virtual_runner import LeftoverTasksError, VirtualRunner

from kvoffload_async import (
    ClosedError,
    LookupResult,
    OffloadError,
    ReqContext,
    ScheduleEndContext,
    StateError,
    TieringOffloadingSpec,
)
from kvoffload_async.runtime.bridge import Bridge

JUNK = 0xAA
HEALTHY_STEP_S = 0.2
"""Seconds between two lookups of a request on healthy tiers."""


@dataclass(eq=False)
class Grant:
    """Slots that the manager has given to a copy of this scheduler's."""

    request: object
    keys: list
    slots: list
    generation: int


class Request:
    def __init__(self, ctx, keys):
        self.ctx = ctx
        self.keys = keys
        self.has_ended = False


class Scheduler:
    """The world; a step's name is a method's, and a number from which it draws the rest."""

    STEPS = {  # noqa: RUF012 - never changed
        "begin": 6,
        "look_up": 12,
        "end_load": 8,
        "store": 10,
        "end_store": 10,
        "finish": 4,
        "end_step": 12,
        "wait": 6,
        "touch": 1,
        "reset": 1,
        "invalidate": 0.3,
        "damage": 1,
        "misuse": 1,
        "observe": 2,
        "heal": 0.3,
        "restart": 0.4,
    }

    def __init__(self, chance, folder):
        self.folder = folder
        self.is_virtual = chance.random() < 0.9
        on_disk = chance.random() < 0.3 if self.is_virtual else True
        self.config = draw_config(chance, folder, ON_DISK if on_disk else (*IN_MEMORY, "example"))
        # A tier whose copies go on is not closed, and keeps its files open.
        self.close_s = (100.0 if on_disk else 1.0) if self.is_virtual else GRACE_S / 2
        self.pool_seed = chance.randrange(10**6)
        self.offered = set()
        """Keys of which a store was begun: nothing else may ever be found."""
        self.open()

    def open(self):
        self.requests, self.loads, self.stores = [], [], []
        self.primary_generation = 0
        self.runner = runtime = None
        if self.is_virtual:
            self.runner = VirtualRunner()
            chance = random.Random(self.pool_seed)
            runtime = Bridge(self.runner, lambda *_threads: SlowPool(chance))
        self.spec = TieringOffloadingSpec(self.config, runtime)
        self.manager = self.spec.get_manager()
        self.rows = np.asarray(self.manager.get_primary_kv_view())

    def play(self, steps):
        try:
            for name, number in steps:
                getattr(self, name)(random.Random(number))
            self.rest()
            self.close()
        except BaseException:
            with suppress(Exception):
                self.spec.shutdown(1.0)
            if self.runner is not None:
                with suppress(Exception):
                    self.runner.close()
            raise

    # -- requests -------------------------------------------------------------------------------

    def begin(self, chance):
        keys = [self.manager.generation.key(block_hash) for block_hash in prompt(chance)]
        positions = {key: 16 * i for i, key in enumerate(keys, 1)} if chance.random() < 0.5 else {}
        ctx = ReqContext(str(chance.randrange(4)), None, positions)
        if chance.random() < 0.1:
            ctx.load_tier_filter = frozenset()
        self.manager.on_new_request(ctx)
        self.requests.append(Request(ctx, keys))

    def look_up(self, chance):
        if not self.requests:
            return
        request, found = chance.choice(self.requests), []
        for key in request.keys:
            answer = self.manager.lookup(key, request.ctx)
            if answer is not LookupResult.HIT:
                break
            law(key in self.offered, "a block is found that nobody has stored")
            found.append(key)
        if found and chance.random() < 0.7:
            self.begin_load(request, found[: chance.randint(1, len(found))])

    def begin_load(self, request, keys):
        spec = self.manager.prepare_load(keys, request.ctx)
        grant = Grant(request, keys, spec.block_ids.tolist(), spec.generation)
        law(len(grant.slots) == len(keys), "a slot is missing")
        self.check_load(grant)
        self.loads.append(grant)

    def check_load(self, grant):
        if grant.generation == self.primary_generation:
            for key, slot in zip(grant.keys, grant.slots, strict=True):
                law(holds(self.rows[slot], key), f"wrong bytes in slot {slot}, which is pinned")

    def end_load(self, chance):
        if self.loads:
            grant = self.loads.pop(chance.randrange(len(self.loads)))
            self.check_load(grant)
            self.manager.complete_load(grant.keys, grant.request.ctx, grant.generation)

    def store(self, chance):
        if not self.requests:
            return
        request = chance.choice(self.requests)
        first = chance.randrange(len(request.keys))
        keys = request.keys[first : first + chance.randint(1, 6)]
        granted = self.manager.prepare_store(keys, request.ctx)
        if granted is None:
            return
        new, left_out = list(granted.keys_to_store), list(granted.keys_left_out)
        law(new + left_out == [k for k in keys if k in {*new, *left_out}], "order of a store")
        slots = granted.store_spec.block_ids.tolist()
        generation = granted.store_spec.generation
        in_use = [g for g in self.loads + self.stores if g.generation == generation]
        taken = {slot for grant in in_use for slot in grant.slots}
        law(not taken & set(slots) and len(set(slots)) == len(new), "a slot is given out twice")
        self.rows[slots] = JUNK
        self.offered |= set(new)
        self.stores.append(Grant(request, new, slots, generation))

    def end_store(self, chance):
        if not self.stores:
            return
        grant = self.stores.pop(chance.randrange(len(self.stores)))
        success = chance.random() < 0.85
        if success and grant.generation == self.primary_generation:
            for key, slot in zip(grant.keys, grant.slots, strict=True):
                self.rows[slot] = content(key)
        self.manager.complete_store(grant.keys, grant.request.ctx, success, grant.generation)

    def finish(self, chance):
        """End a request, perhaps under its copies."""
        if self.requests:
            request = self.requests.pop(chance.randrange(len(self.requests)))
            request.has_ended = True
            self.manager.on_request_finished(request.ctx)

    def touch(self, chance):
        if self.requests:
            request = chance.choice(self.requests)
            self.manager.touch(request.keys, request.ctx)

    # -- the engine -----------------------------------------------------------------------------

    def end_step(self, chance):
        begun = [r.ctx.req_id for r in self.requests if chance.random() < 0.3]
        context = ScheduleEndContext(begun) if chance.random() < 0.7 else None
        self.manager.on_schedule_end(context)

    def wait(self, chance):
        self.pass_time(chance.choice((0.0, 0.01, 0.2, 1.0, 6.0, 70.0)))

    def pass_time(self, seconds):
        if self.runner is not None:
            self.runner.advance(seconds)
        else:
            self.manager.wait_for_progress(min(seconds, 0.005))

    def reset(self, chance):
        self.end_step(chance)
        if chance.random() < 0.5:
            self.manager.reset_cache()
        else:
            self.manager.reset_cache_now()
        self.primary_generation += 1
        self.manager.on_reset_flushed()

    def invalidate(self, chance):
        self.end_step(chance)
        self.manager.invalidate(chance.randrange(3))
        old, self.requests = self.requests, []
        for request in old:
            for key in request.keys:
                if not self.manager.generation.has(key):
                    self.expect_error(StateError, self.manager.prepare_load, [key], request.ctx)
            self.manager.on_request_finished(request.ctx)

    def damage(self, chance):
        damage(chance, self.folder)

    def misuse(self, chance):
        """Do what no caller may: it raises, and nothing has changed."""
        manager, stranger = self.manager, ReqContext("stranger")
        key = manager.generation.key(b"never")
        calls = [
            (manager.lookup, key, stranger),
            (manager.prepare_store, [key], stranger),
            (manager.prepare_load, [key], stranger),
            (manager.on_request_finished, stranger),
        ]
        if self.requests:
            known = self.requests[0].ctx
            calls += [(manager.on_new_request, known), (manager.prepare_load, [key], known)]
            manager.lookup(key, known)  # takes in what has ended
            if manager.generation.has(b""):  # what is of another generation is only not there
                calls += [(manager.lookup, b"", known), (manager.prepare_store, [b""], known)]
        before = manager.stats()
        self.expect_error(StateError, *chance.choice(calls))
        after = self.manager.stats()
        law(
            not self.requests
            or (before.primary == after.primary and before.planner == after.planner),
            "a call that raised has changed something",
        )

    def expect_error(self, kind, call, *arguments):
        try:
            result = call(*arguments)
        except kind:
            return
        law(False, f"{call.__name__}{arguments} was misuse, and gave {result!r}")

    def observe(self, _chance):
        list(self.manager.take_events())
        self.manager.has_pending_work()
        check_sums(self.manager.stats())
        repr(self.manager)
        for request in self.requests[: self.config["explain_requests"]]:
            self.manager.explain(request.ctx.req_id)

    def heal(self, _chance):
        loop = self.spec.runtime.runner
        calm(self.manager.secondary_tiers, loop.call_soon)
        self.pass_time(0.0)

    def restart(self, chance):
        if chance.random() < 0.5:
            self.rest()
        self.close()
        self.open()

    # -- the end --------------------------------------------------------------------------------

    def rest(self):
        """End everything; then nothing is in use."""
        chance = random.Random(0)
        self.heal(chance)
        while self.loads:
            self.end_load(chance)
        while self.stores:
            self.end_store(chance)
        while self.requests:
            self.finish(chance)
        deadline_s = time.monotonic() + GRACE_S
        for turn in range(100 if self.is_virtual else 10**6):
            self.manager.on_schedule_end()
            if is_at_rest(self.manager.stats()) and not self.manager.has_pending_work():
                break
            law(turn < 99 or time.monotonic() < deadline_s, "no end of waiting")
            self.pass_time(1.0)
        else:
            law(False, f"not at rest: {self.manager.stats().primary.slots}")
        if self.is_virtual and self.config["deferral_timeout_s"] >= HEALTHY_S:
            self.look_up_on_healthy_tiers(chance)
        self.observe(chance)

    def look_up_on_healthy_tiers(self, chance):
        """Have new requests ask in each step: no deferral expires.

        The tiers do as they should, and are faster than the shortest limit: nothing else is under
        way, and a block takes them half a second at most.
        """
        expired = self.manager.stats().planner.deferrals_expired
        for _ in range(4):
            self.begin(chance)
        for _ in range(int(HEALTHY_S / HEALTHY_STEP_S)):
            waiting = []
            for request in self.requests:
                answers = self.manager.lookup_many(request.keys, request.ctx, stop_at_miss=True)
                if {LookupResult.RETRY, LookupResult.HIT_PENDING} & {*answers}:
                    waiting.append(request)
                else:
                    request.has_ended = True
                    self.manager.on_request_finished(request.ctx)
            self.requests = waiting
            self.manager.on_schedule_end()
            self.pass_time(HEALTHY_STEP_S)
        law(self.manager.stats().planner.deferrals_expired == expired, "expired on healthy tiers")
        law(not self.requests, "undecided on healthy tiers")
        self.manager.on_schedule_end()

    def close(self):
        self.rows, is_clean = None, True
        try:
            self.spec.shutdown(self.close_s)
        except OffloadError as error:
            law("tiers did not shut down" in str(error), f"shutdown: {error!r}")
            is_clean = False
        for grant in self.stores:  # copies that end after the shutdown
            self.manager.complete_store(grant.keys, grant.request.ctx, True, grant.generation)
        self.expect_error(ClosedError, self.manager.lookup, b"key", ReqContext("late"))
        stats = self.manager.stats()
        check_sums(stats)
        law(not any(tier.jobs_in_flight for tier in stats.tiers), "no result")
        if self.runner is not None:
            calm(self.manager.secondary_tiers)
            self.runner.advance(100.0)
            is_clean &= not any(tier.overdue_jobs for tier in stats.tiers)
            with nullcontext() if is_clean else suppress(LeftoverTasksError):
                self.runner.close()
