"""Runs the helper with a made-up library, whose store is a folder. Needs nothing but Python.

    python -I -S fake_library.py HELPER FOLDER PARENT SOCKET

A file in the folder `faults` says what goes wrong; one called `reached` there tells that it has.
"""

import ctypes
import hashlib
import os
import runpy
import sys
import threading
import types
from pathlib import Path

NOT_FOUND = -704


class ReplicateConfig:
    replica_num = 0


class MooncakeDistributedStore:
    def setup(self, *_):
        fail("hang-in-setup", hang)
        return -1 if is_wanted("no-setup") else 0

    def register_buffer(self, address, size):
        self._registered = range(address, address + size)
        return -600 if is_wanted("no-register") else 0

    def batch_is_exist(self, names):
        if names == ["kvo:check"]:
            with (FOLDER / "checks").open("a") as checks:
                checks.write("1")
        else:
            fail("wait-in-exist", threading.Event().wait)
        fail("hang-in-exist", hang)
        return [int(file_of(name).exists()) for name in names]

    def batch_put_from_multi_buffers(self, names, addresses, sizes, how):
        assert how.replica_num == 1
        fail("hang-in-put", hang)
        fail("wait-in-put", threading.Event().wait)
        if is_wanted("raise-in-put"):
            raise RuntimeError("so it says")
        if is_wanted("exit-in-put"):
            raise SystemExit("so it says")
        if is_wanted("garbage-in-put"):
            os.write(SOCKET, (FAULTS / "garbage-in-put").read_bytes())
            reached()
            threading.Event().wait()
        return [self._put(*value) for value in zip(names, addresses, sizes, strict=True)]

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        fail("hang-in-get", hang)
        return [self._get(*value) for value in zip(names, addresses, sizes, strict=True)]

    def batch_remove(self, names, is_forced):
        assert is_forced
        return [self._remove(name) for name in names]

    def close(self):
        fail("hang-in-close", hang)

    def _put(self, name, addresses, sizes):
        content = ctypes.string_at(*self._at(addresses, sizes))
        fail("abort-in-put", os.abort)
        if not file_of(name).exists():
            file_of(name).write_bytes(content)
        return 0

    def _get(self, name, addresses, sizes):
        if not file_of(name).exists():
            return NOT_FOUND
        content = file_of(name).read_bytes()
        address, size = self._at(addresses, sizes)
        ctypes.memmove(address, content, min(size, len(content)))
        return len(content)

    def _remove(self, name):
        if not file_of(name).exists():
            return NOT_FOUND
        file_of(name).unlink()
        return 0

    def _at(self, addresses, sizes):
        ((address,), (size,)) = addresses, sizes
        assert address in self._registered
        assert address + size - 1 in self._registered
        return address, size


def file_of(name):
    return FOLDER / hashlib.sha256(name.encode()).hexdigest()


def is_wanted(fault):
    return (FAULTS / fault).exists()


def reached():
    (FAULTS / "reached").touch()


def fail(fault, how):
    if is_wanted(fault):
        reached()
        how()


def hang():
    """Hang for ever, with the interpreter's lock, as only native code can."""
    ctypes.PyDLL(None).pause()


if __name__ == "__main__":
    HELPER, folder, parent, descriptor = sys.argv[1:]
    FOLDER, SOCKET = Path(folder), int(descriptor)
    FAULTS = FOLDER / "faults"
    library = types.ModuleType("mooncake.store")
    library.ReplicateConfig, library.MooncakeDistributedStore = (
        ReplicateConfig,
        MooncakeDistributedStore,
    )
    package = types.ModuleType("mooncake")
    package.store = library
    sys.modules |= {"mooncake": package, "mooncake.store": library}
    sys.argv = [HELPER, parent, descriptor]
    runpy.run_path(HELPER, run_name="__main__")
