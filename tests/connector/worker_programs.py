"""Steps of a scheduler before one worker on a simulated device, compared with a model.

Jobs read and write blocks while kernels are queued; the blocks of flushed jobs are overwritten at
once. Each job's bytes are compared when its result is taken, and its slots are then another's.
"""

from dataclasses import dataclass, field

import numpy as np
from connector.workers import job, meta
from hypothesis import strategies as st
from simulated_cuda.device import SimulatedCuda
from transport.worlds import DEADLINE_S, FLAT, LOAD, STORE, Device, device_schedules, simulated

from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker
from kvoffload_async.transport.cuda import CudaTransport

STALLED_S = 0.002


@dataclass(frozen=True)
class Step:
    """What a step does; numbers choose among what is possible.

    `flushed` jobs end before the step overwrites their blocks; `preempted` blocks are stored by
    the step that overwrites them. `is_stalled`: a kernel does not end before the flushes of this
    step and of the next one are late.
    """

    loads: tuple[int, ...] = ()
    computes: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    flushed: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    is_stalled: bool = False
    is_expedited: bool = False


numbers = st.lists(st.integers(0, 11), max_size=2).map(tuple)
rarely = st.integers(0, 7).map(lambda number: number == 7)
steps = st.builds(Step, numbers, numbers, numbers, numbers, numbers, rarely, st.booleans())


@dataclass(frozen=True)
class Program:
    """Steps on a device with a schedule."""

    steps: tuple[Step, ...]
    schedule: object


programs = st.builds(
    Program, st.lists(steps, min_size=2, max_size=5).map(tuple), device_schedules()
)


@dataclass
class Job:
    """A job in flight; `content` is what its block has, by table."""

    direction: object
    block: int
    slot: int
    content: list


