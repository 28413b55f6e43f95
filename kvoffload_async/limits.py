"""Limits that control groups and the system set for this process."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from pathlib import Path


def group_limits(
    controller: str, files: Mapping[int, str], root: Path = Path("/")
) -> Iterator[tuple[Path, int]]:
    """Yield the limits of this process's control group and its ancestors, with their files.

    Args:
        controller: Name of the controller, such as "memory".
        files: Version of control groups, 1 or 2 -> the file with the limit.
        root: Directory that contains `proc` and `sys`.
    """
    for line in lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            mount, file = root / "sys/fs/cgroup" / controller, files[1]
        elif number == "0":
            mount, file = root / "sys/fs/cgroup", files[2]
        else:
            continue
        # In a container the path may be the host's: then only mounted groups are readable.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                for limit in lines(folder / file):
                    if limit.isdecimal():
                        yield folder / file, int(limit)


def thread_limits(root: Path = Path("/")) -> str:
    """Describe the limits on this process's number of threads: file or name, and value.

    If a control group is full, only that one.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    found = []
    for file, limit in group_limits("pids", {1: "pids.max", 2: "pids.max"}, root):
        found.append(f"{file} is {limit}")
        if any(int(used) >= limit for used in lines(file.with_name("pids.current"))):
            return found[-1]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY:
        found.append(f"RLIMIT_NPROC is {soft}, for all processes of this user")
    for name in ("threads-max", "pid_max"):
        file = root / "proc/sys/kernel" / name
        found += (f"{file} is {limit}" for limit in lines(file))
    return ", ".join(found)


def lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
