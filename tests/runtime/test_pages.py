"""The primary's pages go back to the system, whoever still has a view of them."""

import asyncio
import ctypes
import gc
import logging
import mmap
from types import FunctionType, ModuleType

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


class SlottedClient:
    __slots__ = ("page",)

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


def in_the_context_of_an_error(view):
    error = ValueError()
    error.__context__ = in_an_error(view)
    return error


def in_a_group_of_errors(view):
    return ExceptionGroup("several", [in_an_error(view)])


def in_a_record_of_a_log(view):
    return logging.LogRecord("n", 1, "f", 1, "%s", (in_an_error(view),), None)


def in_a_future(view):
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    future.set_exception(in_an_error(view))
    future.exception()
    loop.close()
    return future


def in_a_closure(view):
    row = view[:]

    def use():
        return row

    return use


def in_containers(view):
    return Client({"rows": [(view[:],)]}.setdefault("rows")[0])


def in_an_iterator(view):
    def rows(row):
        yield row

    iterator = rows(view[:])
    next(iterator)
    return iterator


def in_a_coroutine(view):
    async def copy(row):
        await asyncio.sleep(0)
        return row

    coroutine = copy(view[:])
    coroutine.send(None)
    return coroutine


HERE = __name__
HOLDERS = {
    Client: f"an object of type {HERE}.Client",
    SlottedClient: f"an object of type {HERE}.SlottedClient",
    in_an_error: "the frame of fail",
    in_the_context_of_an_error: "the frame of fail",
    in_a_group_of_errors: "the frame of fail",
    in_a_record_of_a_log: "the frame of fail",
    in_a_future: "the frame of fail",
    in_a_closure: f"the function {HERE}.in_a_closure.<locals>.use",
    in_containers: f"an object of type {HERE}.Client",
    in_an_iterator: "the generator in_an_iterator.<locals>.rows",
    in_a_coroutine: "the coroutine in_a_coroutine.<locals>.copy",
    np.asarray: "arrays, code in C or running functions",
}


@pytest.mark.parametrize("hold", HOLDERS, ids=lambda hold: hold.__name__)
def test_pages_are_given_back_although_a_view_is_held_and_its_holder_is_named(hold, caplog):
    buffer = PrimaryBuffer(4, MIB)
    np.asarray(buffer.view)[:] = 7
    address = address_of(buffer.view)
    holder = hold(buffer.view)
    assert resident_bytes(address) >= 4 * MIB
    assert not buffer.release()
    assert resident_bytes(address) == 0
    assert "its pages were freed" in caplog.text
    assert HOLDERS[hold] in caplog.text.rpartition("held by")[2]
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


def test_a_view_of_a_module_is_said_to_be_the_modules_alone(caplog):
    buffer = PrimaryBuffer(2, 4096)
    module = ModuleType("theirs")
    module.use = FunctionType(fail.__code__, vars(module))
    module.kept = buffer.view[:]
    assert not buffer.release()
    named = caplog.text.rpartition("held by")[2]
    assert named.strip() == "the module theirs"
    del module.kept
    assert buffer.release()


def test_no_more_holders_are_named_than_fit_a_line(caplog):
    buffer = PrimaryBuffer(2, 4096)
    kept = [type(f"Client{number}", (Client,), {})(buffer.view) for number in range(20)]
    assert not buffer.release()
    assert caplog.text.count("an object of type") == 8
    del kept
    gc.collect()
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
