"""Programs of a caller on a simulated device, whose bytes are compared with a model.

Each transfer is checked at its outcome, on the thread that publishes it. From then on its slots,
or its device blocks, are another's: they are overwritten at once, and must stay so.
"""

import itertools
import threading
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from simulated_cuda.device import SimulatedCuda
from transport.worlds import (
    DEADLINE_S,
    LOAD,
    STORE,
    Device,
    Geometry,
    Shape,
    Wanted,
    copies_of,
    device_schedules,
    simulated,
    wants,
)

from kvoffload_async.transport.cuda import CudaTransport

GEOMETRIES = [
    Geometry(((Shape(8),),), padding=0),
    Geometry(((Shape(8), Shape(16)),), blocks_per_chunk=2),
    Geometry(((Shape(6, kind="strided"),), (Shape(3),)), blocks_per_chunk=2, cell_offset=7),
    Geometry(((Shape(8), Shape(16)),), scatter=6, writers=(2, 1)),
]


@dataclass(frozen=True)
class Compute:
    """A kernel of the caller that writes device blocks of a group."""

    group: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """A transfer; `is_awaited`: the caller waits for it at once."""

    direction: object
    wanted: tuple[Wanted, ...]
    is_awaited: bool = False


CALLS = ("cudaMemcpyAsync", "cudaHostAlloc", "cudaStreamWaitEvent", "cudaEventSynchronize")
"""Calls of a transport that a caller does not make."""


@dataclass(frozen=True)
class Fault:
    """An error of the n-th of these calls."""

    call: str
    at: int
    is_performed: bool


@dataclass(frozen=True)
class Program:
    """What a caller does, and on which device."""

    geometry: Geometry
    steps: tuple[Compute | Move, ...]
    schedule: object
    queue_length: int = 1024
    staging_chunks: int = 2
    faults: tuple[Fault, ...] = ()


faults = st.lists(
    st.builds(Fault, st.sampled_from(CALLS), st.integers(0, 9), st.booleans()), max_size=2
).map(tuple)


@st.composite
def programs(draw, *, has_faults=False):
    geometry = draw(st.sampled_from(GEOMETRIES))
    blocks = st.lists(st.integers(0, geometry.blocks - 1), min_size=1, max_size=4, unique=True).map(
        tuple
    )
    computes = st.builds(Compute, st.integers(0, len(geometry.groups) - 1), blocks)
    wanted = wants(geometry) | wants(geometry, whole=True)
    moves = st.builds(Move, st.sampled_from([STORE, LOAD]), wanted.map(tuple), st.booleans())
    steps = draw(st.lists(computes | moves | moves, min_size=2, max_size=10))
    return Program(
        geometry,
        tuple(steps),
        draw(device_schedules()),
        draw(st.sampled_from([1024, 3])),
        draw(st.integers(1, 3)),
        draw(faults) if has_faults else (),
    )


