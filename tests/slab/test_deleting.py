"""A deletion is confirmed once it is in the journal."""

import errno

import pytest
from faulty_files import FaultyFileOps
from slab.stores import K, sound

from kvoffload_async.errors import StateError, TierBusyError, TierError


def test_a_deletion_is_in_the_journal_when_it_is_confirmed(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:3])
        assert harness.run(harness.tier.delete(K[:2])) == {}
        assert slab_store.addresses().keys() == {K[2]}, "as after a kill"
        sound(harness.tier)


def test_a_journal_that_cannot_be_written_fails_a_deletion_until_it_can(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:3])
        ops.fail(errno.EIO, on="pwrite pwritev", times=1)
        with pytest.raises(TierError):
            harness.run(harness.tier.delete(K[:1]))
        assert harness.contains(K[:3]) == set(K[1:3])
        assert harness.run(harness.tier.delete(K[:1])) == {}
        assert slab_store.addresses().keys() == set(K[1:3])
        sound(harness.tier)


def test_a_pinned_block_is_deleted_when_its_last_pin_is_gone(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:2])
        harness.tier.pin(K[:1])
        left = harness.run(harness.tier.delete(K[:2]))
        assert list(map(type, left.values())) == [TierBusyError]
        assert harness.contains(K[:2]) == {K[0]}
        harness.tier.unpin(K[:1])
        assert harness.run(harness.tier.delete(K[:2])) == {}
        assert not harness.contains(K[:2])
        sound(harness.tier)


def test_a_cursor_that_is_no_key_is_refused(slab_store):
    with slab_store.open() as harness:
        for cursor in ("", "x", "00"):
            with pytest.raises(StateError, match="cursor"):
                harness.run(harness.tier.list_keys(cursor, 1))
