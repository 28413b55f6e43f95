"""A paged scheduler and its workers in miniature, down to the bytes, around a real adapter.

A token is a letter, and the KV of a token is the whole text up to it: reading another request's
bytes, or an old block's, shows at once. Copies happen when `perform` says so. Every worker has a
device of its own and its own column of every slot.

The scheduler may keep device blocks before a sliding window (`lag` tokens) and may cache prefixes
on the device: "filled" blocks, or "all", also those before the window that a load left as they
were. The latter is careless: what a request computes from such blocks is wrong, but must not be
stored.
"""

import math
from collections import Counter, deque

import numpy as np
from connector.device_pool import DevicePool
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
        self,
        groups,
        *,
        num_blocks,
        num_slots,
        tiers=(),
        num_workers=1,
        limits=None,
        lag=0,
        prefix_cache=None,
        promises=True,
        **options,
    ):
        self.groups = groups
        self.num_blocks = num_blocks
        self.lag = lag
        self.prefix_cache = prefix_cache
        self.promises = promises  # the tokens of a load count as computed from its start
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
        self.pool = DevicePool(num_blocks, is_cache=prefix_cache is not None)
        self.longest = next(
            tokens
            for tokens in range(num_blocks * TOKENS_PER_HASH, 0, -1)
            if sum(-(-tokens // group.tokens_per_block) for group in groups) <= num_blocks
        )
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
        """Begin a request; with `reuses`, under the id of the last one that has ended.

        It is cut to what the device has blocks for if a sliding window lets none go.
        """
        text = text[: self.longest - 1]
        req_id = f"r{len(self.known)}"
        live = {request.request_id for request in self.live}
        if reuses and self.last_ended is not None and self.last_ended not in live:
            req_id = self.last_ended
            self.tally["reused"] += 1
        request = Sequence(req_id, text, len(text), min(len(text) + max_tokens, self.longest))
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
            for block in reversed(table):
                self.pool.release(block)
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
            self._cache(request, request.num_computed_tokens, count)
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
        found = self._match(request)
        tokens, waits = self.connector.get_num_new_matched_tokens(request, found)
        if tokens is None:
            return
        if declines:
            tokens = 0
        known = found + tokens
        total = known if tokens else min(found + budget, request.num_tokens)
        request.tables = [list(self._found(request, i, found)) for i in range(len(self.groups))]
        if self._grow(request, total, computed=known) is None:
            self._free_all(request)
            return
        self.connector.update_state_after_alloc(request, request.tables, tokens)
        self.waiting.remove(request)
        self.tally["found"] += found
        request.found_tokens, request.known_tokens = found, known
        request.num_computed_tokens = known if self.promises or not tokens else 0
        if tokens:
            assert waits
            self.loading[request] = None
            self.tally["loaded"] += tokens
            return
        self.running.append(request)
        scheduled[request] = total - known
        self._cache(request, known, total - known)
        tables[request.request_id] = [list(table) for table in request.tables]

    def _grow(self, request, total, computed=None):
        """Give a request blocks for `total` tokens; None if there are not enough."""
        computed = request.num_computed_tokens if computed is None else computed
        self._slide(request, computed)
        wanted = []
        for group, table in zip(self.groups, request.tables, strict=True):
            count = -(-total // group.tokens_per_block)
            wanted.append([self._is_past(group, i, computed) for i in range(len(table), count)])
        if sum(past is False for row in wanted for past in row) > len(self.pool.free):
            return None
        grown = [[NULL_BLOCK if past else self.pool.take() for past in row] for row in wanted]
        for table, row in zip(request.tables, grown, strict=True):
            table.extend(row)
        return grown

    def _is_past(self, group, index, computed):
        first = _first_read(group, computed - self.lag)
        return (index + 1) * group.tokens_per_block <= first

    # -- the device's prefix cache --------------------------------------------------------------

    def _name(self, request, group, index):
        return group, request.text[: (index + 1) * self.groups[group].tokens_per_block]

    def _cache(self, request, start, count):
        """Let others find the full blocks of these tokens."""
        for number, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            size = group.tokens_per_block
            for index in range(start // size, (start + count) // size):
                self.pool.name(table[index], self._name(request, number, index))

    def _cache_loaded(self, request):
        found, known = request.found_tokens, request.known_tokens
        for number, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            chunks = self.geometry.chunks_per_window(number)
            size = group.tokens_per_block
            last = known // size
            first = found // size
            filled = (
                first
                if chunks is None
                else max(first, last - chunks * self.geometry.blocks_per_chunk)
            )
            self.tally["unfilled"] += sum(b != NULL_BLOCK for b in table[first:filled])
            for index in range(first if self.prefix_cache == "all" else filled, last):
                self.pool.name(table[index], self._name(request, number, index))

    def _match(self, request):
        """How many tokens the device has, in whole blocks of every group."""
        unit = max(group.tokens_per_block for group in self.groups)
        for tokens in range((request.num_tokens - 1) // unit * unit, 0, -unit):
            if all(
                self._name(request, number, index) in self.pool.named
                for number, group in enumerate(self.groups)
                for index in _blocks_read(group, tokens)
            ):
                return tokens
        return 0

    def _found(self, request, number, tokens):
        group = self.groups[number]
        for index in range(tokens // group.tokens_per_block):
            name = self._name(request, number, index)
            is_kept = name in self.pool.named and not self._is_past(group, index, tokens)
            yield self.pool.share(name) if is_kept else NULL_BLOCK

    def _slide(self, request, computed):
        for group, table in zip(self.groups, request.tables, strict=True):
            for index, block in enumerate(table):
                if block != NULL_BLOCK and self._is_past(group, index, computed):
                    self.pool.release(block)
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
        for device in self.devices:
            is_right = self._reads_right(request, start, device)
            assert is_right or self.prefix_cache == "all", "bytes of somebody else"
            self.tally["computed wrong"] += not is_right
            for index, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
                size = group.tokens_per_block
                for at in range(start, start + count):
                    block = table[at // size]
                    self._overwrite(block)
                    cells = device.setdefault(block, {})
                    cells[at % size] = (index, request.text[: at + 1] if is_right else GARBAGE)

    def _reads_right(self, request, start, device):
        for index, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            size = group.tokens_per_block
            for at in range(_first_read(group, start), start):
                seen = device.get(table[at // size], {}).get(at % size)
                if seen != (index, request.text[: at + 1]):
                    return False
        return True

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
        cells = device.get(block, {})
        return tuple((at, cells.get(at)) for at in range(tokens))

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
        request.num_computed_tokens = request.known_tokens
        starts = [
            index * group.tokens_per_block
            for group, table in zip(self.groups, request.tables, strict=True)
            for index, block in enumerate(table)
            if block in invalid
        ]
        if starts:
            self.tally["invalid"] += 1
            request.num_computed_tokens = min(starts)
            if self._lacks_blocks(request):
                request.num_computed_tokens = 0
                self._free_all(request)
                self.waiting.appendleft(request)
                return
        else:
            self._cache_loaded(request)
        self.running.append(request)
        self.resumed.add(request.request_id)

    def _lacks_blocks(self, request):
        """Whether a request can't compute from its table: its windows began later."""
        return any(
            NULL_BLOCK in table[_first_read(group, request.num_computed_tokens) // size :]
            for group, table in zip(self.groups, request.tables, strict=True)
            for size in [group.tokens_per_block]
        )

    # -- invariants -----------------------------------------------------------------------------

    def check(self):
        check_state(self.world.manager.planner)
        self.manager.check(self.connector)
        self.pool.check([table for r in self.live for table in r.tables], self.num_blocks)
        if self.copies or self.deferred:
            assert self.connector.has_pending_push_work()
        for key, slot, refs in self.world.primary.core.resident():
            if refs >= 0:
                for worker in range(self.num_workers):
                    self._check_bytes(key, self.host[slot, worker])
        assert len(self.connector._contents.unfilled) <= self.num_blocks

    def _check_bytes(self, key, number):
        assert self.contents[number] == self._expected(key), f"wrong bytes of {key!r}"
        self.tally["compared"] += 1

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
            self.world.finish_all()  # before any deadline passes
            wakes_in_s = planner.cascades.wakes_in_s(planner.now_s)
            self.world.runner.advance(wakes_in_s if 0 < wakes_in_s < math.inf else seconds)
            self.world.finish_all()
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
        expired = planner.counters.deferrals_expired
        self.run_until(lambda: not (planner.orphaned or self.connector.has_pending_push_work()))
        assert planner.counters.deferrals_expired == expired, "expired on healthy tiers"
        assert not self.connector._requests
        assert not len(self.connector._jobs)
        assert self.world.counts["pinned"] == self.world.counts["writing"] == 0
        check_quiescent(planner)
        for tier in self.world.tiers:
            for key, row in tier.blocks.items():
                for number in np.asarray(row).view(np.int64)[: self.num_workers]:
                    self._check_bytes(key, number)
        opened, ended = (
            Counter(ctx for name, ctx in self.manager.contexts if name == hook)
            for hook in ("on_new_request", "on_request_finished")
        )
        assert opened == ended
        assert set(opened.values()) <= {1}

    def end(self):
        self.host = None
        self.world.end()


def _first_read(group, computed):
    """The first token that the token after the computed ones attends to."""
    window = group.sliding_window_tokens
    return 0 if window is None else max(0, computed + 1 - window)


def _blocks_read(group, computed):
    size = group.tokens_per_block
    return range(_first_read(group, computed) // size, computed // size)
