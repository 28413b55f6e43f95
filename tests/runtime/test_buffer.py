"""The primary tier's memory, as the system sees it."""

from pathlib import Path

import numpy as np
import pytest
from runtime.smaps import address_of, fields_at

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.buffer import PrimaryBuffer

MIB = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no huge pages")
def test_huge_pages_are_asked_for():
    buffer = PrimaryBuffer(8, MIB)
    assert "hg" in fields_at(address_of(buffer.view))["VmFlags"]
    assert buffer.release()


def test_rows_are_zero_at_the_start_and_touched_or_not():
    for prefault in (True, False):
        buffer = PrimaryBuffer(3, 4096, prefault=prefault)
        assert not np.asarray(buffer.view).any()
        assert buffer.release()


def test_more_memory_than_there_is_names_the_key_and_the_remedy():
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: cannot map \d+ bytes.*use less"):
        PrimaryBuffer(1 << 40, 1 << 20)
