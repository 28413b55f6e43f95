"""A paged scheduler and its workers in miniature, down to the bytes, around a real adapter.

A token is a letter, and the KV of a token is the whole text up to it: reading another request's
bytes, or an old block's, shows at once. Copies happen when `perform` says so. Every worker has a
device of its own and its own column of every slot.
"""

from collections import Counter, deque

import numpy as np
from connector.sequences import TOKENS_PER_HASH, Copy, Sequence
from connector.worlds import Watched
from facade.worlds import SLOT_BYTES, World
from planner_invariants import check_quiescent

from kvoffload_async.core.invariants import check_state
from kvoffload_async.facade.connector.protocol import (
    NULL_BLOCK,
    ConnectorGeometry,
    ConnectorOutput,
    StepOutput,
)
from kvoffload_async.facade.connector.scheduler import OffloadingConnectorScheduler
from kvoffload_async.types import get_offload_block_hash, get_offload_group_idx

MAX_WORKERS = SLOT_BYTES // 8
GARBAGE = "garbage"


class Serving:
    """Everything between a request's arrival and its end."""

    def __init__(
        self, groups, *, num_blocks, num_slots, tiers=(), num_workers=1, limits=None, **options
    ):
        self.groups = groups
        self.num_workers = num_workers
        self.world = World(*tiers, num_slots=num_slots, **(limits or {}))
        self.manager = Watched(self.world.manager)
        self.geometry = ConnectorGeometry(
            groups, TOKENS_PER_HASH, num_workers=num_workers, **options
        )
        self.connector = OffloadingConnectorScheduler(self.manager, self.geometry)
        self.host = self.world.rows.view(np.int64)  # [num_slots, MAX_WORKERS]: numbers of contents
        self.contents = [GARBAGE]
        self.numbers = {GARBAGE: 0}
        self.devices = [{} for _ in range(num_workers)]
        self.free = list(range(num_blocks, 0, -1))
        self.waiting = deque()
        self.running = []
        self.loading = {}
        self.resumed = set()
        self.copies = []
        self.deferred = []
        self.reports = Counter()
        self.known = set()
        self.last_ended = None
        self.tally = Counter()

    # -- requests -------------------------------------------------------------------------------

    def arrive(self, text, max_tokens=2, *, reuses=False):
        """Begin a request; with `reuses`, under the id of the last one that has ended."""
        req_id = f"r{len(self.known)}"
        live = {request.request_id for request in self.live}
        if reuses and self.last_ended is not None and self.last_ended not in live:
            req_id = self.last_ended
            self.tally["reused"] += 1
        request = Sequence(req_id, text, len(text), len(text) + max_tokens)
        self.known.add(request.request_id)
        self.waiting.append(request)
        return request

    @property
    def live(self):
        return [*self.waiting, *self.running, *self.loading]

    def finish(self, request):
        request.ended = True
        self.last_ended = request.request_id
        assert self.connector.request_finished(request) == (False, None)
        if request in self.loading:
            return  # its blocks stay its own until the load has ended
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self._free_all(request)

    def _free_all(self, request):
        for table in request.tables:
            self.free.extend(b for b in reversed(table) if b != NULL_BLOCK)
        request.tables = []

    def _preempt(self, request):
        self.running.remove(request)
        self._free_all(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        self.tally["preempted"] += 1
        return request.request_id

    # -- a step ---------------------------------------------------------------------------------

    def step(self, budget=4, *, preempts=False, admits=2, declines=False, reverses=False):
        preempted = [self._preempt(self.running[-1])] if preempts and self.running else []
        scheduled, new_blocks, tables = {}, {}, {}
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for another one
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            grown = self._grow(request, request.num_computed_tokens + count)
            while grown is None and self.running[-1] is not request:
                victim = self._preempt(self.running[-1])
                preempted.append(victim)
                grown = self._grow(request, request.num_computed_tokens + count)
            if grown is None:
                preempted.append(self._preempt(request))
                continue
            scheduled[request] = count
            if request.request_id in self.resumed:
                tables[request.request_id] = [list(t) for t in request.tables]
            else:
                new_blocks[request.request_id] = grown
        for request in list(self.waiting)[:admits]:
            self._admit(request, budget, scheduled, tables, declines=declines)
        self.resumed.clear()
        meta = self.connector.build_connector_meta(
            StepOutput(
                {request.request_id: count for request, count in scheduled.items()},
                new_blocks,
                tables,
                preempted,
            )
        )
        assert self.manager.calls[-1] == "on_schedule_end"
        self._run_workers(meta, scheduled, reverses=reverses)
        self.world.runner.run_ready()
        for request, count in scheduled.items():
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                # What is sampled depends on the text alone, so that outputs are shared, too.
                request.text += "xyz"[len(request.text) % 3]
            if request.num_tokens >= request.max_tokens:
                self.finish(request)
        self.check()

    def _admit(self, request, budget, scheduled, tables, *, declines):
        tokens, waits = self.connector.get_num_new_matched_tokens(request, 0)
        if tokens is None:
            return
        if declines:
            tokens = 0  # another source would have provided them
        total = tokens or min(budget, request.num_tokens)
        request.tables = [[] for _ in self.groups]
        if self._grow(request, total, computed=tokens) is None:
            self._free_all(request)
            return
        self.connector.update_state_after_alloc(request, request.tables, tokens)
        self.waiting.remove(request)
        request.num_computed_tokens = tokens
        if tokens:
            assert waits
            self.loading[request] = None
            self.tally["loaded"] += tokens
            return
        self.running.append(request)
        scheduled[request] = total
        tables[request.request_id] = [list(table) for table in request.tables]

    def _grow(self, request, total, computed=None):
        """Give a request blocks for `total` tokens; None if there are not enough."""
        computed = request.num_computed_tokens if computed is None else computed
        self._slide(request, computed)
        wanted = []
        for group, table in zip(self.groups, request.tables, strict=True):
            count = -(-total // group.tokens_per_block)
            wanted.append([self._is_past(group, i, computed) for i in range(len(table), count)])
        if sum(past is False for row in wanted for past in row) > len(self.free):
            return None
        grown = [[NULL_BLOCK if past else self.free.pop() for past in row] for row in wanted]
        for table, row in zip(request.tables, grown, strict=True):
            table.extend(row)
        return grown

    def _is_past(self, group, index, computed):
        window = group.sliding_window_tokens
        return window is not None and (index + 1) * group.tokens_per_block <= computed - window + 1

    def _slide(self, request, computed):
        for group, table in zip(self.groups, request.tables, strict=True):
            for index, block in enumerate(table):
                if block != NULL_BLOCK and self._is_past(group, index, computed):
                    self.free.append(block)
                    table[index] = NULL_BLOCK
                    self.tally["slid"] += 1

    # -- the workers ----------------------------------------------------------------------------

    def _run_workers(self, meta, scheduled, *, reverses):
        workers = range(self.num_workers)
        stores = [Copy(w, i, job, True) for i, job in meta.store_jobs.items() for w in workers]
        self.copies += self.deferred
        self.copies += [copy for copy in stores if copy.job_id in meta.jobs_to_flush]
        self.deferred = [copy for copy in stores if copy.job_id not in meta.jobs_to_flush]
        flushed = [c for c in self.copies if c.job_id in meta.jobs_to_flush and c.outcome is None]
        for copy in reversed(flushed) if reverses else flushed:
            self.perform(copy)
            self.tally["flushed"] += 1
        for job_id, job in meta.load_jobs.items():
            self.copies += [Copy(w, job_id, job, False) for w in workers]
            (request,) = [r for r in self.loading if r.request_id == job.req_id]
            self.loading[request] = job_id
            for block in job.device.block_ids.tolist():
                self._overwrite(block)
        for request, count in scheduled.items():
            self._compute(request, count)

    def _overwrite(self, block):
        """P18: somebody writes a block from now on; nothing unfinished may read it."""
        for copy in self.copies:
            assert copy.outcome is not None or not copy.is_store or block not in copy.blocks

    def _compute(self, request, count):
        start = request.num_computed_tokens
        for index, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            size, window = group.tokens_per_block, group.sliding_window_tokens
            first = 0 if window is None else max(0, start - window + 1)
            for device in self.devices:
                for at in range(first, start):
                    seen = device[table[at // size]].get(at % size)
                    assert seen == (index, request.text[: at + 1]), "bytes of somebody else"
            for at in range(start, start + count):
                block = table[at // size]
                self._overwrite(block)
                for device in self.devices:
                    cells = device.setdefault(block, {})
                    cells[at % size] = (index, request.text[: at + 1])

    def perform(self, copy, *, success=True):
        """Let a copy happen now; one that fails leaves garbage where it wrote."""
        assert copy.outcome is None
        copy.outcome = success
        blocks = iter(copy.blocks)
        slots = iter(copy.job.host.block_ids.tolist())
        per_chunk = self.geometry.blocks_per_chunk
        device = self.devices[copy.worker]
        spec = copy.job.device
        groups = zip(self.groups, spec.group_sizes, spec.block_indices, strict=True)
        for group, size, first in groups:
            tokens = group.tokens_per_block
            chunks = {}
            for logical in range(first, first + size):
                chunks.setdefault(logical // per_chunk, []).append((logical, next(blocks)))
            for pieces in chunks.values():
                slot = next(slots)
                if copy.is_store:
                    content = tuple(self._cells(device, b, tokens) for _, b in pieces)
                    self.host[slot, copy.worker] = self._number(content) if success else 0
                    continue
                content = self.contents[self.host[slot, copy.worker]]
                for logical, block in pieces:
                    good = success and content != GARBAGE
                    device[block] = dict(content[logical % per_chunk]) if good else {}
        assert next(slots, None) is None

    def _cells(self, device, block, tokens):
        return tuple((at, device[block].get(at)) for at in range(tokens))

    def _number(self, content):
        if content not in self.numbers:
            self.numbers[content] = len(self.contents)
            self.contents.append(content)
        return self.numbers[content]

    def number_of(self, key):
        """Return the number of what a block must have in it."""
        return self._number(self._expected(key))

    def report(self, *copies):
        """Tell the adapter, and the scheduler, that copies have ended."""
        completed = Counter(copy.job_id for copy in copies)
        failed = {copy.job_id for copy in copies if not copy.outcome}
        self.connector.update_connector_output(ConnectorOutput(completed, failed))
        for copy in copies:
            self.copies.remove(copy)
            self.reports[copy.job_id] += 1
        invalid = self.connector.take_invalid_blocks()
        for request, job_id in list(self.loading.items()):
            if self.reports[job_id] == self.num_workers:
                del self.loading[request]
                self._loaded(request, invalid)
        self.check()

    def _loaded(self, request, invalid):
        if request.ended:
            assert invalid.isdisjoint(b for table in request.tables for b in table)
            self._free_all(request)
            return
        if any(block in invalid for table in request.tables for block in table):
            self.tally["invalid"] += 1
            request.num_computed_tokens = 0
            if any(group.sliding_window_tokens for group in self.groups):
                self._free_all(request)  # the window's blocks are not there to compute into
                self.waiting.appendleft(request)
                return
        self.running.append(request)
        self.resumed.add(request.request_id)

    # -- invariants -----------------------------------------------------------------------------

    def check(self):
        check_state(self.world.manager.planner)
        self.manager.check(self.connector)
        owned = [b for r in self.live for table in r.tables for b in table if b != NULL_BLOCK]
        assert len(set(owned) | set(self.free)) == len(owned) + len(self.free)
        if self.copies or self.deferred:
            assert self.connector.has_pending_push_work()
        for key, slot, refs in self.world.primary.core.resident():
            if refs >= 0:
                for worker in range(self.num_workers):
                    number = self.host[slot, worker]
                    assert self.contents[number] == self._expected(key), f"wrong bytes of {key!r}"

    def _expected(self, key):
        group = get_offload_group_idx(key)
        text = get_offload_block_hash(key).decode()
        size = self.groups[group].tokens_per_block
        start = len(text) - self.geometry.tokens_per_chunk(group)
        return tuple(
            tuple((at, (group, text[: first + at + 1])) for at in range(size))
            for first in range(start, len(text), size)
        )

    def run_until(self, is_at_rest, seconds=0.1, max_steps=400):
        """Let everything that can end do so, step by step, each of which takes some seconds.

        A request that is first in line for room, and is not asked for, delays the others a moment.
        """
        planner = self.world.manager.planner
        for _ in range(max_steps):
            self.world.settle_all()  # before any deadline passes
            self.world.runner.advance(planner.cascades.wakes_in_s(planner.now_s) or seconds)
            self.world.settle_all()
            for copy in self.copies:
                if copy.outcome is None:
                    self.perform(copy)
            self.report(*self.copies)
            if not self.live and is_at_rest():
                return
            self.step()
        raise AssertionError(f"not at rest: {self.live}")

    def rest(self):
        """Let everything that is still there run to its end, which it must reach."""
        self.world.hung = None
        planner = self.world.manager.planner
        self.run_until(lambda: not (planner.orphaned or self.connector.has_pending_push_work()))
        assert not self.connector._requests
        assert not len(self.connector._jobs)
        assert self.world.counts["pinned"] == self.world.counts["writing"] == 0
        check_quiescent(planner)
        opened, ended = (
            Counter(ctx for name, ctx in self.manager.contexts if name == hook)
            for hook in ("on_new_request", "on_request_finished")
        )
        assert opened == ended
        assert set(opened.values()) <= {1}

    def end(self):
        self.host = None
        self.world.end()
