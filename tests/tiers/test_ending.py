"""How an operation has ended, whatever a third party's errors are like."""

import asyncio

import pytest

from kvoffload_async.errors import JobCancelledError, TierFullError, TierUnavailableError
from kvoffload_async.tiers._environment import error_of


class Mute(Exception):
    """Cannot even say what it is."""

    def __str__(self):
        raise RuntimeError("no text")


def ended(error):
    """Return a task that has ended with an error, or was cancelled."""

    async def fail():
        raise error

    async def run():
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        return task

    return asyncio.run(run())


def test_an_error_without_text_still_ends_its_job():
    found = error_of(ended(Mute()))
    assert type(found) is TierUnavailableError
    assert "Mute" in str(found)


def test_another_error_is_named_and_kept_as_the_cause():
    cause = OSError(5, "io")
    found = error_of(ended(cause))
    assert str(found) == "OSError: [Errno 5] io"
    assert found.__cause__ is cause


@pytest.mark.parametrize("error", [TierFullError("full")])
def test_a_tiers_own_error_is_passed_on(error):
    assert error_of(ended(error)) is error


def test_a_cancelled_job_says_so():
    assert isinstance(error_of(ended(asyncio.CancelledError())), JobCancelledError)
