"""Bypassing the page cache, and giving that up."""

import errno
import os

import pytest
from faulty_files import FaultyFileOps, is_block, is_temp
from fs.directories import BLOCK, item, load_key, store, store_key

from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.fs.operations import StoreStatus

A, B, C, D = (key_of(number) for number in range(4))


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_direct_io_that_a_store_cannot_have_is_given_up_with_one_warning(directory, caplog, call):
    """Regressions 43674, 44016, 49734: the tier was silently dead."""
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on=call, when=lambda c: bool(c.flags & os.O_DIRECT))
    files = directory.files(ops, direct_io=True)
    for key in (A, B):
        assert store_key(files, key).status is StoreStatus.WRITTEN
        assert load_key(files, key) is None
    assert caplog.text.count("direct I/O does not work here") == 1
    assert not directory.temps()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_direct_io_that_a_load_cannot_have_is_given_up_with_one_warning(directory, caplog, call):
    store(directory.files(), item(A), item(B, 1))
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on=call, when=lambda c: bool(c.flags & os.O_DIRECT))
    files = directory.files(ops, direct_io=True)
    assert load_key(files, A) is None
    assert load_key(files, B) is None
    assert caplog.text.count("direct I/O does not work here") == 1


def test_direct_io_is_given_up_in_a_reused_file_too(directory):
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on="pwritev", when=lambda c: bool(c.flags & os.O_DIRECT))
    files = directory.files(ops, direct_io=True, reuses_inodes=True)
    directory.put(B, has_digest=True)
    assert store_key(files, A, victim=B).status is StoreStatus.WRITTEN
    assert load_key(files, A) is None


def test_one_threads_giving_up_does_not_fail_another_that_is_in_a_call(directory, caplog):
    ops = FaultyFileOps()
    files = directory.files(ops, direct_io=True)
    flag = files._direct.flag
    error = OSError(errno.EINVAL, "x")
    assert files._direct.refused(flag, error)
    assert files._direct.refused(flag, error)
    assert not files._direct.refused(0, error)
    assert not files._direct.refused(flag, OSError(errno.EIO, "x"))
    assert caplog.text.count("direct I/O") == 1


def test_a_real_misaligned_direct_transfer_falls_back(directory):
    files = directory.files(direct_io=True)
    buffer = bytearray(BLOCK + 1)
    buffer[1:] = content_of(A, BLOCK).tobytes()
    outcome = store_key(files, A, memoryview(buffer)[1:])
    assert outcome.status is StoreStatus.WRITTEN
    assert load_key(files, A) is None


def test_rules_tell_blocks_from_temps(directory):
    ops = FaultyFileOps()
    store_key(directory.files(ops), A)
    names = {call.name for call in ops.calls if is_temp(call)}
    assert {"open", "pwritev", "set_xattr", "close", "publish"} <= names
    assert {call.name for call in ops.calls if is_block(call)} == {"stat"}
