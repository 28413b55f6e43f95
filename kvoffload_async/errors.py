"""The exception hierarchy; the class names the source of the problem.

`ConfigError`: the configuration is wrong. `InputError`: a given file or directory is unusable.
`StateError`, `ClosedError`: the calling code is wrong. `BusyError`: a limit was reached, try again
later. `TierError`: a storage tier failed. `TransportError`: a device transfer failed. Errors of
third-party libraries are mapped to these classes once, where they enter the package.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from kvoffload_async.limits import thread_limits


class OffloadError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ConfigError(OffloadError, ValueError):
    """A configuration value is invalid; the message names the key, the value and the fix."""


class UnknownNameError(ConfigError):
    """A name (tier, policy, key) is unknown; the message lists the known names."""


class InputError(OffloadError, ValueError):
    """A directory, trace or file given by the user cannot be used; the message is one line."""


class StalledError(OffloadError):
    """Requests wait, but the engine has made no progress for too long: a bug, or a dead tier."""


class StateError(OffloadError):
    """The caller broke a precondition: unknown request, unequal lengths, another object's job."""


class IllegalTransitionError(StateError):
    """A job received an event that is illegal in its state; always a bug."""


class InvariantError(OffloadError):
    """An internal check found a violated invariant: a bug in this package."""


class ClosedError(StateError):
    """The object was closed before the call."""


class BusyError(OffloadError):
    """A limit was reached. Nothing was changed, and the call may succeed later."""


class InvalidatedError(OffloadError):
    """The cache was reset, or its generation changed, during the call; compute the blocks."""


class TierError(OffloadError):
    """A storage tier failed to move a block of a job."""

    remedy: ClassVar[str] = ""
    """Remedy that applies to any tier, for log lines; see `remedy_of`."""


class TierUnavailableError(TierError):
    """The tier, or its device or service, failed as a whole; not caused by one block."""

    remedy = "the engine continues without these blocks; fix the cause above"


class TierTimeoutError(TierUnavailableError):
    """A job missed its deadline, or the tier did not open before it."""

    remedy = "check its storage; if it is only slow, raise io_timeout_s"


_SERVER: Final = "check the server and the network; if it is only slow, raise "


class CallTimeoutError(TierTimeoutError):
    """A call to the tier's server missed its own deadline, the tier's `call_timeout_s`."""

    remedy = _SERVER + "the deadline of its calls"


class ServerHangError(TierTimeoutError):
    """The tier's server answered neither a call nor a check within `probe_timeout_s`."""

    remedy = _SERVER + "probe_timeout_s"


class ShardUnavailableError(TierUnavailableError):
    """The server that holds the block failed; the tier's other servers work."""


class TierBusyError(TierError, BusyError):
    """The tier's mailbox was full when the job arrived."""


class JobNotStartedError(TierBusyError):
    """The job, or a block of it, still waited at its deadline, behind others that were served."""

    remedy = "the tier works, but more slowly than jobs arrive: make it faster"


class SlowDownError(TierBusyError):
    """The tier's server works, and asks for fewer calls."""

    remedy = "the server limits its calls: make blocks larger, or raise the server's limit"


class RepeatedKeyError(TierError, StateError):
    """The job contains a key twice; no block was moved."""

    remedy = "a bug of the caller: name each key once"


class UnknownSlotError(TierError, StateError):
    """The job names a slot that the primary tier does not have; no block was moved."""

    remedy = "a bug of the caller: name slots of the primary"


class TierFullError(TierError):
    """The tier had no space for the block and could not free any."""

    remedy = "no blocks are stored until there is space: enlarge its storage"


class TierClosedError(TierError):
    """The tier was shut down before the job ended."""


class BlockMissingError(TierError):
    """The tier does not have the block."""


class CorruptBlockError(TierError):
    """The stored bytes differ from those written: checksum mismatch or short read."""

    remedy = "not served; if this recurs, check the storage"


class JobCancelledError(TierError):
    """The job's task was cancelled."""