@dataclass
class Caller:
    """Runs a program; keeps the promise that slots and blocks in transfers stay unchanged."""

    device: Device
    create: type[CudaTransport] = CudaTransport
    staging_chunks: int = 2
    may_fail: bool = False
    deadline_s: float = DEADLINE_S
    errors: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.runtime = self.device.runtime
        self.stream = self.runtime.create_stream(self.device.layout.device)
        self.tables_bytes = self.runtime.used_bytes
        self.transport = self.create(
            self.device.layout,
            self.device.view,
            cell_offset_bytes=self.device.geometry.cell_offset,
            staging_bytes=self.staging_chunks * self.device.layout.chunk_bytes,
            runtime=self.runtime,
        )
        self.flying = []  # (event of its check, set of the slots and blocks that it uses)
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()

    def next_value(self):
        """Return a byte that nothing has had for a while. Thread: any."""
        return next(self.numbers) * 7 % 251

    def compute(self, step):
        """Write a new value into blocks, on the caller's stream."""
        self.wait_for({(step.group, block) for block in step.blocks})
        value = self.next_value()
        with self.runtime.stream(self.stream):
            for table in self.device.layout.groups[step.group]:
                for block in step.blocks:
                    table.pages[block].fill_(value)
        for pages in self.device.model_pages[step.group]:
            pages[list(step.blocks)] = value

    def move(self, step):
        uses = {slot for part in step.wanted for slot in part.slots}
        uses |= {(at, block) for at, part in enumerate(step.wanted) for block in part.blocks}
        self.wait_for(uses)
        with self.lock:
            self.device.apply(step.direction, step.wanted)
        copies = copies_of(step.direction, step.wanted)
        with self.runtime.stream(self.stream):
            after = self.transport.record_compute()
        transfer = self.transport.submit(copies, after)
        checked = threading.Event()
        transfer._ended.add_done_callback(lambda ended: self.check(step, ended.result(), checked))
        self.flying.append((checked, uses))
        if step.is_awaited:
            self.wait_for(uses)

    def wait_for(self, uses):
        """Wait for the transfers that use any of these slots and blocks."""
        for checked, others in list(self.flying):
            if not uses.isdisjoint(others):
                if not checked.wait(self.deadline_s):
                    self.errors.append("a transfer does not end")
                self.flying.remove((checked, others))

    def check(self, step, outcome, checked):
        """Compare what a transfer has moved with the model; what it used is another's now."""
        if outcome.error is None:
            self.compare(step)
        else:
            if not self.may_fail:
                self.errors.append(f"{step}: {outcome.error}")
            # A transfer that failed need not have waited for what the caller computed before.
            self.stream.synchronize()
        value = self.next_value()
        with self.lock:
            for at, part in enumerate(step.wanted):
                slots, blocks = list(part.slots), list(part.blocks)
                self.device.rows[slots] = self.device.model_rows[slots] = value
                if step.direction is LOAD and (outcome.error is not None or value % 2):
                    for table in self.device.layout.groups[at]:
                        table.pages.numpy()[blocks] = value
                    for model in self.device.model_pages[at]:
                        model[blocks] = value
        checked.set()

    def compare(self, step):
        for at, part in enumerate(step.wanted):
            slots, blocks = list(part.slots), list(part.blocks)
            if not np.array_equal(self.device.rows[slots], self.device.model_rows[slots]):
                self.errors.append(f"{step}: wrong slots")
            if step.direction is LOAD:
                tables, models = self.device.layout.groups[at], self.device.model_pages[at]
                for table, model in zip(tables, models, strict=True):
                    if not np.array_equal(table.pages.numpy()[blocks], model[blocks]):
                        self.errors.append(f"{step}: wrong blocks")

    def end(self):
        """Close, run what is left, and return what was wrong."""
        if not self.transport.close(self.deadline_s):
            self.errors.append("the transport does not close")
        runtime = self.runtime
        runtime.run_all()
        if not self.device.agrees():
            self.errors.append("slots or blocks changed after the end")
        if runtime.has_failed:
            self.errors.append("an operation failed on the device")
        for name in ("synchronous copies", "spinning waits"):
            if runtime.counts[name]:
                self.errors.append(f"{runtime.counts[name]} {name}")
        if runtime.used_bytes != self.tables_bytes:
            self.errors.append("device memory was not released")
        return self.errors


def run(program, create=CudaTransport, deadline_s=DEADLINE_S):
    """Return what was wrong with a program's transfers."""
    with simulated(lambda: SimulatedCuda(program.schedule, queue_length=program.queue_length)):
        caller = Caller(
            Device(program.geometry),
            create,
            program.staging_chunks,
            may_fail=bool(program.faults),
            deadline_s=deadline_s,
        )
    for fault in program.faults:
        caller.runtime.fail(fault.call, fault.at, is_performed=fault.is_performed)
    try:
        for step in program.steps:
            caller.compute(step) if isinstance(step, Compute) else caller.move(step)
    except Exception as error:  # noqa: BLE001 - of a transport with a defect
        caller.errors.append(repr(error))
    return caller.end()
