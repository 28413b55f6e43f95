"""The primary's pages go back to the system, whoever still has a view of them."""

import ctypes
import gc
import mmap

import numpy as np
import pytest
from runtime.smaps import address_of, resident_bytes

from kvoffload_async.abc.transport import hold_pages
from kvoffload_async.runtime.buffer import PrimaryBuffer

MIB = 1 << 20


class Client:
    """Somebody's library."""

    def __init__(self, view):
        self.page = view[:]


def fail(view):
    row = view[:]
    raise OSError(5, f"{len(row)} rows")


def error_of(call, view):
    try:
        call(view)
    except OSError as error:
        return error


def in_an_error(view):
    return error_of(fail, view)


@pytest.mark.parametrize("hold", [Client, in_an_error, np.asarray], ids=lambda hold: hold.__name__)
def test_pages_are_given_back_although_a_view_is_held(hold, caplog):
    buffer = PrimaryBuffer(4, MIB)
    np.asarray(buffer.view)[:] = 7
    address = address_of(buffer.view)
    holder = hold(buffer.view)
    assert resident_bytes(address) >= 4 * MIB
    assert not buffer.release()
    assert resident_bytes(address) == 0
    assert "there are views of it" in caplog.text
    assert "its pages were freed; release views before closing" in caplog.text
    del holder
    gc.collect()
    assert buffer.release()


def test_what_a_holder_still_writes_goes_nowhere_and_harms_nobody():
    buffer = PrimaryBuffer(2, 4096)
    rows = np.asarray(buffer.view)
    rows[:] = 7
    assert not buffer.release()
    assert not rows.any()
    rows[1] = 3
    del rows
    assert buffer.release()


def test_memory_that_is_held_stays_as_it_is_until_the_last_holder_lets_go(caplog):
    buffer = PrimaryBuffer(2, 4096)
    rows = np.asarray(buffer.view)
    rows[:] = 7
    release = [hold_pages(buffer.view[1:], who) for who in ("one", "another")]
    assert not buffer.release()
    assert caplog.messages == [
        "the primary buffer stays mapped until it is no longer in use by one, another"
    ]
    release[0]()
    release[0]()
    assert rows.all(), "the other one still copies"
    del rows
    release[1]()
    assert buffer.release()
    with pytest.raises(ValueError, match="released"):
        len(buffer.view)


def test_letting_go_of_memory_in_use_releases_nothing():
    buffer = PrimaryBuffer(2, 4096)
    hold_pages(buffer.view, "a transport")()
    buffer.view[0, 0] = 1
    assert buffer.release()


@pytest.mark.parametrize("memory", [bytearray(64), mmap.mmap(-1, 4096)])
def test_memory_that_is_somebody_elses_is_left_alone(memory):
    with memoryview(memory) as view:
        hold_pages(view, "a transport")()


def test_pages_that_are_locked_are_said_to_stay(caplog):
    buffer = PrimaryBuffer(2, 4096)
    rows = np.asarray(buffer.view)
    assert ctypes.CDLL(None).mlock(ctypes.c_void_p(address_of(buffer.view)), 2 * 4096) == 0
    assert not buffer.release()
    assert "could not be freed" in caplog.text
    del rows
    assert buffer.release()