class Trouble(enum.Enum):
    """A problem of a tier that is not the error of a job; its value is the general remedy."""

    TOO_SLOW = "raise cpu_bytes_to_use, set write_back to wait, or make the tier faster"
    """The tier works, but blocks were evicted from the primary before it had room for them."""
    SUSPENDED = "its stores are suspended: fix the error that the line of the suspension names"
    """Blocks were evicted from the primary while stores to the tier were suspended."""
    NOT_OPEN = "it is not open: fix the error that its opening names"
    """Blocks were evicted from the primary while the tier was not open."""
    HANGING = "copies past their deadline still run: check whether its storage answers"
    """Blocks were evicted from the primary while overdue copies of the tier still ran."""
    STORES_FAILED = "fix the errors of its stores, which have lines of their own"
    """Blocks were given up after failed stores."""
    CLOSED_TOO_SOON = "to store more of them, raise shutdown_timeout_s"
    """The shutdown ended before pending blocks were stored."""
    PROBE_TIMEOUT = "its blocks count as absent; if the tier is only slow, raise probe_timeout_s"
    """An existence probe was not answered before its deadline."""


Situation = Trouble | type[TierError]
Remedies = Mapping[Situation, str]
"""Situation, or class of an error and of its subclasses -> remedy, for log lines."""


def check_remedies(remedies: object, owner: type) -> Remedies:
    """Return the remedies that a class declares; raises ConfigError if they are no mapping."""
    if not isinstance(remedies, Mapping):
        raise ConfigError(
            f"type: {owner.__qualname__}.remedies is not a mapping of errors and situations to "
            "texts; correct the class"
        )
    return remedies


def remedy_of(situation: Trouble | TierError, own: Remedies) -> str:
    """Return the remedy for a situation; empty if none is known.

    Args:
        situation: The situation; an error stands for its class, then for its base classes.
        own: The tier's remedies, which take precedence over those for any tier.
    """
    if isinstance(situation, Trouble):
        return own.get(situation, situation.value)
    for cls in type(situation).__mro__:
        if issubclass(cls, TierError) and (text := own.get(cls) or vars(cls).get("remedy")):
            return str(text)
    return ""


class TransportError(OffloadError):
    """A copy between device and host failed."""


def text_of(error: BaseException) -> str:
    """Return an error's message, prefixed with the class name for third-party errors.

    Never raises, although str() of a third-party error may.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - third-party code
        return name
    if not text:
        return name
    return text if isinstance(error, OffloadError) else f"{name}: {text}"


_NO_THREAD: Final = "can't start new thread"
_SHORTAGES: Final = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "give this process more memory",
    errno.EAGAIN: "raise this process's limits of threads (ulimit -u, pids.max of its cgroup)",
}


def shortage_remedy(error: BaseException) -> str:
    """Return the remedy if descriptors, memory or threads are exhausted; empty for other errors.

    Errors of `threading` and of the dynamic linker have no errno, so their texts are compared.
    """
    code: int | None = getattr(error, "errno", None)
    if isinstance(error, MemoryError):
        code = errno.ENOMEM
    elif code is None:
        text = str(error).replace(_NO_THREAD, os.strerror(errno.EAGAIN))
        code = next((code for code in _SHORTAGES if os.strerror(code) in text), 0)
    remedy = _SHORTAGES.get(code, "")
    return f"{remedy}: {thread_limits()}" if code == errno.EAGAIN else remedy


@contextlib.contextmanager
def naming_shortage(what: str) -> Iterator[None]:
    """Convert an error due to exhausted descriptors, memory or threads to one with the remedy.

    Args:
        what: What is impossible without them, with the keys and values that matter.

    Raises:
        TierUnavailableError: Something is exhausted.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not (remedy := shortage_remedy(error)):
            raise
        raise TierUnavailableError(f"{what} ({text_of(error)}); {remedy}") from error


def drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of an error, its causes and contexts, and the errors in a group.

    A traceback keeps the local variables of every frame that the error passed through. On Python
    3.12 and 3.13 it also keeps those of the awaiting coroutines, because the frame of a finished
    coroutine still refers to its awaiter (cpython issue 100964). Slices of a mapping among those
    variables prevent the mapping from being closed.
    """
    seen: set[int] = set()
    rest = [error]
    while rest:
        current = rest.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        BaseException.with_traceback(current, None)  # a frozen one refuses the assignment
        rest += (current.__cause__, current.__context__)
        if isinstance(current, BaseExceptionGroup):
            rest += current.exceptions
