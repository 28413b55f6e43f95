"""What the system says, in the words of tiers."""

import errno
import os

import pytest

from kvoffload_async.errors import ConfigError, TierFullError, TierUnavailableError
from kvoffload_async.tiers.files.ops import DirectIo, NotRegularFileError, mapped, unusable


def caught(code):
    """Return an error with the frames that it came through, and with a context."""
    try:
        try:
            {}["nothing"]
        except KeyError:
            raise OSError(code, os.strerror(code), "/store/block")  # noqa: B904
    except OSError as error:
        return error


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, TierFullError),
        (errno.EDQUOT, TierFullError),
        (errno.EIO, TierUnavailableError),
        (errno.EROFS, TierUnavailableError),
    ],
)
def test_only_want_of_room_is_a_full_tier_and_no_frame_is_kept(code, kind):
    error = caught(code)
    found = mapped(error)
    assert type(found) is kind
    assert str(found) == str(error)
    assert found.__cause__ is error
    assert error.__traceback__ is error.__context__ is None


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NotRegularFileError("/store/lock"), "remove it, or give another directory"),
        (
            NotADirectoryError(errno.ENOTDIR, "no folder"),
            "remove it, or give another directory",
        ),
        (
            PermissionError(errno.EACCES, "denied"),
            "give a directory that this process can write",
        ),
    ],
)
def test_a_directory_that_cannot_be_used_is_named_with_the_remedy(error, remedy):
    found = unusable("/store", error)
    assert isinstance(found, ConfigError)
    assert str(found) == f"root_dir: '/store' cannot be used ({error}); {remedy}"
    assert found.__cause__ is error


def test_direct_io_is_given_up_at_the_first_refusal_which_is_said_once(caplog):
    direct = DirectIo(wanted=True, where="tier disk")
    flag = direct.flag
    assert flag == os.O_DIRECT
    assert not direct.refused(flag, OSError(errno.EIO, "broken"))
    assert direct.flag == flag
    refusal = OSError(errno.EINVAL, "Invalid argument")
    assert direct.refused(flag, refusal)
    assert direct.flag == 0
    assert direct.refused(flag, refusal), "another thread was in a call with the flag"
    assert not direct.refused(direct.flag, refusal), "without the flag it means something else"
    (record,) = caplog.records
    assert "tier disk: direct I/O does not work here" in record.getMessage()
    assert not any(isinstance(argument, OSError) for argument in record.args)


def test_direct_io_that_nobody_wants_is_never_refused():
    direct = DirectIo(wanted=False, where="tier disk")
    assert direct.flag == 0
    assert not direct.refused(direct.flag, OSError(errno.EINVAL, "Invalid argument"))
