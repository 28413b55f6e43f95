"""Measurements of a transport on a device, each as a ratio of two ways taken in turns.

All take the device's runtime, so that a simulated device shows at least that they run.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from transport.worlds import DEADLINE_S, LOAD, STORE, simple

from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.transport.cuda import CudaTransport
from kvoffload_async.transport.layout import register_kv_caches

GIB = 1 << 30


@dataclass(frozen=True)
class Load:
    """What is moved: transfers of so many blocks, each divided among the layers."""

    block_bytes: int
    blocks: int = 64
    transfers: int = 8
    layers: int = 32
    repeats: int = 10
    staging_bytes: int = 64 << 20

    @property
    def num_bytes(self):
        return self.block_bytes * self.blocks * self.transfers


class Rig:
    """Device memory, slots and a transport between them."""

    def __init__(self, runtime, load, num_streams=2):
        self.runtime = runtime
        self.load = load
        self.device = torch.device(runtime.device_type)
        page = load.block_bytes // load.layers
        count = load.blocks * load.transfers
        self.caches = {f"l{i}": self.empty((count, page), torch.uint8) for i in range(load.layers)}
        self.buffer = PrimaryBuffer(count, page * load.layers)
        np.asarray(self.buffer.view)[:] = 1  # maps the pages
        self.transport = CudaTransport(
            register_kv_caches(self.caches),
            self.buffer.view,
            num_streams=num_streams,
            staging_bytes=load.staging_bytes,
            runtime=runtime,
        )
        order = np.random.default_rng(0).permutation(count)
        self.parts = [part.tolist() for part in np.array_split(order, load.transfers)]
        self.plain = runtime.pin_memory(torch.zeros(load.num_bytes, dtype=torch.uint8))
        self.whole = self.empty((load.num_bytes,), torch.uint8)

    def close(self):
        assert self.transport.close(DEADLINE_S)
        assert self.buffer.release()

    def empty(self, shape, dtype):
        return self.runtime.empty(shape, dtype, self.device)

    def submit(self, direction):
        """Submit all transfers; slots are adjacent, device blocks are not."""
        slots = iter(range(self.load.blocks * self.load.transfers))
        return [
            self.transport.submit(
                simple(direction, part, [next(slots) for _ in part]),
                self.transport.record_compute(),
            )
            for part in self.parts
        ]

    def move(self, direction):
        for transfer in self.submit(direction):
            assert transfer.synchronize(DEADLINE_S)
            assert transfer._ended.result().error is None

    def copy(self, direction):
        """The same bytes in one copy."""
        stream = self.runtime.current_stream(self.device)
        target, source = (
            (self.plain, self.whole) if direction is STORE else (self.whole, self.plain)
        )
        with self.runtime.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()


@contextlib.contextmanager
def rig(*arguments, **options):
    made = Rig(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def seconds_of(call):
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def medians(repeats, *calls):
    """Return the median seconds of each call; the calls take turns."""
    for call in calls:
        call()
    rounds = [[seconds_of(call) for call in calls] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def share_of_one_copy(runtime, load, direction):
    """Return throughput in bytes per second, and its share of one large pinned copy."""
    with rig(runtime, load) as made:
        mine, plain = medians(
            load.repeats, lambda: made.move(direction), lambda: made.copy(direction)
        )
    return load.num_bytes / mine, plain / mine


def speedup_of_two_streams(runtime, load, direction):
    """Return the throughput of two streams divided by that of one."""
    with rig(runtime, load, num_streams=1) as one, rig(runtime, load, num_streams=2) as two:
        single, double = medians(
            load.repeats, lambda: one.move(direction), lambda: two.move(direction)
        )
    return single / double


def host_seconds(runtime, load, direction):
    """Return seconds of the submitting thread, and of the whole process, for a transfer."""
    submitting, process = [], []
    with rig(runtime, load) as made:
        made.move(direction)
        for _ in range(load.repeats):
            begin_s, process_s = time.thread_time(), time.process_time()
            transfers = made.submit(direction)
            submitting.append(time.thread_time() - begin_s)
            assert all(transfer.synchronize(DEADLINE_S) for transfer in transfers)
            process.append(time.process_time() - process_s)
    return [statistics.median(each) / load.transfers for each in (submitting, process)]


def slowdowns_beside_a_matmul(runtime, load, direction, size=4096, at_most=10_000):
    """Return the seconds of copies and of matmuls side by side, divided by those alone."""
    with rig(runtime, load) as made:
        left, right = (made.empty((size, size), torch.bfloat16) for _ in range(2))
        stream = runtime.create_stream(made.device)  # so that copies do not wait for it
        with runtime.stream(stream):
            left.zero_()
            right.zero_()
        begin, end = (runtime.create_event(timed=True) for _ in range(2))

        def multiply(count):
            begin.record(stream)
            with runtime.stream(stream):
                for _ in range(count):
                    torch.mm(left, right)
            end.record(stream)

        def timed(count):
            multiply(count)
            stream.synchronize()
            return begin.elapsed_time(end) / 1000

        timed(1)
        (alone_s,) = medians(load.repeats, lambda: made.move(direction))
        count = min(at_most, max(1, round(alone_s / timed(1))))
        matmul_s = statistics.median(timed(count) for _ in range(load.repeats))
        copies, matmuls = [], []
        for _ in range(load.repeats):
            multiply(count)
            copies.append(seconds_of(lambda: made.move(direction)))
            stream.synchronize()
            matmuls.append(begin.elapsed_time(end) / 1000)
    return statistics.median(copies) / alone_s, statistics.median(matmuls) / matmul_s


def report(runtime, loads, tell, **matmuls):
    """Measure everything, and pass each line to `tell`; `matmuls` are options of the last part."""
    for load in loads:
        for direction in (STORE, LOAD):
            speed, share = share_of_one_copy(runtime, load, direction)
            streams = speedup_of_two_streams(runtime, load, direction)
            submit_s, process_s = host_seconds(runtime, load, direction)
            copies, matmul = slowdowns_beside_a_matmul(runtime, load, direction, **matmuls)
            tell(
                f"{direction.name.lower():5} {load.block_bytes >> 10:5} KiB blocks: "
                f"{speed / GIB:6.1f} GiB/s, {share:.2f} of one pinned copy (goal 0.80 at 1 MiB); "
                f"two streams {streams:.2f} times as fast as one; host time a transfer "
                f"{1e6 * submit_s:.0f} us to submit, {1e6 * process_s:.0f} us in all; beside a "
                f"matmul: copies take {copies:.2f}, the matmul {matmul:.2f} of its time alone "
                "(goal 1.05)"
            )
