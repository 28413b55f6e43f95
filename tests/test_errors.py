"""What an error keeps: the frames that it has passed through, until they are dropped."""

import dataclasses
import gc
import weakref

import pytest

from kvoffload_async.errors import TierError, drop_tracebacks, text_of


class Payload:
    """What a frame holds."""


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    number: int


def fail(error, alive):
    payload = Payload()
    alive.append(weakref.ref(payload))
    raise error


def caught(error, alive):
    try:
        fail(error, alive)
    except Exception as raised:  # noqa: BLE001 - whatever it was given
        return raised


def with_cause(alive):
    error = caught(TierError(), alive)
    error.__cause__ = caught(OSError(5, "io"), alive)
    return error


def with_context(alive):
    try:
        try:
            fail(OSError(5, "io"), alive)
        except OSError:
            fail(TierError(), alive)
    except TierError as error:
        return error


def with_both(alive):
    error = with_context(alive)
    error.__cause__ = caught(ValueError(), alive)
    return error


def with_group(alive):
    return ExceptionGroup("jobs", [with_both(alive), ExceptionGroup("more", [with_cause(alive)])])


def in_a_circle(alive):
    first, second = caught(OSError(), alive), caught(TierError(), alive)
    first.__context__, second.__cause__ = second, first
    return first


def frozen(alive):
    return caught(FrozenError(3), alive)


@pytest.mark.parametrize(
    "make", [with_cause, with_context, with_both, with_group, in_a_circle, frozen]
)
def test_an_error_without_tracebacks_keeps_nothing_of_its_frames(make):
    gc.collect()
    gc.disable()
    try:
        alive = []
        error = make(alive)
        assert any(ref() for ref in alive)
        drop_tracebacks(error)
        assert not any(ref() for ref in alive)
    finally:
        gc.enable()


def test_no_error_is_fine():
    drop_tracebacks(None)


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TierError("down"), "down"),
        (TierError(), "TierError"),
        (OSError("down"), "OSError: down"),
        (OSError(), "OSError"),
        (Unspeakable(), "Unspeakable"),
        (type("Odd", (Unspeakable, TierError), {})(), "Odd"),
    ],
)
def test_an_error_says_what_it_can_and_is_never_another_one(error, text):
    assert text_of(error) == text
