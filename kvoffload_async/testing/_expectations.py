"""Failures that explain themselves: what was expected, what came, and which promise was broken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, ParamSpec, Protocol

import numpy as np

from kvoffload_async.errors import text_of
from kvoffload_async.testing.harness import GUARD, Rows, content_of, key_of
from kvoffload_async.types import OffloadKey

_NUM_NAMES: Final = 64
_NAMES: Final = {key_of(number): f"K[{number}]" for number in range(_NUM_NAMES)}

P = ParamSpec("P")


def promise(text: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Add a sentence of the contract to every failure of a test, the tier's own errors included."""

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                error.add_note(f"The contract of AsyncTier promises: {text}")
                raise

        return run

    return decorate


def expect(what: str, got: object, expected: object) -> None:
    """Compare two values.

    Raises:
        AssertionError: They differ; the text names both, and keys by number.
    """
    if got != expected:
        raise AssertionError(f"{what}: expected {_shown(expected)}, got {_shown(got)}")


def expect_failures(
    what: str, failures: Mapping[int, Exception], expected: Mapping[int, type[Exception]]
) -> None:
    """Compare the failures of a job, by position, with the classes that are expected.

    Raises:
        AssertionError: A block failed that should not have, or another way, or did not fail.
    """
    wrong = failures.keys() ^ expected.keys()
    wrong |= {i for i, kind in expected.items() if i in failures and not _is(failures[i], kind)}
    if wrong:
        names = {position: kind.__name__ for position, kind in expected.items()}
        wanted = f"the failures {names}, by position in the job" if names else "no failure"
        raise AssertionError(f"{what}: expected {wanted}, got {_shown(failures)}")


class _Memory(Protocol):
    rows: Rows
    slot_bytes: int


def expect_rows(what: str, memory: _Memory, expected: Mapping[int, OffloadKey]) -> None:
    """Compare slots with the content of the keys that they should hold.

    Raises:
        AssertionError: A slot holds other bytes; the text says where they begin to differ.
    """
    for slot, key in expected.items():
        # Copied, because the frames of an error must hold no part of the primary's buffer.
        row, content = memory.rows[slot].copy(), content_of(key, memory.slot_bytes)
        if np.array_equal(row, content):
            continue
        at = int(np.flatnonzero(row != content)[0])
        got = "untouched bytes" if (row == GUARD).all() else f"{row[at]} in byte {at}"
        raise AssertionError(
            f"{what}: expected in slot {slot} the content of block {_shown(key)}, which has "
            f"{content[at]} in byte {at}, got {got}"
        )


def expect_untouched(what: str, memory: _Memory, slots: Collection[int]) -> None:
    """Check that slots were never written.

    Raises:
        AssertionError: One was.
    """
    touched = [slot for slot in slots if not (memory.rows[slot] == GUARD).all()]
    if touched:
        raise AssertionError(f"{what}: expected no other slot to be written, got slots {touched}")


def _is(error: object, kind: type[Exception]) -> bool:
    return isinstance(error, kind)


def _shown(value: Any) -> str:  # noqa: ANN401 - any value of a test
    match value:
        case bytes():
            text = _NAMES.get(OffloadKey(value), value.hex())
        case BaseException():
            text = f"{type(value).__name__}({text_of(value)!r})"
        case type():
            text = value.__name__
        case Mapping():
            text = "{" + ", ".join(f"{_shown(k)}: {_shown(v)}" for k, v in value.items()) + "}"
        case set() | frozenset():
            text = "{" + ", ".join(sorted(map(_shown, value))) + "}"
        case list() | tuple():
            text = "[" + ", ".join(map(_shown, value)) + "]"
        case _:
            text = str(value)
    return text
