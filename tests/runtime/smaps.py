"""What the system says of a mapping of this process."""

import ctypes
from pathlib import Path


def address_of(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))


def fields_at(address):
    """Return the fields of the mapping at an address; see smaps in proc(5)."""
    fields = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside:
            fields[head.rstrip(":")] = rest.split()
    assert fields, f"nothing is mapped at {address:#x}"
    return fields


def resident_bytes(address):
    """Return how much of the mapping at an address is in memory."""
    return int(fields_at(address)["Rss"][0]) * 1024
