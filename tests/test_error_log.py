"""Errors that end nothing: what is counted, logged and passed on."""

import asyncio
import logging

import pytest

from kvoffload_async.error_log import INTERVAL_S, ErrorLog

logger = logging.getLogger("kvoffload_async.test")


def test_one_error_a_minute_is_logged_with_its_trace_and_the_number_of_the_others(caplog):
    now_s = [5.0]
    errors = ErrorLog(logger, "counting", lambda: now_s[0])
    for number in range(10):
        with errors.survived():
            raise ValueError(f"at {number}")
    now_s[0] += INTERVAL_S
    errors.note(SystemExit(3))
    assert errors.count == 11
    first, second = caplog.messages
    assert first.startswith("counting failed: Traceback")
    assert first.endswith("ValueError: at 0")
    assert second == "counting failed (9 more since the last such line): SystemExit: 3"


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_a_cancellation_and_ctrl_c_are_not_survived(error):
    errors = ErrorLog(logger, "counting")
    with pytest.raises(error), errors.survived():
        raise error
    assert errors.count == 0
