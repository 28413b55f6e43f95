"""Drives a manager as a scheduler does: a few requests at a time, step by step.

A step looks up the blocks of every request in flight, in order, up to the first that is missing. A
request with an undecided block (`RETRY`, `HIT_PENDING`) is deferred to the next step; the engine's
own deadline bounds how often. Otherwise its hits are loaded and verified, and the whole prompt is
offered for storing, so that what was found is neither evicted by what is new nor loses its rank.

A request is in flight until every job that works for it has its result. With one in flight, each
request therefore finds the engine at rest, and the figures are the same in every run.

Hits are the blocks of the contiguous head, the only ones that a prefix cache can use. A hit counts
for a tier if the tier was read for this very request, and for the primary otherwise: also where it
shares a promotion that another request has asked for, as the block was read only once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvoffload_async.cli.content import BlockContent
from kvoffload_async.cli.errors import StalledError
from kvoffload_async.cli.flight import Flight
from kvoffload_async.cli.tally import PRIMARY, Tally
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.types import LookupResult, OffloadKey

_WAIT_S = 0.1


class Driver:
    """Replays requests, `concurrency` in flight at once, in their order.

    Thread: owner.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        tier_names: Sequence[str],
        content: BlockContent,
        *,
        concurrency: int = 1,
        verify: bool = True,
        stall_timeout_s: float = 120.0,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with nothing in flight.

        Args:
            manager: Driven by nobody else.
            tier_names: What the manager's tiers are called in the tally, in their order.
            content: Fills and verifies the manager's slots.
            concurrency: Requests in flight.
            verify: Compare what is loaded, byte for byte.
            stall_timeout_s: Seconds without any progress until the replay gives up.
            should_stop: Asked before every step: whether to admit no more.
            on_step: Called after every step.
        """
        self.tally = Tally(hits=Counter(dict.fromkeys((PRIMARY, *tier_names), 0)))
        self._manager = manager
        self._engine = manager.engine
        self._tier_names = tuple(tier_names)
        self._content = content
        self._concurrency = concurrency
        self._verify = verify
        self._stall_timeout_s = stall_timeout_s
        self._should_stop = should_stop
        self._on_step = on_step
        self._active: dict[str, Flight] = {}
        self._admitted = 0
        self._seen_job_id = -1
        self._owner_ns = 0
        self._progress: tuple[int, ...] = ()
        self._progress_at_s = time.monotonic()

    def run(self, requests: Iterable[Sequence[int]]) -> None:
        """Replay until the last request has ended, or `should_stop`.

        Raises:
            StalledError: Nothing has moved for `stall_timeout_s`.
        """
        waiting = iter(requests)
        while not self._should_stop():
            is_new = self._admit(waiting)
            if not is_new:
                if not self._in_flight():
                    return
                self._wait()
            self._step()
            self._on_step()

    def drain(self, timeout_s: float) -> bool:
        """End what is in flight and step until the engine is at rest; False at the deadline."""
        for flight in self._active.values():
            self._manager.on_request_finished(flight.ctx)
        self._active.clear()
        deadline_s = time.monotonic() + timeout_s
        self._step()
        while self._manager.has_pending_work():
            if time.monotonic() > deadline_s:
                return False
            self._manager.wait_for_progress(_WAIT_S)
            self._step()
        return True

    # -- which requests are in flight -----------------------------------------------------------

    def _admit(self, waiting: Iterable[Sequence[int]]) -> bool:
        """Begin as many requests as may fly; return whether any was begun."""
        room = self._concurrency - self._in_flight()
        if room <= 0:
            return False
        first = self._admitted
        for block_ids in waiting:
            flight = Flight(self._admitted, block_ids)
            self._admitted += 1
            start_ns = time.perf_counter_ns()
            self._manager.on_new_request(flight.ctx)
            self._owner_ns += time.perf_counter_ns() - start_ns
            self._active[flight.ctx.req_id] = flight
            if self._admitted - first == room:
                break
        return self._admitted > first

    def _in_flight(self) -> int:
        """Count the requests that have not ended, and those for which a job still works."""
        jobs = self._engine.jobs
        if not jobs:
            return len(self._active) or int(self._manager.has_pending_work())
        return len(self._active.keys() | {job.req_context.req_id for _, job in jobs.values()})

    def _wait(self) -> None:
        """Wait until a tier has something to report, but not for ever."""
        self._manager.wait_for_progress(_WAIT_S)
        now_s = time.monotonic()
        counters = self._engine.counters
        progress = (counters.jobs_submitted, counters.job_results, self.tally.requests)
        if progress != self._progress:
            self._progress, self._progress_at_s = progress, now_s
        elif now_s - self._progress_at_s > self._stall_timeout_s:
            raise StalledError(
                f"no progress for {self._stall_timeout_s:g} s: {len(self._active)} requests wait "
                f"and {len(self._engine.jobs)} jobs have no result"
            )

    # -- one step -------------------------------------------------------------------------------

    def _step(self) -> None:
        ended = [req_id for req_id, flight in self._active.items() if self._advance(flight)]
        for req_id in ended:
            del self._active[req_id]
        start_ns = time.perf_counter_ns()
        self._manager.on_schedule_end()
        self._owner_ns += time.perf_counter_ns() - start_ns
        self.tally.owner_ns.append(self._owner_ns)
        self._owner_ns = 0
        self._note_promotions()

    def _advance(self, flight: Flight) -> bool:
        """Take a request as far as it goes in this step; return whether it has ended."""
        start_ns = time.perf_counter_ns()
        num_hits = self._look_up(flight)
        self._owner_ns += time.perf_counter_ns() - start_ns
        if num_hits is None:
            return False
        if num_hits:
            self._load(flight, num_hits)
        if flight.keys:
            self._store(flight)
        start_ns = time.perf_counter_ns()
        self._manager.on_request_finished(flight.ctx)
        self._owner_ns += time.perf_counter_ns() - start_ns
        self.tally.requests += 1
        self.tally.block_refs += flight.refs
        return True

    def _look_up(self, flight: Flight) -> int | None:
        """Return how many blocks are there, from the head on; None while that is undecided."""
        lookup, ctx = self._manager.lookup, flight.ctx
        hit, miss = LookupResult.HIT, LookupResult.MISS
        num_hits, is_decided = 0, True
        for key in flight.keys:
            answer = lookup(key, ctx)
            if answer is hit:
                num_hits += 1
            elif answer is miss:
                break
            else:  # go on, so that the whole prefix is asked for in one step
                is_decided = False
        return num_hits if is_decided else None

    def _load(self, flight: Flight, num_hits: int) -> None:
        keys, names = flight.keys[:num_hits], flight.names[:num_hits]
        start_ns = time.perf_counter_ns()
        spec = self._manager.prepare_load(keys, flight.ctx)
        self._owner_ns += time.perf_counter_ns() - start_ns
        self.tally.loaded_blocks += num_hits
        if self._verify:
            self.tally.verified_blocks += num_hits
            self.tally.corrupt_blocks += self._content.count_wrong(names, spec.block_ids)
        start_ns = time.perf_counter_ns()
        self._manager.complete_load(keys, flight.ctx)
        self._owner_ns += time.perf_counter_ns() - start_ns
        self._count_hits(flight, keys)

    def _store(self, flight: Flight) -> None:
        start_ns = time.perf_counter_ns()
        output = self._manager.prepare_store(flight.keys, flight.ctx)
        self._owner_ns += time.perf_counter_ns() - start_ns
        if output is None:
            self.tally.stores_refused += 1
            return
        granted = output.keys_to_store
        if not granted:
            return
        names = flight.names
        if len(granted) < len(names):
            positions = flight.ctx.key_positions
            names = names[[positions[key] - 1 for key in granted]]
        self._content.fill(names, output.store_spec.block_ids)
        self.tally.stored_blocks += len(granted)
        start_ns = time.perf_counter_ns()
        self._manager.complete_store(granted, flight.ctx)
        self._owner_ns += time.perf_counter_ns() - start_ns

    # -- where hits come from -------------------------------------------------------------------

    def _note_promotions(self) -> None:
        """Remember which tier is being read for which request: the jobs of the step that ended."""
        jobs = self._engine.jobs
        newest = self._seen_job_id
        for job_id in reversed(jobs):  # the latest first
            if job_id <= self._seen_job_id:
                break
            newest = max(newest, job_id)
            tier, job = jobs[job_id]
            flight = self._active.get(job.req_context.req_id)
            if job.is_promotion and flight is not None:
                flight.origins.update(dict.fromkeys(job.keys, self._tier_names[tier]))
        self._seen_job_id = newest

    def _count_hits(self, flight: Flight, keys: Sequence[OffloadKey]) -> None:
        hits, origins = self.tally.hits, flight.origins
        if not origins and flight.weights is None:
            hits[PRIMARY] += len(keys)
            return
        for index, key in enumerate(keys):
            hits[origins.get(key, PRIMARY)] += flight.weight(index)
