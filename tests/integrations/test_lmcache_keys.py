"""Keys of LMCache's objects: each comes back as it was, or is refused; other names are nobody's."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload_async.config import TenantOptions, UnknownTenant
from kvoffload_async.facade.tenants import Tenants, untagged
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


TENANTS = [TenantOptions(name=name) for name in ("a", "t" * 100)]
SHARED, CLOSED = (Tenants(TENANTS, unknown) for unknown in UnknownTenant)


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


@given(object_keys, st.sampled_from(["a", "t" * 100, "b", "default", ""]))
@example(ObjectKey(b"x" * 64, "m", 0, 0, ""), "t" * 100)
@example(ObjectKey(b"x" * 81, "m", 0, 0, ""), "")
def test_a_tagged_key_comes_back_as_it_was_or_is_refused(key, salt):
    key = replace(key, cache_salt=salt)
    keys = Keys(ObjectKey, SHARED)
    try:
        encoded = keys.encode(key)
    except (OverflowError, ValueError):
        return
    assert len(encoded) <= MAX_KEY_BYTES
    assert SHARED.names[SHARED.tenant_of(encoded)] == (salt if salt in SHARED.names else "default")
    assert keys.decode("m", encoded) == key
    assert untagged(encoded) == Keys(ObjectKey).encode(key) or len(encoded) > MAX_KEY_BYTES - 32


def test_a_key_of_an_unknown_salt_is_none_if_such_objects_are_not_stored():
    keys = Keys(ObjectKey, CLOSED)
    key = ObjectKey(bytes(32), "m", 0, 0, "b")
    assert keys.encode(key) is None
    assert keys.decode("m", Keys(ObjectKey, SHARED).encode(key)) is None
    assert keys.encode(replace(key, cache_salt="a")) is not None


@pytest.mark.parametrize("tag", [b"", SHARED.tag(0), b"12345678"])
def test_a_name_with_the_tag_of_another_tenant_is_no_objects(tag):
    keys = Keys(ObjectKey, SHARED)
    plain = Keys(ObjectKey).encode(ObjectKey(bytes(32), "m", 0, 0, "a"))
    assert keys.decode("m", OffloadKey(plain[:1] + tag + plain[1:])) is None
