"""Runs random programs against the public surface, and checks what is promised of every one.

A program is a world, a seed that draws its configuration, and steps, each a name and a number from
which the step draws the rest. One that fails is cut down to the steps that it needs, and printed:

    python tests/fuzz/driver.py --seconds 3600 --seed 1 --jobs 2
    python tests/fuzz/driver.py --replay '{"world": "serving", "seed": 7, "steps": [["begin", 3]]}'

In virtual time a program always does the same. One that runs on threads may need several replays.
"""

import argparse
import gc
import json
import math
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.common import logged, nothing_left
from fuzz.scheduler import Scheduler
from fuzz.serving import Serving
from fuzz.standalone import Standalone

WORLDS = {"scheduler": Scheduler, "standalone": Standalone, "serving": Serving}
MOST_STEPS = 80


@dataclass(frozen=True)
class Program:
    world: str
    seed: int
    steps: list

    @classmethod
    def drawn(cls, seed, worlds=tuple(WORLDS)):
        chance = random.Random(seed)
        world = chance.choice(worlds)
        names, weights = list(WORLDS[world].STEPS), list(WORLDS[world].STEPS.values())
        drawn = chance.choices(names, weights, k=chance.randint(5, MOST_STEPS))
        return cls(world, seed, [[name, chance.randrange(10**6)] for name in drawn])

    def failure(self, show=len):
        """Run it; return what went wrong, or None. Log messages go to `show`."""
        with tempfile.TemporaryDirectory(prefix="kvoffload-fuzz-") as name:
            folder = Path(name)
            try:
                with logged(show), nothing_left(folder):
                    WORLDS[self.world](random.Random(self.seed), folder).play(self.steps)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is a finding
                return error
        return None

    def shorter(self, error):
        """Return the program without the steps that it fails alike without."""
        program, size = self, len(self.steps)
        while size := size // 2:
            at = 0
            while at < len(program.steps):
                steps = program.steps[:at] + program.steps[at + size :]
                shorter = replace(program, steps=steps)
                if _kind(shorter.failure()) == _kind(error):
                    program = shorter
                else:
                    at += size
        return program


def _kind(error):
    return None if error is None else (type(error), str(error)[:20])


def search(seed, seconds=math.inf, programs=sys.maxsize, worlds=tuple(WORLDS), most_failures=10):
    """Run programs with seeds from `seed` on; return how many of each world, and the failures.

    A failure is a shortened program and its error; of programs that fail alike, the first counts.
    """
    end_s, counts, failed = time.monotonic() + seconds, Counter(), {}
    gc.collect()
    gc.freeze()  # a collection after each program is of what it has left
    for number in range(programs):
        if time.monotonic() >= end_s or len(failed) >= most_failures:
            break
        program = Program.drawn(seed + number, worlds)
        counts[program.world] += 1
        error = program.failure()
        if error is not None and _kind(error) not in failed:
            program = program.shorter(error)
            failed[_kind(error)] = program, error
            report(program, error)
    return counts, list(failed.values())


def report(program, error):
    text = "".join(traceback.format_exception(program.failure() or error))
    print(f"\n{text}--replay '{json.dumps(asdict(program))}'", flush=True)  # noqa: T201


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--world", choices=WORLDS, action="append")
    parser.add_argument("--replay", type=json.loads, metavar="PROGRAM")
    options = parser.parse_args()
    if options.replay:
        error = Program(**options.replay).failure(print)
        if error is not None:
            raise error
        return 0
    print(f"--seed {options.seed}", flush=True)  # noqa: T201
    seeds = [options.seed + job * 10**9 for job in range(options.jobs)]
    worlds = tuple(options.world or WORLDS)
    with ProcessPoolExecutor(options.jobs) as executor:
        runs = [executor.submit(search, seed, options.seconds, worlds=worlds) for seed in seeds]
        counts, failed = Counter(), []
        for run in runs:
            counts += run.result()[0]
            failed += run.result()[1]
    print(f"{counts.total()} programs {dict(counts)}, {len(failed)} failed")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