@dataclass
class Scheduler:
    """Chooses what may be used, and checks what the worker reports."""

    schedule: object
    create: type[OffloadingConnectorWorker] = OffloadingConnectorWorker
    deadline_s: float = DEADLINE_S
    errors: list[str] = field(default_factory=list)

    def __post_init__(self):
        with simulated(lambda: SimulatedCuda(self.schedule)):
            self.device = Device(FLAT)
        self.runtime = self.device.runtime
        transport = CudaTransport(
            self.device.layout, self.device.view, staging_bytes=64, runtime=self.runtime
        )
        self.submitted = 0
        submit = transport.submit

        def counting(copies, after):
            self.submitted += 1
            return submit(copies, after)

        transport.submit = counting
        self.worker = self.create(transport, flush_timeout_s=self.deadline_s)
        self.hold = None
        self.jobs = {}
        self.late = set()
        self.job_id = 0
        self.value = 0

    # -- what is in use -------------------------------------------------------------------------

    def users(self, block):
        return [job_id for job_id, each in self.jobs.items() if each.block == block]

    def chosen(self, candidates, numbers):
        """Return distinct candidates, as many as there are numbers if possible."""
        candidates, found = list(candidates), []
        for number in numbers[: len(candidates)]:
            found.append(candidates.pop(number % len(candidates)))  # noqa: PERF401 - it shrinks
        return found

    def free_blocks(self):
        return [block for block in range(FLAT.blocks) if not self.users(block)]

    def free_slots(self):
        used = {each.slot for each in self.jobs.values()}
        return [slot for slot in range(FLAT.slots) if slot not in used]

    def content_of(self, block):
        return [model[block].copy() for model in self.device.model_pages[0]]

    def add(self, direction, block, slot):
        self.job_id += 1
        if direction is LOAD:
            row = self.device.rows[slot]
            content = [row[t.offset_bytes :][: t.page_bytes].copy() for t in self.device.tables()]
            for model, values in zip(self.device.model_pages[0], content, strict=True):
                model[block] = values
        else:
            content = self.content_of(block)
        self.jobs[self.job_id] = Job(direction, block, slot, content)
        return self.job_id, job((block,), (slot,), f"r{self.job_id}")

    # -- a step ---------------------------------------------------------------------------------

    def step(self, step):
        self.take()
        flushed = set(self.chosen(sorted(self.jobs), step.flushed))
        preempted = self.chosen(self.free_blocks(), step.preempted)
        slots = iter(self.free_slots())
        urgent = dict(self.add(STORE, block, next(slots)) for block in preempted)
        freed = {self.jobs[job_id].block for job_id in flushed} | set(preempted)
        targets = self.chosen(self.free_blocks(), step.loads)
        loads = dict(self.add(LOAD, block, next(slots)) for block in targets)
        computed = self.chosen(self.free_blocks(), step.computes)
        held, self.hold = self.hold, None
        if step.is_stalled:
            self.hold = self.runtime.hold(self.runtime.default_stream)
        is_cached = held is not None or self.hold is not None
        self.worker._flush_timeout_s = STALLED_S if is_cached else self.deadline_s
        flush = flushed | urgent.keys()
        may_continue = self.worker.handle_preemptions(meta(loads, urgent, flush))
        late = {job_id for job_id in flush if job_id in self.worker._running}
        self.late |= {job_id for job_id in late if self.jobs[job_id].direction is STORE}
        if may_continue != (late <= self.late):
            self.errors.append("a step goes on although a load is late, or waits for a store")
        if held is not None:
            held.release()
        self.worker.start_kv_transfers(meta(loads, urgent, flush))
        blocked = {self.jobs[job_id].block for job_id in late - self.late}
        ready = [b for b in freed - blocked if set(self.users(b)) <= flush]
        self.compute([*computed, *ready])
        busy = {each.block for each in self.jobs.values()}
        stored = self.chosen([b for b in computed if b not in busy], step.stores)
        deferred = dict(self.add(STORE, block, next(slots)) for block in stored)
        before = self.submitted
        self.worker.prepare_store_kv(meta(loads, {**urgent, **deferred}, flush))
        if self.submitted != before:
            self.errors.append("a store competes with sampling")
        self.worker._flush_timeout_s = self.deadline_s
        if step.is_expedited and self.hold is None:
            self.load_now(next(slots))

    def load_now(self, slot):
        """Load a block that the next kernel needs."""
        for block in self.free_blocks()[:1]:
            job_id, spec = self.add(LOAD, block, slot)
            self.worker.submit_load(job_id, spec, expedited=True)
            if not self.has_blocks(self.jobs[job_id]):
                self.errors.append("an expedited load is not there")

    def compute(self, blocks):
        """Write a new value into blocks, on the current stream."""
        self.value += 1
        with self.runtime.stream(self.runtime.current_stream()):
            for table in self.device.tables():
                for block in blocks:
                    table.pages[block].fill_(self.value)
        for model in self.device.model_pages[0]:
            model[blocks] = self.value

    # -- results --------------------------------------------------------------------------------

    def take(self):
        """Check the results."""
        for result in self.worker.get_finished():
            ended = self.jobs.pop(result.job_id, None)
            if ended is None:
                self.errors.append(f"job {result.job_id} has two results")
            elif result.job_id in self.late:
                if result.success:
                    self.errors.append("a store is good whose blocks were overwritten")
            elif not result.success:
                self.errors.append(f"job {result.job_id} failed")
            elif ended.direction is STORE and not self.has_slot(ended):
                self.errors.append("wrong slot")
            if ended is not None:
                self.device.rows[ended.slot] = self.job_id % 251

    def has_slot(self, ended):
        row = self.device.rows[ended.slot]
        return all(
            np.array_equal(row[t.offset_bytes :][: t.page_bytes], values)
            for t, values in zip(self.device.tables(), ended.content, strict=True)
        )

    def has_blocks(self, ended):
        return all(
            np.array_equal(t.pages.numpy()[ended.block], values)
            for t, values in zip(self.device.tables(), ended.content, strict=True)
        )

    def end(self):
        """Shut down, run what is left, and return what was wrong."""
        if self.hold is not None:
            self.hold.release()
        if not self.worker.shutdown(self.deadline_s):
            self.errors.append("the worker does not shut down")
        self.take()
        if self.jobs:
            self.errors.append(f"jobs {sorted(self.jobs)} have no result")
        self.runtime.run_all()
        for table, model in zip(self.device.tables(), self.device.model_pages[0], strict=True):
            if not np.array_equal(table.pages.numpy(), model):
                self.errors.append("wrong blocks")
        return self.errors


def run(program, create=OffloadingConnectorWorker, deadline_s=DEADLINE_S):
    """Return what was wrong with a program's jobs."""
    scheduler = Scheduler(program.schedule, create, deadline_s)
    try:
        for step in program.steps:
            scheduler.step(step)
    except Exception as error:  # noqa: BLE001 - of a worker with a defect
        scheduler.errors.append(repr(error))
    return scheduler.end()
