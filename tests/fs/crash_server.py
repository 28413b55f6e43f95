"""Workloads on an `fs` directory, and the server that runs them. Its own script."""

import json
import os
import random
import sys
from pathlib import Path

from crashes import answer, crew, load, serve
from faulty_files import FaultyFileOps
from fs.directories import FsDirectory
from fs.spaces import rescan, room_for

from kvoffload_async.errors import BlockMissingError, TierFullError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs import housekeeping
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE

K = [key_of(number) for number in range(60)]
BAD = K[5]
CAPACITY = room_for(5)
SHARED_CAPACITY = room_for(34)


def scripted(
    root: str, kill_at: int | None, *, torn: bool = False, verify: str = "when_present"
) -> dict:
    """A workload that makes the same calls every time: store, load, evict, find a bad block."""
    housekeeping._OPENING_S = housekeeping._STEP_S = 30.0  # also on a busy machine
    ops = FaultyFileOps()
    if kill_at is not None:
        ops.kill(kill_at, torn=torn)
    directory = FsDirectory(Path(root))
    options = {"capacity_bytes": CAPACITY, "rescan_interval_s": 3600.0, "verify": verify}
    with directory.open(ops, **options) as harness:
        harness.store(K[:3])
        load(harness, K[:2])
        harness.store(K[3:6])
        os.setxattr(directory.path(BAD), ATTRIBUTE, b"wrong")
        load(harness, [K[4], BAD])
        harness.store(K[6:7])
    return {"calls": [call.name for call in ops.calls]}


def traffic(
    root: str, seed: int, rounds: int, capacity_bytes: int | None, verify: str = "when_present"
) -> dict:
    """Random stores and loads until the rounds are done, or the process is killed."""
    draw = random.Random(seed)
    directory = FsDirectory(Path(root))
    full = missing = served = 0
    options = {"capacity_bytes": capacity_bytes, "verify": verify, "rescan_interval_s": 0.5}
    with directory.open(**options) as harness:
        for _ in range(rounds):
            keys = draw.sample(K, draw.randint(1, 6))
            if draw.random() < 0.6:
                failures = harness.store(keys)
                full += sum(isinstance(e, TierFullError) for e in failures.values())
                unexpected = [e for e in failures.values() if not isinstance(e, TierFullError)]
            else:
                failures = load(harness, keys)
                missing += len(failures)
                served += len(keys) - len(failures)
                unexpected = [e for e in failures.values() if not isinstance(e, BlockMissingError)]
            if unexpected:
                raise unexpected[0]
        done = {"full": full, "missing": missing, "served": served}
        answer(done | {"phase": "quiet"})
        sys.stdin.readline()  # all are quiet now
        if capacity_bytes is not None:
            rescan(harness)
            keeper = harness.tier._housekeeping
            usage = harness.run(keeper._run(keeper._usage.read))
            done["counted"] = usage.settled_bytes
            done["reserved"] = usage.reserved_bytes
        answer(done | {"phase": "counted"})
        sys.stdin.readline()
    return done


def several(root: str, kills: int, seed: int, verify: str) -> dict:
    """Three processes at work on one directory, killed one after the other."""

    def start(number: int) -> dict:
        return traffic(root, number, 10**6, SHARED_CAPACITY, verify)

    return crew(3, kills, seed, 0.08, start)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        answer(traffic(**json.loads(sys.argv[1])))
    else:
        serve(scripted=scripted, traffic=traffic, several=several)
