"""The error tree: the name of an error says who is at fault.

`ConfigError` is the fault of whoever wrote the configuration, `InputError` of whoever named a file
or a directory, `StateError` and `ClosedError` of the calling code, `BusyError` of nobody (a bound
was reached: try again later), `TierError` of a storage tier, `TransportError` of the device
transport. Errors of third-party libraries are mapped onto this tree once, at the edge where they
enter.
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A configuration value is unusable; the message names the key, the value and the remedy."""


class UnknownNameError(ConfigError):
    """A name (tier, policy, key) is not known; the message lists the ones that are."""


class InputError(OffloadError, ValueError):
    """What a user names (a directory, a trace, a file) cannot be used; the message is one line."""


class StalledError(OffloadError):
    """Requests wait, and the engine has made no progress for too long: a defect, or a dead tier."""


class StateError(OffloadError):
    """The caller broke a precondition: an unknown request, unequal lengths, a foreign job."""


class IllegalTransitionError(StateError):
    """An event reached a job in a state in which it cannot happen: a defect, never bad luck."""


class InvariantError(OffloadError):
    """An invariant does not hold: a defect of this package, found by its own checks."""


class ClosedError(StateError):
    """The object was closed before the call."""


class BusyError(OffloadError):
    """A bound was reached; nothing was changed, and the call may succeed later."""


class InvalidatedError(OffloadError):
    """The cache was reset, or its generation changed, under the call: compute the blocks."""


class TierError(OffloadError):
    """A block of a job failed in a storage tier."""


class TierUnavailableError(TierError):
    """The tier, or the device or service behind it, failed; not the fault of one block."""


class TierTimeoutError(TierUnavailableError):
    """A job did not end before its deadline, or a tier was not open before that."""


class ShardUnavailableError(TierUnavailableError):
    """The server of the tier that has the block failed; its other servers work."""


class TierBusyError(TierError, BusyError):
    """The tier's mailbox was full when the job arrived."""


class RepeatedKeyError(TierError, StateError):
    """The job names a key twice; nothing of it was moved."""


class UnknownSlotError(TierError, StateError):
    """The job names a slot that the primary tier does not have; nothing of it was moved."""


class TierFullError(TierError):
    """No room was left for the block, and none could be made."""


class TierClosedError(TierError):
    """The tier was shut down before the job had ended."""


class BlockMissingError(TierError):
    """The tier does not have the block."""


class CorruptBlockError(TierError):
    """The stored bytes are not the bytes that were given: a wrong checksum or a short read."""


class JobCancelledError(TierError):
    """The job's task was cancelled."""


class TransportError(OffloadError):
    """A copy between device and host failed."""


def text_of(error: BaseException) -> str:
    """Return what an error says, with its class where that is a third party's.

    Never raises: str() of a third party's error may.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - third-party code
        return name
    if not text:
        return name
    return text if isinstance(error, OffloadError) else f"{name}: {text}"


def drop_tracebacks(error: BaseException | None) -> None:
    """Let go of the frames of an error, of its causes and contexts, and of the errors in a group.

    Who keeps an error would keep what the functions that it has passed through were working on;
    on Python 3.12 and 3.13 what everybody who awaited them was working on, too, as the frame of a
    coroutine that has ended still refers to its awaiter's (cpython issue 100964). A mapping cannot
    be closed under the slices among that.
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
