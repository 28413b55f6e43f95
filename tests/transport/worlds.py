"""Tensors of a device, slots beside them, and a model of every copy in plain arrays.

The device is simulated by host memory alone, or, if `Device.create_runtime` creates one, by a
runtime with streams.
"""

import asyncio
import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from simulated_cuda.device import Progress, Schedule, SimulatedCuda

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies
from kvoffload_async.transport.cuda import CudaTransport
from kvoffload_async.transport.host import HostEvent, HostTransport
from kvoffload_async.transport.layout import (
    CopyRun,
    KVLayout,
    PageTable,
    register_kv_caches,
)
from kvoffload_async.types import CPULoadStoreSpec, GPULoadStoreSpec, as_block_ids

_SCHEDULES = {"dev": 30, "ci": 300, "nightly": 10_000, "mutation": 100}


def with_schedules(share=1):
    """Give a test of schedules its number of examples in the profile, or a share of it."""
    profile = os.environ.get("KVOFFLOAD_HYPOTHESIS_PROFILE", "dev")
    return settings(max_examples=_SCHEDULES[profile] // share)


def device_schedules():
    """Return a strategy for schedules of a device; the simplest runs only what must run."""
    choices = st.lists(st.integers(0, 11), min_size=1, max_size=24).map(tuple)
    return st.builds(Schedule, st.sampled_from(Progress), choices)


STORE, LOAD = Direction.STORE, Direction.LOAD
DEADLINE_S = 60.0
MOMENT_S = 0.02
GUARD = 0xEE


@dataclass(frozen=True)
class Shape:
    """How one tensor lies in memory.

    `kind`: "plain" `[blocks, ...]`, "pairs" `[2, blocks, ...]`, or "strided" (rows with a gap).
    """

    page_items: int = 6
    dtype: torch.dtype = torch.uint8
    kind: str = "plain"

    def tensor(self, blocks, device="cpu", empty=torch.empty):
        shape = (blocks, self.page_items + (3 if self.kind == "strided" else 0))
        if self.kind == "pairs":
            shape = (2, *shape)
        return empty(shape, dtype=self.dtype, device=device)[..., : self.page_items]


@dataclass(frozen=True)
class Geometry:
    """The groups' tensors; all tensors of a layout lie the same way."""

    groups: tuple[tuple[Shape, ...], ...] = ((Shape(), Shape(10)), (Shape(4),))
    blocks: int = 12
    blocks_per_chunk: int = 1
    slots: int = 24
    cell_offset: int = 0
    padding: int = 5
    scatter: int | None = None
    """Seed of runs in which pages are scattered in their slots; None: they are contiguous."""
    writers: tuple[int, int] = (1, 0)
    """Number of workers with equal pages, and the number of this one."""


def scattered_table(table, rng, offset_bytes, writers):
    """Return a table whose pages lie in slots in drawn runs; a page's last bytes may be in none."""
    page_at, slot_at, runs = 0, rng.randint(0, 3), []
    for _ in range(rng.randint(1, 4)):
        size, columns = rng.randint(1, 5), rng.randint(1, 2)  # two: every other fragment is one's
        count = min(rng.randint(1, 4), (table.page_bytes - page_at) // (columns * size))
        if count == 0:
            break
        for column in range(columns):
            stride = size + rng.randint(0, 7)
            begin = page_at + column * size
            runs.append(CopyRun(begin, slot_at, size, count, columns * size, stride))
            slot_at += count * stride + rng.randint(0, 5)
        page_at += count * columns * size
    if not runs:
        runs, slot_at = [CopyRun(0, slot_at, table.page_bytes)], slot_at + table.page_bytes
    return PageTable(table.pages, offset_bytes, slot_at, rng.sample(runs, len(runs)), *writers)


def scattered(layout, seed, writers):
    """Return a layout whose pages are scattered in their slots."""
    rng = random.Random(seed)
    groups, chunk_bytes = [], 0
    for group in layout.groups:
        offset, tables = 0, []
        for table in group:
            tables.append(scattered_table(table, rng, offset, writers))
            offset += tables[-1].slot_page_bytes * layout.blocks_per_chunk
        groups.append(tables)
        chunk_bytes = max(chunk_bytes, offset)
    return KVLayout(groups, layout.blocks_per_chunk, chunk_bytes)


@dataclass(frozen=True)
class Wanted:
    """A group's part of a transfer: device blocks in order, and where in a chunk they begin."""

    blocks: tuple[int, ...]
    first: int
    slots: tuple[int, ...]


def copies_of(direction, wanted):
    blocks = [block for group in wanted for block in group.blocks]
    slots = [slot for group in wanted for slot in group.slots]
    sizes = tuple(len(group.blocks) for group in wanted)
    firsts = tuple(group.first for group in wanted)
    device = GPULoadStoreSpec(as_block_ids(blocks), sizes, firsts)
    return BlockCopies(direction, device, CPULoadStoreSpec(as_block_ids(slots)))


def simple(direction, blocks, slots):
    """A transfer of one group, whole chunks."""
    return copies_of(direction, [Wanted(tuple(blocks), 0, tuple(slots))])


class SimulatedTransport(CudaTransport):
    """The device's transport with the faults of the host's."""

    def __init__(self, *args, **options):
        self.before_copy = {}
        self.violations = []
        super().__init__(*args, **options)

    def _launch(self, transfer, staged):
        hook = self.before_copy.get(transfer.copies.direction)
        if hook is not None:
            hook(transfer.copies)
        super()._launch(transfer, staged)


@dataclass(frozen=True)
class Computing:
    """A compute stream that is busy until `reach` is called, and an event behind its work."""

    event: object
    reach: Callable[[], None]


@dataclass
class Device:
    """Tensors, their layout, the slots, and a model of both in plain arrays."""

    create_runtime: ClassVar = None
    """Creates the runtime of each new device."""

    geometry: Geometry = field(default_factory=Geometry)

    def __post_init__(self):
        g = self.geometry
        self.runtime = Device.create_runtime and Device.create_runtime()
        empty = torch.empty if self.runtime is None else self.runtime.empty
        self.caches = {}
        names = []
        for group_at, group in enumerate(g.groups):
            names.append([])
            for shape_at, shape in enumerate(group):
                name = f"g{group_at}l{shape_at}"
                self.caches[name] = shape.tensor(g.blocks, empty=empty)
                names[-1].append(name)
        if self.runtime is not None:
            self.runtime.run_all()  # what allocating has queued
        pairs = g.groups[0][0].kind == "pairs"
        self.layout = register_kv_caches(self.caches, names, g.blocks_per_chunk, int(pairs))
        if g.scatter is not None:
            self.layout = scattered(self.layout, g.scatter, g.writers)
        width = g.cell_offset + self.layout.chunk_bytes + g.padding
        self.memory = bytearray(g.slots * width)
        self.view = memoryview(self.memory).cast("B", (g.slots, width))
        self.rows = np.asarray(self.view)
        self.rows[:] = GUARD
        self.fill(0)
        self.snapshot()

    def fill(self, seed):
        """Give every byte of the device a new value."""
        rng = np.random.default_rng(seed)
        for table in self.tables():
            pages = table.pages.numpy()
            pages[:] = rng.integers(0, 256, pages.shape, dtype=np.uint8)

    def tables(self):
        return [table for group in self.layout.groups for table in group]

    def snapshot(self):
        """Let the model be what is there now."""
        self.model_rows = self.rows.copy()
        self.model_pages = [[t.pages.numpy().copy() for t in g] for g in self.layout.groups]

    def apply(self, direction, wanted):
        """What a transfer amounts to: page by page, as anybody would write it down."""
        g = self.geometry
        for group_at, part in enumerate(wanted):
            for at, block in enumerate(part.blocks):
                position = part.first % g.blocks_per_chunk + at
                slot = part.slots[position // g.blocks_per_chunk]
                inner = position % g.blocks_per_chunk
                num_writers, writer = g.writers
                if (
                    direction is STORE
                    and (slot * g.blocks_per_chunk + inner) % num_writers != writer
                ):
                    continue
                for table_at, table in enumerate(self.layout.groups[group_at]):
                    page = self.model_pages[group_at][table_at][block]
                    begin = g.cell_offset + table.offset_bytes + inner * table.slot_page_bytes
                    cell = self.model_rows[slot, begin : begin + table.slot_page_bytes]
                    for run in table.runs:
                        for number in range(run.num_fragments):
                            on_device = run.page_offset + number * run.page_stride
                            in_slot = run.slot_offset + number * run.slot_stride
                            size = run.fragment_bytes
                            here = page[on_device : on_device + size]
                            there = cell[in_slot : in_slot + size]
                            if direction is STORE:
                                there[:] = here
                            else:
                                here[:] = there

    def agrees(self):
        """Whether device and slots are, to the last byte, what the model says."""
        pages = zip(self.model_pages, self.layout.groups, strict=True)
        return np.array_equal(self.rows, self.model_rows) and all(
            np.array_equal(model, table.pages.numpy())
            for models, tables in pages
            for model, table in zip(models, tables, strict=True)
        )

    def transport(self, create=HostTransport, **options):
        options = {"cell_offset_bytes": self.geometry.cell_offset, **options}
        if self.runtime is None:
            return create(self.layout, self.view, **options)
        options = {"staging_bytes": 2 * self.layout.chunk_bytes, **options}
        return SimulatedTransport(self.layout, self.view, runtime=self.runtime, **options)

    def computing(self):
        if self.runtime is None:
            event = HostEvent(reached=False)
            return Computing(event, event.set)
        stream = self.runtime.create_stream(self.layout.device)
        hold = self.runtime.hold(stream)
        event = self.runtime.create_event()
        event.record(stream)
        return Computing(event, hold.release)


@contextlib.contextmanager
def simulated(create_runtime=SimulatedCuda):
    """Give every new device a runtime."""
    before, Device.create_runtime = Device.create_runtime, create_runtime
    try:
        yield
    finally:
        Device.create_runtime = before


FLAT = Geometry(((Shape(8), Shape(8)),))
DTYPES = [torch.uint8, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.float32]


@st.composite
def geometries(draw, *, may_scatter=False):
    kind = draw(st.sampled_from(["plain", "pairs", "strided"]))
    shapes = st.builds(Shape, st.integers(1, 9), st.sampled_from(DTYPES), st.just(kind))
    groups = draw(st.lists(st.lists(shapes, min_size=1, max_size=3), min_size=1, max_size=3))
    scatter = draw(st.none() | st.integers(0, 1 << 32)) if may_scatter else None
    return Geometry(
        tuple(tuple(group) for group in groups),
        blocks_per_chunk=draw(st.integers(1, 4)),
        cell_offset=draw(st.sampled_from([0, 7, 64])),
        scatter=scatter,
        writers=(1, 0) if scatter is None else draw(st.sampled_from([(1, 0), (2, 1), (4, 2)])),
    )


@st.composite
def wants(draw, geometry, *, aligned=False, whole=False):
    """A transfer with distinct blocks and distinct slots: any start, any end within a chunk.

    `aligned`: it starts with a chunk; `whole`: it also ends with one.
    """
    slots = draw(st.permutations(range(geometry.slots)))
    parts = []
    for _ in geometry.groups:
        blocks = tuple(draw(st.permutations(range(geometry.blocks))))
        per_chunk = geometry.blocks_per_chunk
        count = draw(st.integers(0, 6))
        blocks = blocks[: count - count % per_chunk if whole else count]
        first = 0 if aligned or whole else draw(st.integers(0, 9))
        chunks = -(-(first % per_chunk + len(blocks)) // per_chunk) if blocks else 0
        parts.append(Wanted(blocks, first, tuple(slots[:chunks])))
        slots = slots[chunks:]
    return parts


def until(condition, timeout_s=DEADLINE_S):
    """Wait for a condition that another thread brings about."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


def outcome_of(transfer):
    """Wait for the end, on a loop, as everybody does."""

    async def wait():
        async with asyncio.timeout(DEADLINE_S):
            return await transfer.outcome()

    return asyncio.run(wait())


class Gate:
    """Holds every copy of a direction until it is opened; notes what has arrived."""

    def __init__(self):
        self.opened = threading.Event()
        self.arrived = threading.Event()
        self.copies = []

    def __call__(self, copies):
        self.copies.append(copies)
        self.arrived.set()
        assert self.opened.wait(DEADLINE_S)


def gate(transport, direction):
    hook = Gate()
    transport.before_copy[direction] = hook
    return hook
