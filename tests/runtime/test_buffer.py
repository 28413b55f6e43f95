"""The primary tier's memory, as the system sees it."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.buffer import PrimaryBuffer

MIB = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address):
    """Return the flags of the mapping at an address; see VmFlags in proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and head == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no huge pages")
def test_huge_pages_are_asked_for():
    buffer = PrimaryBuffer(8, MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer.view.cast("B")))
    assert "hg" in flags_at(address)
    assert buffer.release()


def test_rows_are_zero_at_the_start_and_touched_or_not():
    for prefault in (True, False):
        buffer = PrimaryBuffer(3, 4096, prefault=prefault)
        assert not np.asarray(buffer.view).any()
        assert buffer.release()


def test_more_memory_than_there_is_names_the_key_and_the_remedy():
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: cannot map \d+ bytes.*use less"):
        PrimaryBuffer(1 << 40, 1 << 20)
