"""A thread for calls that block."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from kvoffload_async.errors import ClosedError, naming_shortage

T = TypeVar("T")

_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class HelperThread:
    """Makes blocking calls, one after the other, from its construction until `end`.

    For calls that must be possible when the system gives no further thread, such as closing. The
    thread is a daemon, so that a call that hangs does not keep the process alive; it ends with this
    object. Thread-safe.
    """

    def __init__(self, name: str) -> None:
        """Start the thread; raises RuntimeError if the thread cannot be started."""
        calls: _Calls = SimpleQueue()
        self._calls = calls
        self._thread = threading.Thread(target=_serve, args=(calls,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, calls.put, None)

    def call(self, call: Callable[[], T]) -> Future[T]:
        """Make a call on the thread; the future has its result or exception.

        Raises:
            ClosedError: The thread has been told to end.
        """
        if not self._end.alive:
            raise ClosedError(f"thread {self._thread.name} was ended before the call")
        answer: Future[T] = Future()
        self._calls.put((answer, call))
        return answer

    def end(self, timeout_s: float = 0.0) -> None:
        """Let the thread end after the calls queued so far, and wait for its end; idempotent."""
        self._end()
        self._thread.join(timeout_s)


def answered(call: Callable[[], T], timeout_s: float) -> T:
    """Return the result of a system call that may hang forever, for example on a dead mount.

    Raises:
        TimeoutError: It did not end in time; it continues on its thread.
        TierUnavailableError: There is no thread for it.
    """
    with naming_shortage("the thread for a system call cannot be started"):
        helper = HelperThread("kvoffload-ask")
    answer = helper.call(call)
    helper.end()
    return result_of(answer, timeout_s)


def result_of(answer: Future[T], timeout_s: float) -> T:
    """Return the result of a call; raises TimeoutError if it has not ended in time."""
    if not wait([answer], timeout_s).done:
        raise TimeoutError(f"no response within {timeout_s} s")
    return answer.result()


def _serve(calls: _Calls) -> None:
    while (work := calls.get()) is not None:
        answer, call = work
        del work
        try:
            result, error = call(), None
        except BaseException as raised:  # noqa: BLE001 - raised in the waiting thread
            result, error = None, raised
        del call  # whoever gets the result may release what the call refers to
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
        del answer, result, error
