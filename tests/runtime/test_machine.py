"""What is found out of the machine: its memory, its filesystems, and mounts that do not answer."""

import threading

import pytest

from kvoffload_async.runtime.helper_thread import answered
from kvoffload_async.runtime.machine import Limit, filesystem_limit, memory_limit

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """Return what makes a machine's `/proc` and `/sys`, with so much memory."""

    def make(group, limits, total_mib=64):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(
            f"MemFree: 1 kB\nMemTotal:   {total_mib * 1024} kB\n"
        )
        (tmp_path / "proc/self/cgroup").write_text(group)
        for path, text in limits.items():
            file = tmp_path / "sys/fs/cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return memory_limit(tmp_path)

    return make


MACHINE = Limit(64 * MIB, "this machine's memory")


def group(size_mib):
    return Limit(size_mib * MIB, "the memory limit of its control group")


@pytest.mark.parametrize(
    ("own", "limits", "limit"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, MACHINE),
        ("0::/a/b\n", {"a/b/memory.max": f"{8 * MIB}\n"}, group(8)),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": f"{4 * MIB}\n"}, group(4)),
        ("0::/of/the/host\n", {"memory.max": f"{2 * MIB}\n"}, group(2)),
        (
            "5:cpu,memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": f"{3 * MIB}\n"},
            group(3),
        ),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{1 << 62}\n"}, MACHINE),
        ("4:cpuset:/a\n", {"memory.max": f"{MIB}\n"}, MACHINE),
    ],
)
def test_the_tightest_bound_on_memory_is_found(machine, own, limits, limit):
    assert machine(own, limits) == limit


def test_a_system_that_tells_nothing_has_no_limit(tmp_path):
    assert memory_limit(tmp_path) is None


def test_this_machine_has_memory_and_a_disk(tmp_path):
    assert memory_limit().size_bytes > MIB
    assert filesystem_limit(str(tmp_path)).size_bytes > MIB


def test_a_filesystem_without_a_size_has_no_limit():
    assert filesystem_limit("/proc") is None


def test_an_answer_is_returned_and_an_error_raised():
    assert answered(lambda: 3, 10.0) == 3
    with pytest.raises(PermissionError):
        answered(open_nothing, 10.0)


def open_nothing():
    raise PermissionError(13, "no")


def test_a_call_that_hangs_is_left_to_itself():
    hung = threading.Event()
    with pytest.raises(TimeoutError, match=r"no response within 0\.01 s"):
        answered(hung.wait, 0.01)
    hung.set()
