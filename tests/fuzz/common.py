"""What all worlds share: contents that follow from keys, tiers, and what must hold of them."""

import gc
import hashlib
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np

from kvoffload_async.runtime.loop import new_event_loop

BLOCK_BYTES = 4096
GRACE_S = 20.0
"""Real seconds for threads to end, and for tiers on threads to come to rest."""

HEALTHY_S = 30.0
"""Seconds in which healthy tiers decide every lookup."""


class BrokenLawError(AssertionError):
    """The product did what it must not."""


def law(holds, text):
    if not holds:
        raise BrokenLawError(text)


def content(key):
    """Return what the block of a key holds, uint8 `[BLOCK_BYTES]`."""
    digest = hashlib.blake2b(key).digest()
    return np.frombuffer(digest * (BLOCK_BYTES // len(digest)), np.uint8)


def holds(row, key):
    return np.array_equal(row, content(key))


def prompt(chance):
    """Return the chained hashes of a prompt; prompts share their heads."""
    path = [chance.randrange(3) for _ in range(chance.randint(1, 6))]
    return [hashlib.blake2b(bytes(path[: i + 1]), digest_size=8).digest() for i in range(len(path))]


# -- tiers --------------------------------------------------------------------------------------

IN_MEMORY = ("unreliable", "unreliable", "liar")
ON_DISK = ("fs", "slab")


def draw_tier(chance, folder, kinds):
    """Return the configuration of a tier."""
    kind = chance.choice(kinds)
    options = {
        "io_timeout_s": chance.choice((0.5, 2.0, 30.0)),
        "probe_timeout_s": chance.choice((0.2, 2.0)),
        "close_timeout_s": 1.0,
        "enable_kv_events": chance.random() < 0.5,
        "min_blocks": chance.choice((1, 1, 2)),
    }
    root_dir = str(folder / f"{kind}{chance.randrange(10**6)}")
    bytes_in_all = chance.choice((13, 20, 80)) * BLOCK_BYTES
    trouble = {"seed": chance.randrange(10**6), "trouble": chance.choice((0.0, 0.05, 0.2))}
    match kind:
        case "fs":
            capacity = chance.choice((None, bytes_in_all))
            options |= {"type": "fs", "root_dir": root_dir, "capacity_bytes": capacity}
        case "slab":
            options |= {
                "type": "slab",
                "root_dir": root_dir,
                "capacity_bytes": 200_000 + bytes_in_all,
                "segment_bytes": chance.choice((8, 16)) * BLOCK_BYTES,
            }
        case "unreliable":
            options |= {"type": "UnreliableTier", "module_path": "fuzz.tiers", **trouble}
            options |= {
                "capacity": chance.choice((3, 10, 1000)),
                "exclusive": chance.random() < 0.5,
                "request_level": chance.random() < 0.2,
            }
        case "liar":
            options |= {"type": "LyingManager", "module_path": "fuzz.tiers", **trouble}
        case "example":
            options |= {"type": "example"}
    return options


def draw_config(chance, folder, kinds):
    """Return the configuration of an engine with a small primary and up to three tiers."""
    return {
        "cpu_bytes_to_use": chance.choice((2, 6, 12)) * BLOCK_BYTES,
        "block_bytes": BLOCK_BYTES,
        "model": "fuzz",
        "eviction_policy": chance.choice(("lru", "arc", "hd")),
        "enable_kv_cache_events": chance.random() < 0.5,
        "deferral_timeout_s": chance.choice((0.3, 5.0, 30.0)),
        "breaker_fault_threshold": chance.randint(1, 3),
        "breaker_retry_s": chance.choice((0.5, 5.0)),
        "drain_timeout_s": chance.choice((0.1, 1.0)),
        "shutdown_timeout_s": 1.0,
        "explain_requests": chance.choice((0, 4)),
        "check_invariants": chance.random() < 0.5,
        "generation": chance.choice((None, None, 1)),
        "secondary_tiers": [
            draw_tier(chance, folder, kinds) for _ in range(chance.choice((0, 1, 1, 2, 3)))
        ],
    }


def damage(chance, folder):
    """Damage a block on disk, if there is one whose bytes are verified."""
    with suppress(FileNotFoundError):  # threads may evict at the same time
        files = sorted(path for path in folder.rglob("*") if path.suffix in {".bin", ".slab"})
        files = [path for path in files if path.suffix == ".slab" or os.listxattr(path)]
        if files:
            _damage_file(chance, chance.choice(files))


def _damage_file(chance, path):
    """Cut a file off, or change a byte of about every other block in it."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        if path.suffix == ".bin" and chance.random() < 0.3:
            file.truncate(chance.randrange(size + 1))
            return
        for start in range(0, size, BLOCK_BYTES):
            if chance.random() < 0.5:
                position = start + chance.randrange(min(BLOCK_BYTES, size - start))
                file.seek(position)
                changed = file.read(1)[0] ^ 1 << chance.randrange(8)
                file.seek(position)
                file.write(bytes([changed]))


def calm(tiers, run=lambda call: call()):
    """Have all tiers do as they should; `run` calls on their loop's thread."""
    for manager in tiers:
        for each in (manager, manager.tier):
            if hasattr(each, "calm"):
                run(each.calm)


# -- what must hold -----------------------------------------------------------------------------


def check_sums(stats):
    """Check what `kvoffload_async.statistics` says always holds."""
    primary, planner = stats.primary, stats.planner
    law(
        primary.lookups == primary.hits + primary.pending_hits + primary.misses,
        f"sums of the primary: {primary}",
    )
    misses = sum(planner.misses.values())
    law(
        planner.lookups == planner.hits + planner.pending_hits + planner.retries + misses,
        f"sums of the planner's lookups: {planner}",
    )
    in_flight = sum(tier.jobs_in_flight for tier in stats.tiers)
    law(planner.jobs_submitted == planner.job_results + in_flight, f"a job is lost: {stats}")
    for tier in stats.tiers:
        check_tier_sums(tier)
    check_numbers(stats)


def check_tier_sums(tier):
    law(tier.lookups == tier.hits + tier.misses + tier.undecided, f"sums of lookups: {tier}")
    law(tier.submitted_jobs == tier.finished_jobs + tier.jobs_in_flight, f"sums of jobs: {tier}")
    law(tier.failed_jobs == sum(tier.failed_jobs_by_error.values()), f"sums of failures: {tier}")
    law(tier.dropped_blocks == sum(tier.dropped.values()), f"sums of dropped blocks: {tier}")


def check_numbers(value):
    """Check that no figure is negative, or no number at all."""
    if is_dataclass(value):
        for field in fields(value):
            check_numbers(getattr(value, field.name))
    elif isinstance(value, dict):
        check_numbers(tuple(value.values()))
    elif isinstance(value, tuple):
        for each in value:
            check_numbers(each)
    elif isinstance(value, int | float):
        law(0 <= value < float("inf"), f"{value} in statistics")


def is_at_rest(stats):
    """Tell whether no slot is in use and no job under way."""
    slots, planner = stats.primary.slots, stats.planner
    return (
        slots.free + slots.idle == stats.primary.num_slots
        and not (stats.primary.load_pins or planner.requests or planner.retained_blocks)
        and not any(tier.jobs_in_flight or tier.overdue_jobs for tier in stats.tiers)
    )


@contextmanager
def nothing_left(folder):
    """Check that nothing is left behind: no thread, descriptor, temporary file or unseen error."""
    new_event_loop().close()  # libuv keeps a pipe for the process from its first loop on
    unseen = []
    hook, sys.unraisablehook = sys.unraisablehook, unseen.append
    before = _threads(), _descriptors()
    try:
        yield
        gc.collect()
        deadline_s = time.monotonic() + GRACE_S
        while (left := _threads() - before[0]) and time.monotonic() < deadline_s:
            next(iter(left)).join(0.1)
        law(not left, f"threads are left: {left}")
        new = _descriptors() - before[1]
        law(not new, f"descriptors are left: {new}")
    finally:
        sys.unraisablehook = hook
    files = [str(path) for path in folder.rglob("*") if path.name.endswith((".tmp", ".new"))]
    law(not files, f"temporary files are left: {files}")
    law(not unseen, f"nobody saw: {[str(each.exc_value) for each in unseen]}")


def _threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvoffload")}


def _descriptors():
    return {
        (entry.name, target)
        for entry in Path("/proc/self/fd").iterdir()
        if (target := _target(entry)) is not None
    }


def _target(entry):
    try:
        return str(entry.readlink())
    except OSError:
        return None  # that of the listing itself


@contextmanager
def logged(show):
    """Have every message formatted, and given to `show`.

    No program draws a call with wrong arguments: where a message names one, the engine has taken
    a mistake of ours for a failure of a tier.
    """
    wrong_calls = []

    class Formatting(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if "unexpected keyword argument" in message:
                wrong_calls.append(message)
            show(message)

    logger, handler = logging.getLogger("kvoffload_async"), Formatting()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
    law(not wrong_calls, f"wrong calls: {wrong_calls}")
