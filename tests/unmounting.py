"""A tier whose filesystem is unmounted underneath it, in a mount namespace of its own.

A script for `unshare --mount`: what it mounts nobody else sees, and it is gone with the process.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from fs.directories import FsDirectory
from slab.stores import SlabStore

from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(8)]
OPEN = {"fs": FsDirectory, "slab": SlabStore}
MOUNT, UMOUNT, UNSHARE = (
    shutil.which(name) or f"/bin/{name}" for name in ("mount", "umount", "unshare")
)
DEADLINE_S = 60


def tell(kind: str, mounted: Path, root: Path) -> dict:
    """Store, unmount, store and load; return how that ended, and what lies below the mount."""
    subprocess.run([MOUNT, "-t", "tmpfs", "none", str(mounted)], check=True)
    with OPEN[kind](root).manage() as harness:
        jobs = [harness.submit_store(K[:4], range(4))]
        harness.wait()
        subprocess.run([UMOUNT, "-l", str(mounted)], check=True)
        jobs += [harness.submit_store(K[4:], range(4)), harness.submit_load(K[:4], range(4, 8))]
        harness.wait()
        results = [harness.result_of(job) for job in jobs]
    ends = [[type(result.error).__name__, str(result.error)] for result in results]
    return {"ends": ends, "below": [str(path) for path in mounted.rglob("*")]}


def unmounted(kind: str, mounted: Path, root: Path) -> dict | None:
    """Run this script; None where nobody may mount."""
    unshare = [UNSHARE, "--mount", "--propagation", "private"]
    try:
        subprocess.run([*unshare, MOUNT, "-t", "tmpfs", "none", str(mounted)], check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    done = subprocess.run(
        [*unshare, sys.executable, __file__, kind, str(mounted), str(root)],
        capture_output=True,
        check=False,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(tell(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
