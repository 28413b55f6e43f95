"""A scheduler and its tiers around the real planner; whatever may happen is an action.

Time passes only in steps. A state is described by all that may influence what happens next, so two
paths that end in the same description go on alike; `exploration` checks that.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import Any

from core.terms import k, ranked
from core.tiers import NativeTier
from core.world import DOWN, NEVER_OPENS

from kvoffload_async.abc.events import CallEnded, JobFinished, JobOverdue
from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.cascades import RecentKeys
from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.ledger import CallTier, JobState, Ledger, StartProbe
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import TURN_S
from kvoffload_async.errors import BlockMissingError, TierTimeoutError
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext

HIT, MISS = LookupResult.HIT, LookupResult.MISS

Action = tuple[Any, ...]
"""What happens: its kind, and whom it happens to."""


@dataclass(frozen=True)
class Setting:
    """What is explored.

    Attributes:
        slots: Slots of the primary.
        runs: The blocks of each request's prompt, one letter each.
        below: Tier -> blocks that it has at the start.
        stores: The blocks of each store; it is offered again when they are gone.
        tiers: Number of tiers.
        hung: Tiers of which no copy and no probe need ever end before its deadline.
        kinds: What is known of a tier; see `core.world`.
        drops: Whether pending blocks are evicted when no others are left.
        failures: Number of copies and writes that fail.
        resets: Number of resets.
        deletes: The blocks of each deletion, which may begin once, at all places.
        cancels: Requests that may end while they wait.
        idle: Requests that may not be scheduled although their lookups are decided.
        again: Whether a request may come again.
        has_positions: Whether requests know the order of their blocks; if not, they ask one by one.
        stores_first: Whether stores come between a step's lookups and its loads.
        takes_prefix: Whether a store may be granted in part.
        copies: Most blocks in copies to a tier; None: as the planner has it.
        ahead: Requests that are queued when they come: their blocks are promoted ahead.
        early: Blocks that early tickets may name together.
        early_s: After how many seconds an early ticket ends.
        writes_back: Whether stored blocks go to the tiers.
        victims: Which block goes first: that of the "first" or "last" letter, or the "oldest".
        step_s: Seconds of a step.
    """

    slots: int
    runs: tuple[str, ...]
    below: Mapping[int, str]
    stores: tuple[str, ...] = ()
    tiers: int = 1
    hung: frozenset[int] = frozenset()
    kinds: Mapping[int, str] = field(default_factory=dict)
    drops: bool = False
    failures: int = 0
    resets: int = 0
    deletes: tuple[str, ...] = ()
    cancels: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    again: bool = True
    has_positions: bool = True
    stores_first: bool = False
    takes_prefix: bool = False
    copies: int | None = None
    ahead: frozenset[int] = frozenset()
    early: int = 0
    early_s: float = math.inf
    writes_back: bool = True
    victims: str = "first"
    step_s: float = 0.75 * TURN_S


class ByLetter(CachePolicy):
    """Evicts blocks in the order of their keys: a history would be part of states."""

    name = "by letter"

    def __init__(self, capacity_blocks: int, *, reverse: bool) -> None:
        super().__init__(capacity_blocks)
        self._keys: dict[int, OffloadKey] = {}
        self._reverse = reverse

    def make_room(self, incoming, count, is_evictable):
        victims = [slot for slot in self.resident() if is_evictable(slot)][:count]
        if len(victims) < count:
            return None
        self.discard(victims)
        return victims

    def admit(self, keys, slots):
        self._keys.update(zip(slots, keys, strict=True))

    def access(self, slots, reused):
        pass

    def discard(self, slots):
        for slot in slots:
            del self._keys[slot]

    def clear(self):
        self._keys.clear()

    def resident(self):
        return sorted(self._keys, key=self._keys.__getitem__, reverse=self._reverse)


class _EveryUse(RecentKeys):
    """Has every use reported: when a block was last used would be part of states."""

    def admitted(self, keys, now_s):
        return list(keys)


class Host:
    """One run: the planner, its tiers, the requests and the stores of a scheduler."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        policy = LruPolicy(setting.slots)
        if setting.victims != "oldest":
            policy = ByLetter(setting.slots, reverse=setting.victims == "last")
        self.primary = Primary(setting.slots, policy, accept_prefix=setting.takes_prefix)
        self.primary.drops_pending = setting.drops
        letters = sorted({*"".join([*setting.runs, *setting.stores, *setting.below.values()])})
        self.names = {k(letter): letter for letter in letters}
        self.tiers = [
            NativeTier(f"tier{i}", kind=setting.kinds.get(i, "exact"), breaker=NEVER_OPENS)
            for i in range(setting.tiers)
        ]
        for index, blocks in setting.below.items():
            if setting.kinds.get(index, "exact") == "exact":
                self.tiers[index].fill([k(letter) for letter in blocks])
            else:
                self.tiers[index].contents.update((k(letter), letter) for letter in blocks)
        self.planner = Planner(self.primary, [tier.state for tier in self.tiers], float("inf"))
        self.planner._touches._recent = [_EveryUse()] * len(self.tiers)
        self.planner.room.copies_each = setting.copies or self.planner.room.copies_each
        self.planner.room.most_early, self.planner.room.early_s = setting.early, setting.early_s
        self._see_whole_grants()
        if not setting.writes_back:
            self.planner.cascades.defer = lambda index, keys: 0
            self.planner.cascades.send = lambda *_, **_options: None
        self.now_s = 0.0
        self.failures, self.resets = setting.failures, setting.resets
        self.deletes = frozenset(range(len(setting.deletes)))
        """The deletions that may still begin."""
        self.calls: list[dict[int, tuple[OffloadKey, ...]]] = [{} for _ in self.tiers]
        """Tier -> its calls that delete blocks, and these blocks."""
        self.requests: list[ReqContext | None] = [None] * len(setting.runs)
        self.loads: dict[int, tuple[list[OffloadKey], int]] = {}
        """Request -> blocks that it loads, and the generation of the grant."""
        self.stores = [self._begin(name) for name in setting.stores]
        self.writes: dict[int, tuple[list[OffloadKey], int]] = {}
        """Store -> blocks that it writes, and the generation of the grant."""
        self.refused: list[str] = []
        """Violations of the law that the last action has shown."""
        for number in range(len(setting.runs)):
            self._come(number)

    # -- what may happen ------------------------------------------------------------------------

    def waits(self, number: int) -> bool:
        """Return whether a request asks and has not been scheduled."""
        return self.requests[number] is not None and number not in self.loads

    def wanting(self) -> list[int]:
        """Return the stores that may be offered now."""
        resident = {key for key, _, _ in self.primary.resident()}
        return [
            number
            for number, blocks in enumerate(self.setting.stores)
            if number not in self.writes and not any(k(letter) in resident for letter in blocks)
        ]

    def actions(self) -> list[Action]:
        """Return what may happen next."""
        return [*self._steps(), *self._ends(), *self._rest()]

    def _steps(self) -> Iterator[Action]:
        waiting = [number for number in range(len(self.requests)) if self.waits(number)]
        wanting = self.wanting()
        for askers, offers in product(subsets(waiting), subsets(wanting)):
            if not (askers or offers) and (waiting or wanting):
                continue  # a scheduler that has nothing to do makes no step
            for idle in subsets([number for number in askers if number in self.setting.idle]):
                yield "step", askers, offers, idle

    def _ends(self) -> Iterator[Action]:
        for index, tier in enumerate(self.tiers):
            yield from self._ends_of_copies(index, tier.state.jobs)
            if tier.probes:
                yield "answered", index
                if index in self.setting.hung:
                    yield "unanswered", index
            moving = [*tier.state.jobs.unreported(), *(r.job for r in tier.state.jobs.orphaned())]
            for keys in self.calls[index].values():
                if all(set(keys).isdisjoint(job.keys) for job in moving):
                    yield "deleted", (index, self._letters(keys))
        for number in self.writes:
            yield "written", number
            if self.failures:
                yield "lost", number
        for number in self.loads:
            yield "loaded", number

    def _ends_of_copies(self, index: int, jobs: Ledger) -> Iterator[Action]:
        for job in map(jobs.job_of, jobs.ids_in(JobState.FLYING)):
            what = index, job.is_promotion, self._letters(job.keys)
            yield "ends", what
            if index in self.setting.hung:
                yield "overdue", what
            if self.failures:
                yield "fails", what
                if job.is_promotion and len(job.keys) > 1:
                    yield "fails in part", what
        for job in map(jobs.job_of, jobs.ids_in(JobState.ORPHANED)):
            yield "late", (index, job.is_promotion, self._letters(job.keys))

    def _rest(self) -> Iterator[Action]:
        for number, ctx in enumerate(self.requests):
            if ctx is None and self.setting.again:
                yield "again", number
            elif number in self.setting.cancels and self.waits(number):
                yield "cancel", number
        for number in self.deletes:
            yield "delete", number
        if self.planner.promotions_paused:
            yield ("flushed",)
        elif self.resets and not self.planner.jobs:
            yield ("reset",)

    def queued(self) -> list[int]:
        """Return the requests that wait for a ticket."""
        requests = map(self.planner.requests.get, self.requests)
        return [n for n, request in enumerate(requests) if request and request.is_queued]

    def is_due(self, action: Action, *, has_deadlines: bool) -> tuple[str, Any] | None:
        """Return what ends with an action that happens some day; None for any other action."""
        match action:
            case ("ends" | "fails" | "fails in part" | "late", what):
                due = "copy", what, what[0] not in self.setting.hung
            case ("overdue", what):
                due = "copy", what, has_deadlines
            case ("answered", index):
                due = "probe", index, index not in self.setting.hung
            case ("unanswered", index):
                due = "probe", index, has_deadlines
            case ("deleted", what):
                due = "call", what, True
            case ("written" | "lost", number):
                due = "write", number, True
            case ("loaded", number):
                due = "load", number, True
            case ("flushed",):
                due = "reset", None, True
            case _:
                return None
        return due[:2] if due[2] else None

    def do(self, action: Action) -> None:
        """Let something happen."""
        self.refused = []
        match action:
            case ("step", askers, offers, idle):
                self._step(askers, offers, idle)
            case ("ends" | "fails" | "fails in part" | "overdue" | "late" as how, what):
                self._end(how, *what)
            case ("answered" | "unanswered" as how, index):
                error = TierTimeoutError("scripted") if how == "unanswered" else None
                self.tiers[index].answer_probes(error)
            case ("written" | "lost" as how, number):
                self._write_ended(number, success=how == "written")
            case ("loaded", number):
                self._loaded(number)
            case ("delete" | "deleted" as how, what):
                self._delete(what) if how == "delete" else self._deleted(*what)
            case ("again" | "cancel" as how, number):
                self._come(number) if how == "again" else self._go(number)
            case ("reset",):
                self.resets -= 1
                self.planner.reset_cache()
            case ("flushed",):
                self._flush()
        self._launch()

    # -- steps ----------------------------------------------------------------------------------

    def _step(self, askers, offers, idle):
        self.now_s += self.setting.step_s
        self.planner.begin_step(self.now_s)
        self.planner.collect()
        found = {number: self._ask(number) for number in askers}
        if self.setting.stores_first:
            self._offer(offers)
        for number, count in found.items():
            self._check_absent(number, count)
            if count is not None and number not in idle:
                self._schedule(number, count)
        if not self.setting.stores_first:
            self._offer(offers)
        self.planner.end_step()
        for tier in self.tiers:
            tier.state.end_step()
        self._check_named_end()

    def _ask(self, number: int) -> int | None:
        """Look up a request's blocks; return the number of leading hits, None if undecided."""
        ctx, keys = self.requests[number], [k(letter) for letter in self.setting.runs[number]]
        request = self.planner.requests[ctx]
        landed = [] if request.awaits else list(request.ticket)
        if self.setting.has_positions:
            count, is_deferred = self.planner.lookup_prefix(keys, ctx)
            lost = not is_deferred and landed[count:]
        else:
            answers = {key: self.planner.lookup(key, ctx) for key in keys}
            is_deferred = not {*answers.values()} <= {HIT, MISS}
            count = next((i for i, key in enumerate(keys) if answers[key] is not HIT), len(keys))
            lost = [key for key in landed if answers[key] is not HIT]
        if lost and lost[0] not in self.primary.barred:
            self.refused.append(f"request {number} has a ticket for {self._letters(lost)}: no hit")
        return None if is_deferred else count

    def _check_absent(self, number, count):
        """No look-up finds a block that is being deleted."""
        found = self.setting.runs[number][: count or 0]
        for deletion in self.planner.deletions.running:
            if lost := [letter for letter in found if k(letter) in deletion.keys]:
                self.refused.append(f"request {number} finds {lost}, which is being deleted")

    def _schedule(self, number, count):
        ctx, keys = self.requests[number], [k(letter) for letter in self.setting.runs[number]]
        if not count:
            self.planner.on_request_scheduled(ctx)
            self._go(number)
            return
        self.planner.prepare_load(keys[:count], ctx)
        self.loads[number] = keys[:count], self.primary.generation

    def _offer(self, offers):
        for number in offers:
            keys = [k(letter) for letter in self.setting.stores[number]]
            room, left = self.planner.room, self.planner.room.reserved - self._num_stored()
            granted = self.planner.prepare_store(keys, self.stores[number])
            if granted is None and room.early:
                self.refused.append(f"store {number} finds no room beside early tickets")
            if granted is None and len(keys) <= min(left, self.primary.room):
                self.refused.append(f"store {number} gets less than what is left to stores")
            if granted is not None and granted.keys_to_store:
                self.writes[number] = list(granted.keys_to_store), self.primary.generation
                if left <= 0 and not self._leaves_room():
                    self.refused.append(f"store {number} takes what the queue's head needs")

    def _leaves_room(self):
        """Return whether the run of the queue's head fits."""
        room = self.planner.room
        run = [key for head in list(room.queue)[:1] for key in head.wants][: room.budget]
        absent = [key for key in run if self.primary.lookup(key) is MISS]
        readable = [key for key in run if self.primary.lookup(key) is HIT]
        return len(absent) <= self.primary.room_excluding(self._share, readable)

    def _num_stored(self):
        """Return the number of blocks that are being stored, or not yet in all tiers."""
        waiting = zip(self.planner.tiers, self.planner.cascades.queues, strict=True)
        return self.primary.stored_now + sum(t.cascading_blocks + q.count for t, q in waiting)

    def _check_named_end(self):
        """Whoever waits for room waits for something that ends."""
        room = self.planner.room
        for key in room._holders:
            if key in self.primary.barred:
                self.refused.append(f"a ticket names {self.names[key]}, which is being deleted")
        if not room.queue or self.loads or self.writes or room.named:
            return
        if self.planner.jobs or self.planner.orphaned:
            return
        waiting = zip(self.planner.tiers, self.planner.cascades.queues, strict=True)
        if self.setting.drops or not any(t.wants_blocks and queue.count for t, queue in waiting):
            self.refused.append("the head of the queue waits without a named end")

    def _see_whole_grants(self):
        """See that a ticket is granted for the whole leading run, up to what it may name.

        Unless nobody else has a ticket, and the request has waited in vain for longer than a turn.
        """
        room, grant = self.planner.room, self.planner.room._grant

        def seen(request, run, absent, *, is_early=False):
            if is_early and room.queue:
                self.refused.append("a request is promoted ahead although another waits")
            elif is_early:
                return grant(request, run, absent, is_early=True)
            if len(run) < min(len(request.wants), room.budget) and request.blocked_since_s is None:
                key = list(request.wants)[len(run)]
                is_there = self.primary.lookup(key) is not MISS
                if is_there or self.planner.search.find([key], request, self.now_s) != [None]:
                    self.refused.append(f"a ticket is granted without {self.names[key]}")
            return grant(request, run, absent)

        room._grant = seen

    # -- ends -----------------------------------------------------------------------------------

    def _end(self, how, index, is_promotion, letters):
        tier = self.tiers[index]
        states = (JobState.ORPHANED,) if how == "late" else (JobState.FLYING,)
        jobs = map(tier.state.jobs.job_of, tier.state.jobs.ids_in(*states))
        job = next(
            job
            for job in jobs
            if job.is_promotion == is_promotion and self._letters(job.keys) == letters
        )
        self.failures -= how.startswith("fails")
        is_early = job.job_id in tier.state.prefetches
        failed = [set(request.failed) for request in self.planner.requests.values()]
        match how:
            case "overdue":
                event = JobOverdue(job.job_id, TierTimeoutError("scripted"))
            case "fails":
                event = JobFinished(job.job_id, job_error=DOWN)
            case "fails in part":
                event = JobFinished(job.job_id, {0: BlockMissingError("scripted")})
                tier.contents.pop(job.keys[0], None)
            case _:
                event = JobFinished(job.job_id)
                if not is_promotion:
                    tier.contents.update((key, self.names[key]) for key in job.keys)
        tier.state.handle(event)
        self.planner.collect()
        requests = self.planner.requests.values()
        if is_early and failed != [request.failed for request in requests]:
            self.refused.append("the failure of a prefetch is held against a request")

    def _delete(self, number):
        self.deletes -= {number}
        keys = [k(letter) for letter in self.setting.deletes[number]]
        self.planner.delete(keys, range(len(self.tiers)))

    def _deleted(self, index, letters):
        calls = self.calls[index]
        call_id = next(one for one, keys in calls.items() if self._letters(keys) == letters)
        keys = calls.pop(call_id)
        for key in keys:
            self.tiers[index].contents.pop(key, None)
        self.tiers[index].state.handle(CallEnded(call_id, "delete", frozenset(keys)))
        self.planner.collect()

    def _write_ended(self, number, *, success):
        keys, generation = self.writes.pop(number)
        self.failures -= not success
        ctx = self.stores[number]
        self.planner.complete_store(keys, ctx, success=success, generation=generation)
        self.planner.on_request_finished(ctx)
        self.stores[number] = self._begin(self.setting.stores[number])

    def _loaded(self, number):
        keys, generation = self.loads.pop(number)
        self.planner.complete_load(keys, self.requests[number], generation)
        self._go(number)

    def _flush(self):
        for number in [n for n, (_, of) in self.writes.items() if of != self.primary.generation]:
            self._write_ended(number, success=True)
        for number in [n for n, (_, of) in self.loads.items() if of != self.primary.generation]:
            self._loaded(number)
        self.planner.reset_flushed()

    def _launch(self):
        for tier in self.tiers:
            for effect in tier.state.take_effects():
                if isinstance(effect, StartProbe):
                    tier.ask(effect)
                elif isinstance(effect, CallTier):
                    self.calls[self.tiers.index(tier)][effect.call_id] = effect.keys

    # -- requests -------------------------------------------------------------------------------

    def _begin(self, name, **fields):
        ctx = ReqContext(name, **fields)
        self.planner.on_new_request(ctx)
        return ctx

    def _come(self, number):
        run = self.setting.runs[number]
        positions = {k(letter): i for i, letter in enumerate(run)}
        fields = {"key_positions": positions} if self.setting.has_positions else {}
        self.requests[number] = self._begin(str(number), **fields)
        if number in self.setting.ahead:
            self.planner.prefetch([*positions], self.requests[number])

    def _go(self, number):
        self.planner.on_request_finished(self.requests[number])
        self.requests[number] = None

    # -- states ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the state; raises an AssertionError or an InvariantError."""
        assert not self.refused, self.refused
        check_state(self.planner)

    def state(self) -> Action:
        """Return all that may influence what happens next."""
        requests = [self._request(ctx) for ctx in self.requests]
        return (
            tuple(requests),
            self._copies(self.loads),
            self._copies(self.writes),
            self._blocks(),
            tuple(self._tier(index) for index in range(len(self.tiers))),
            self._room(),
            tuple(map(self._letters, self.planner._touches.used)),
            (self.failures, self.resets, self.planner.promotions_paused),
            self._deletions(),
        )

    def _deletions(self):
        deletions = self.planner.deletions
        return (
            self.deletes,
            tuple(
                (
                    self._letters(sorted(each.keys)),
                    each.has_rest,
                    each.in_use,
                    tuple(each.left.values()),
                )
                for each in deletions.running
            ),
            tuple(self._letters([key]) for _, key in deletions._in_use),
            deletions._num_again,
            tuple(
                tuple(self._letters(keys) for _, keys in queue.waiting)
                for queue in deletions._queues
            ),
            tuple(frozenset(map(self._letters, calls.values())) for calls in self.calls),
        )

    def _copies(self, copies):
        current = self.primary.generation
        return tuple(
            (number, self._letters(keys), generation == current)
            for number, (keys, generation) in sorted(copies.items())
        )

    def _letters(self, keys):
        return "".join([self.names[key] for key in keys])

    def _age(self, since_s: float | None, now_s: float | None = None) -> int | None:
        """Return how long ago something was, in steps; all that is longer than a turn is alike."""
        if since_s is None:
            return None
        steps = ((self.planner.now_s if now_s is None else now_s) - since_s) / self.setting.step_s
        return min(round(steps), int(TURN_S / self.setting.step_s) + 1)

    def _request(self, ctx):
        if ctx is None:
            return None
        request = self.planner.requests[ctx]
        failed = sorted((tier, self.names[key]) for tier, key in request.failed)
        lacking = sorted(
            (tier, *sorted(map(self.names.get, keys)))
            for tier, keys in request.lacking.items()
            if keys
        )
        return (
            self._letters(request.wants) if request.ticket or request.is_queued else None,
            tuple((self.names[key], new) for key, new in request.ticket.items()),
            request.awaits,
            request.is_queued,
            request.waits,
            request.is_refused,
            self._age(request.asked_at_s) if request.is_queued else None,
            self._age(request.blocked_since_s),
            tuple(failed),
            tuple(lacking),
            self._letters(sorted(request.again)),
            request in self.planner.prefetcher.queued,
            self._early(request),
        )

    def _early(self, request):
        """Return what matters of a request's early ticket."""
        granted = self.planner.room.early.get(request)
        if granted is None:
            return None
        since_s, new = granted
        return self._since(since_s) if self.setting.early_s < math.inf else 0, new, request.is_cut

    def _since(self, since_s):
        return round((self.planner.now_s - since_s) / self.setting.step_s)

    def _blocks(self):
        primary = self.primary
        debts = primary.debts()
        blocks = [
            (self.names[key], pins, debts.get(slot, 0)) for key, slot, pins in primary.resident()
        ]
        order = self._letters(ranked(primary)) if self.setting.victims == "oldest" else None
        return tuple(sorted(blocks)), order

    def _tier(self, index):
        tier, queue = self.tiers[index], self.planner.cascades.queues[index]
        state = tier.state
        jobs = [(job, False) for job in state.jobs.unreported()]
        jobs += [(record.job, record.holds_slots) for record in state.jobs.orphaned()]
        whose = {ctx: number for number, ctx in enumerate(self.requests) if ctx is not None}
        paused_s = queue.paused_until_s - self.planner.now_s
        return (
            frozenset(
                (
                    self._letters(job.keys),
                    job.is_promotion and whose.get(job.req_context, -1),
                    job.is_promotion,
                    holds,
                    state.jobs.state_of(job.job_id),
                )
                for job, holds in jobs
            ),
            self._letters(self.primary.keys_of(tuple(queue.slots()))),
            tuple(
                sorted(
                    (self.names[key], queue._marks[slot])
                    for key, slot, _ in self.primary.resident()
                )
            ),
            (queue.is_shut, queue.is_wanted, queue.protecting_from),
            (max(0.0, paused_s), queue._pause_s),
            state.is_silent,
            bool(jobs) and self._age(state._quiet_since_s),
            frozenset(self._letters(job.keys) for job, _ in jobs if job.job_id in state.prefetches),
            max(0.0, state._prefetches_from_s - self.planner.now_s),
            "".join(sorted(map(self.names.__getitem__, tier.contents))),
            tuple(state.index.peek(tuple(self.names))),
            self._asked(state.index, whose),
            tuple(map(self._letters, tier.probes.values())),
        )

    def _asked(self, index, whose):
        """Return whose questions keep the answers of probes."""
        asked = getattr(index, "_by_request", {})
        return tuple((whose.get(ctx), self._letters(sorted(keys))) for ctx, keys in asked.items())

    @property
    def _share(self):
        return self.primary.shares[0]

    def _room(self):
        room = self.planner.room
        number_of = {self.planner.requests[ctx]: n for n, ctx in enumerate(self.requests) if ctx}
        prefetcher = self.planner.prefetcher
        next_ahead = next(iter(prefetcher.queued), None)
        ahead_blocked = (next_ahead, room.left_early, self.primary.room_made)
        head = next(iter(room.queue), None)
        blocked = (head, room._version, self.primary.room_made)
        return (
            tuple(number_of[request] for request in room.queue),
            tuple(
                (number_of[request], self._age(since_s, room._contended_s))
                for request, since_s in room._landed.items()
            ),
            room._is_contended,
            room._is_store_refused,
            self._age(room._searched_s[self._share]),
            room._blocked_at.get(self._share) == blocked if head else None,
            room._head_needs.get(self._share) if head else None,
            tuple(number_of[request] for request in prefetcher.queued),
            tuple(number_of[request] for request in room.early),
            prefetcher._blocked_at == ahead_blocked if next_ahead else None,
        )


def subsets(of: list[int]) -> list[tuple[int, ...]]:
    """Return all subsets of a list, in its order."""
    return list(chain.from_iterable(combinations(of, size) for size in range(len(of) + 1)))
