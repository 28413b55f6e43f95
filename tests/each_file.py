"""Runs each test file in a process of its own: no test may need another file's.

    python tests/each_file.py [FOLDER OR FILE ...]

Prints the files whose tests fail, and exits with 1 if there are any. The sweeps, the soak and the
tests of hosts that are not installed, which have sessions of their own, do not run.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOSTS = ("lmcache", "sglang", "vllm")
NO_TESTS = 5
"""pytest's exit status for a file whose tests all are left to other sessions."""


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's output


def run(path: Path) -> bool:
    """Run a file's tests; print what pytest said if one fails, and return whether all passed."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path))
    # In a folder of its own: pytest clears those of former runs, and may meet another process.
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTEST_DEBUG_TEMPROOT": folder}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    passed = done.returncode in (0, NO_TESTS)
    if not passed:
        say(f"{done.stdout}{done.stderr}\nFAILED alone: {path.relative_to(ROOT)}")
    return passed


def main(names: list[str]) -> int:
    folders = [Path(name).resolve() for name in names] or [ROOT / "tests"]
    files = [folder for folder in folders if folder.is_file()]
    files += [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    absent = {f"under_{host}" for host in HOSTS if importlib.util.find_spec(host) is None}
    files = [path for path in files if path.parent.name not in absent]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(run, files))
    say(f"{results.count(True)} files passed, {results.count(False)} failed")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
