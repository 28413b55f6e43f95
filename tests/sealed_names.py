"""The contract of tiers whose names are sealed, and what such tiers tell of their blocks."""

import logging
import os
from functools import partial

import numpy as np

from kvoffload_async.testing.harness import TierHarness, content_of, key_of
from kvoffload_async.tiers._sealed_names import NameKeys, SealedNames, read_name_keys
from kvoffload_async.tiers.files.sealing import EncryptionKey

TEXT = "a secret that names are sealed with"


def key_file(folder, text=TEXT):
    """Return the path of a new file with a key."""
    path = folder / f"name-key-{len(list(folder.glob('name-key-*')))}"
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def sealing(create, paths):
    """Return a function that creates a tier and seals its names, with the keys in some files."""
    return lambda: SealedNames(create(), NameKeys(read_name_keys(paths)))


def name_of(tier, key, number=0):
    """Return the key that stands in a key's place."""
    (name,) = tier._names.sealed(number, [key])
    return name


def found_in(text, secrets):
    """Return those secrets of which the first 8 bytes are somewhere in a text."""
    firsts = {int.from_bytes(secret[:8], "little"): secret for secret in secrets}
    known = np.array(sorted(firsts), dtype=np.uint64)
    begins, found = np.zeros(1 << 16, bool), set()
    begins[known & 0xFFFF] = True  # a search for each window would take seconds
    for begin in range(8):
        windows = np.frombuffer(text, np.uint64, (len(text) - begin) // 8, begin)
        windows = windows[begins[windows & 0xFFFF]]
        at = np.searchsorted(known, windows) % len(known)
        found.update(windows[known[at] == windows].tolist())
    return [firsts[first] for first in sorted(found)]


def content_below(*folders):
    """Return the paths, bytes and extended attributes of all files below folders."""
    told = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            told.append(str(path).encode())
            if path.is_file():
                told += [path.read_bytes(), *(os.getxattr(path, n) for n in os.listxattr(path))]
    return b"\n".join(told)


def check_secrecy(create, content, folder, caplog, *, block_bytes=512):
    """Check that only without keys the blocks of 1,000 prompts are found in a store and the log.

    Args:
        create: Creates a tier on the store, with the given options.
        content: Returns all that the store has.
        folder: A folder for the name key.
        caplog: The fixture.
        block_bytes: Bytes of a block.
    """
    caplog.set_level(logging.DEBUG)
    keys = [key_of(1_000_000 + i) for i in range(1000)]  # not those of other tests
    names = [*keys, *(key.hex().encode() for key in keys)]
    middle = block_bytes // 2
    pieces = [content_of(key, block_bytes)[at:].tobytes() for key in keys for at in (0, middle, -8)]
    secret = EncryptionKey(TEXT[::-1].encode())
    with_keys = sealing(partial(create, encryption_keys=(secret,)), [key_file(folder)])
    for new_tier, has_keys in ((with_keys, True), (create, False)):
        with TierHarness(new_tier(), 250, block_bytes) as harness:
            for first in range(0, 1000, 250):
                assert harness.store(keys[first : first + 250]) == {}
                assert harness.load(keys[first : first + 250]) == {}
        told = content() + caplog.text.encode()
        assert TEXT.encode() not in told
        assert TEXT[::-1].encode() not in told
        found = found_in(told, names), found_in(told, pieces)
        assert [min(len(each), 1000) for each in found] == ([0, 0] if has_keys else [1000, 1000])


class SealedConformance:
    """Comes before a conformance class whose `damage` finds a block by its key."""

    def damage(self, tier, key):
        return super().damage(tier._tier, name_of(tier, key))
