"""Keys of LMCache's objects: each comes back as it was, or is refused; other names are nobody's."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload_async.integrations.lmcache.keys import Keys
from kvoffload_async.tables.keymap import MAX_KEY_BYTES
from kvoffload_async.types import OffloadKey, make_offload_key


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str

    def __post_init__(self):
        if "@" in self.cache_salt:
            raise ValueError("@")


object_keys = st.builds(
    ObjectKey,
    st.binary(max_size=300),
    st.just("m"),
    st.integers(-1, 2**2100),
    st.integers(0, 2**33),
    st.text(st.characters(exclude_characters="@"), max_size=128),
)


@given(object_keys)
@example(ObjectKey(b"x" * 300, "m", 1, 0, ""))
@example(ObjectKey(b"", "m", 2**2100, 0, ""))
@example(ObjectKey(b"", "m", -1, 0, ""))
@example(ObjectKey(b"", "m", 0, 2**32, ""))
@example(ObjectKey(b"", "m", 0, 0, "\ud800"))
@example(ObjectKey(b"x" * 72, "m", 0, 0, "s" * 128))
@example(ObjectKey(b"x" * 89, "m", 0, 0, ""))
def test_a_key_comes_back_as_it_was_or_is_refused(key):
    keys = Keys(ObjectKey)
    try:
        encoded = keys.encode(key)
    except (OverflowError, ValueError):
        return
    assert len(encoded) <= MAX_KEY_BYTES
    assert keys.decode("m", encoded) == key


@pytest.mark.parametrize("size", [32, 72, 89])
def test_a_hash_that_fits_is_not_refused(size):
    Keys(ObjectKey).encode(ObjectKey(bytes(size), "m", 0, 0, ""))


@given(st.binary(max_size=100))
@example(b"\xc8" * 40)
@example(b"\xff" + bytes(16))
@example(b"\x01@" + bytes(2))
@example(b"")
def test_a_name_that_is_no_key_of_ours_is_no_objects(name):
    keys = Keys(ObjectKey)
    for key in (OffloadKey(name), make_offload_key(name, 0)):
        found = keys.decode("m", key)
        assert found is None or (found.model_name == "m" and isinstance(found.cache_salt, str))
