"""Runs a sample of mutants, each in a copy of the tree, against the tests that guard its module.

A mutant that no test notices is printed: a test of behaviour is missing, or the code is not needed,
or the change is equivalent, and then the list beside this file says why. Plain tests run first, and
the state machines and what takes long only for what they have left alive.

    python tests/mutation/driver.py --seed 1 --count 40 kvoffload_async/core
"""

import argparse
import os
import queue
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutation.guards import GUARDS, guards_of
from mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
COPIED = ("kvoffload_async", "tests", "pyproject.toml", "README.md", "examples", "docs")
SLACK = 5
"""A run may take so many times the CPU time that it takes without a change."""
LEAST_S = 30.0
HANGS_S = 600.0
"""Wall time after which a run hangs, or the machine is too busy to tell."""
STAGES = ("not stateful and not slow", "stateful", "slow and not servers and not mounts")
KILLED, UNDECIDED, SURVIVED = "killed", "undecided", "survived"


def collect(root: Path, folders: list[str], equivalents: Path) -> list[Mutant]:
    """Return the mutants of all modules in these folders that are not known as equivalent."""
    known = _known(equivalents)
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = str(path.relative_to(root))
            source = path.read_text(encoding="utf-8")
            seen: Counter[tuple[str, ...]] = Counter()
            for mutant in mutants_of(source, relative):
                identity = (relative, mutant.kind, mutant.original, mutant.replacement)
                seen[identity] += 1
                if (*identity, seen[identity]) not in known:
                    found.append(mutant)
    return found


def _known(equivalents: Path) -> set[tuple[str | int, ...]]:
    """Return what is listed, by what stays when lines move: the text, and which one of those."""
    listed = tomllib.loads(equivalents.read_text(encoding="utf-8")).get("equivalent", [])
    for entry in listed:
        if not entry.get("reason"):
            raise ValueError(f"{equivalents}: {entry} has no reason")
    keys = ("path", "kind", "original", "replacement")
    return {(*(entry[key] for key in keys), entry.get("which", 1)) for entry in listed}


class Copy:
    """A copy of the tree, in which one mutant at a time lives."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / name)

    def outcome(self, mutant: Mutant, limits: dict[tuple[tuple[str, ...], str], int]) -> str:
        """Tell what becomes of a mutant, given how long each run may take."""
        path = self.folder / mutant.path
        original = path.read_bytes()
        path.write_bytes(mutant.apply(original))
        try:
            for stage in STAGES:
                tests = guards_of(mutant.path)
                code = self.run(tests, stage, limits[tests, stage])
                if code is None:
                    return UNDECIDED
                if code:
                    return KILLED
            return SURVIVED
        finally:
            path.write_bytes(original)

    def run(self, tests: tuple[str, ...], stage: str, limit_s: int) -> int | None:
        """Run tests in so much CPU time; return the exit status, or None if they hang.

        It is 0 also for no tests at all, and negative at the limit: what runs for ever is noticed.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", stage]
        command += ["--timeout=0", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=no", *tests]
        environment = {
            **os.environ,
            "PYTEST_ADDOPTS": "",  # whoever runs this with options means other tests
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "KVOFFLOAD_HYPOTHESIS_PROFILE": "mutation",
        }
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit_s, limit_s))
        try:
            code = process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return None
        return 0 if code == 5 else code  # 5: nothing was collected


def try_all(root: Path, mutants: list[Mutant], jobs: int) -> list[tuple[Mutant, str]]:
    """Return what becomes of each mutant; the tests must pass without any.

    Raises:
        RuntimeError: They do not.
    """
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            directory = Path(folder, str(number))
            directory.mkdir()
            copies.put(Copy(root, directory))
        limits = {}
        first = copies.get()
        for tests in sorted({guards_of(mutant.path) for mutant in mutants}):
            for stage in STAGES:
                began_s = _cpu_s()
                if (code := first.run(tests, stage, 3600)) != 0:
                    how = f"do not end in {HANGS_S:g} s" if code is None else "fail"
                    raise RuntimeError(f"the tests in {tests} {how} without any change")
                limits[tests, stage] = int(max(LEAST_S, SLACK * (_cpu_s() - began_s)))
        copies.put(first)

        def one(mutant: Mutant) -> tuple[Mutant, str]:
            copy = copies.get()
            try:
                outcome = copy.outcome(mutant, limits)
            finally:
                copies.put(copy)
            say(f"{outcome}: {mutant}")
            return mutant, outcome

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's output


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=sorted(GUARDS), help="where mutants are")
    parser.add_argument("--seed", type=int, help="drawn and printed, if it is not given")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--at-least", type=float, default=0.95, help="share that must die")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--equivalents", type=Path, default=EQUIVALENTS)
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    found = collect(given.root, given.folders, given.equivalents)
    sample = random.Random(seed).sample(found, min(given.count, len(found)))
    say(f"--seed {seed}: {len(sample)} of {len(found)} mutants")
    results = try_all(given.root, sample, given.jobs)
    counts = Counter(outcome for _, outcome in results)
    survivors = sorted((m for m, outcome in results if outcome == SURVIVED), key=str)
    for mutant in survivors:
        say(f"SURVIVED {mutant}")
    decided = len(results) - counts[UNDECIDED]
    rate = counts[KILLED] / max(1, decided)
    say(f"{rate:.1%} of {decided} died: {dict(counts)}")
    return int(rate < given.at_least)


if __name__ == "__main__":
    sys.exit(main())
