"""Runs a user's first commands with the installed package, which has no native module.

    python tests/without_native.py

Ends with an error if a command fails or prints a traceback, or if native code moves the blocks.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

DEADLINE_S = 300
CONFIG = '{"cpu_bytes_to_use": "16MiB", "model": "m", "block_bytes": "16KiB"}'


def main(folder: Path) -> None:
    config, store = folder / "config.json", folder / "blocks"
    config.write_text(CONFIG)
    said = run(folder, "--version")
    if "block I/O: python (it was not built" not in said:
        sys.exit(said)
    run(folder, "tiers")
    run(folder, "check-config", str(config))
    run(folder, "replay", "--limit", "20")
    run(folder, "replay", "--limit", "20", "--tier", f"slab:root_dir={store},capacity_bytes=64MiB")
    run(folder, "store", "inspect", str(store))
    sizes = ("--block-bytes", "64KiB", "--total-bytes", "1MiB")
    run(folder, "bench", "--tier", "fs", *sizes, "--rounds", "1")


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder without the source; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "kvoffload_async", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    said = f"kvoffload {' '.join(command)}: status {done.returncode}\n{done.stdout}"
    if done.returncode or "Traceback" in said:
        sys.exit(said)
    return said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
