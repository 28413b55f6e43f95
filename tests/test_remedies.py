"""Remedies: what a log line tells to do helps in its situation."""

import re
from pathlib import Path

import pytest
import yaml

from kvoffload_async import OffloadConfig, SecondaryTierFactory, errors
from kvoffload_async.cli.app import common_options
from kvoffload_async.config import REQUIRED
from kvoffload_async.errors import (
    BlockMissingError,
    CallTimeoutError,
    ConfigError,
    CorruptBlockError,
    JobCancelledError,
    ServerHangError,
    ShardUnavailableError,
    TierBusyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    Trouble,
    remedy_of,
)
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import identity_of, options_of

COMMAND = "kvoffload store verify"
THIRD_PARTY = "of-a-third-party"
TYPES = [*SecondaryTierFactory.names(), THIRD_PARTY]
ENGINE_OPTIONS = {option.name for option in OffloadConfig.described()}
KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, TierError)]
NO_REMEDY = {TierError, BlockMissingError, TierBusyError, TierClosedError, JobCancelledError}
REQUIRED_OPTIONS = {
    "fs": {"root_dir": "/srv/kv"},
    "slab": {"root_dir": "/srv/kv", "capacity_bytes": "1GiB"},
    "valkey": {"url": "valkey://localhost:6379/0"},
    "object": {"url": "s3://bucket/prefix"},
    "mooncake": {"master": "localhost:1", "metadata_url": "http://localhost:1/metadata"},
}


def class_of(tier_type):
    is_own = tier_type != THIRD_PARTY
    return SecondaryTierFactory.get_tier_class(tier_type) if is_own else SecondaryTierManager


def remedies_of(tier_type):
    tier_class = class_of(tier_type).tier_class
    return {} if tier_class is None else tier_class.remedies


def remedy(tier_type, situation):
    return remedy_of(situation, remedies_of(tier_type))


def situations():
    return [*Trouble, *(kind("why") for kind in KINDS)]


def all_options():
    return ENGINE_OPTIONS.union(*(options_of(class_of(tier_type)) for tier_type in TYPES))


def refusal_of(tier_type, name):
    """Return why a tier refuses an option, with its default as the value; None if it does not."""
    cls = class_of(tier_type)
    known = options_of(cls)
    if name not in known:
        return "it has none of this name"
    if known[name] is REQUIRED or tier_type == THIRD_PARTY:
        return None
    given = {"model": "org/model", **REQUIRED_OPTIONS.get(tier_type, {}), name: known[name]}
    try:
        cls.check_options(given, identity_of(cls.common_options(given), None, 4096))
    except ConfigError as error:
        return str(error) if str(error).startswith(name) else None
    return None


def options_in(text):
    words = re.findall(r"[a-z_]+", text.replace(COMMAND, ""))
    return set(words) & (all_options() - {"model", "host"})


@pytest.mark.parametrize("tier_type", TYPES)
def test_every_remedy_names_only_options_that_the_tier_or_the_engine_takes(tier_type):
    named = set()
    for situation in situations():
        text = remedy(tier_type, situation)
        unknown = set(re.findall(r"\w+_\w+", text)) - all_options()
        assert not unknown, text
        for name in options_in(text) - ENGINE_OPTIONS:
            named.add(name)
            assert refusal_of(tier_type, name) is None, text
        if COMMAND in text:
            assert class_of(tier_type).maintenance() is not None, text
    assert "io_timeout_s" in named


def test_the_walk_would_notice_an_option_of_another_tier():
    assert refusal_of("valkey", "n_writers")
    assert "io_threads" in refusal_of("slab", "n_write_threads")
    assert refusal_of("fs", "io_threads")
    assert refusal_of("slab", "call_timeout_s")


@pytest.mark.parametrize("tier_type", TYPES)
def test_every_situation_has_a_remedy_unless_it_is_no_fault(tier_type):
    assert set(remedies_of(tier_type)) <= {*Trouble, *KINDS}
    without = {s for s in situations() if not remedy(tier_type, s)}
    assert {type(situation) for situation in without} == NO_REMEDY


def test_a_remedy_of_a_tier_holds_for_the_subclasses_of_its_error_that_have_none_of_their_own():
    class OwnError(TierTimeoutError):
        pass

    own = {TierTimeoutError: "own"}
    assert remedy_of(OwnError("why"), own) == remedy_of(TierTimeoutError("why"), own) == "own"
    assert remedy_of(CallTimeoutError("why"), own) == CallTimeoutError.remedy
    assert remedy_of(ShardUnavailableError("why"), own) == TierUnavailableError.remedy


@pytest.mark.parametrize(
    ("tier_type", "situation", "words"),
    [
        ("valkey", CallTimeoutError("slow"), "raise call_timeout_s"),
        ("valkey", ServerHangError("hangs"), "raise probe_timeout_s"),
        ("valkey", TierTimeoutError("slow"), "raise io_timeout_s"),
        ("fs", TierTimeoutError("slow"), "raise io_timeout_s"),
        ("valkey", ShardUnavailableError("down"), "fix the cause above"),
        ("valkey", TierFullError("full"), "maxmemory"),
        ("valkey", CorruptBlockError("crc"), "the memory of the server"),
        ("fs", Trouble.TOO_SLOW, "n_write_threads"),
        ("slab", Trouble.TOO_SLOW, "io_threads"),
        ("object", Trouble.TOO_SLOW, "connections"),
        (THIRD_PARTY, Trouble.TOO_SLOW, "make the tier faster"),
        ("slab", Trouble.SUSPENDED, "its stores are suspended"),
        ("valkey", Trouble.NOT_OPEN, "it is not open"),
    ],
)
def test_a_remedy_fits_its_tier_and_situation(tier_type, situation, words):
    assert words in remedy(tier_type, situation)


@pytest.mark.parametrize("state", [Trouble.SUSPENDED, Trouble.NOT_OPEN, Trouble.HANGING])
@pytest.mark.parametrize("tier_type", TYPES)
def test_a_tier_that_is_down_is_not_told_to_be_faster(tier_type, state):
    text = remedy(tier_type, state)
    assert "faster" not in text
    assert not options_in(text)


def test_the_alerts_name_only_options_of_the_engine_or_of_every_tier():
    alerts = Path(__file__).parents[1] / "docs" / "metrics" / "alerts.yml"
    (group,) = yaml.safe_load(alerts.read_text(encoding="utf-8"))["groups"]
    texts = " ".join(rule["annotations"]["description"] for rule in group["rules"])
    named = {w for w in re.findall(r"[a-z]+(?:_[a-z]+)+", texts) if not w.startswith("kvoffload")}
    of_every_tier = {option.name for option in common_options()}
    refused = {"n_read_threads", "n_write_threads"}  # by `slab`
    assert "cpu_bytes_to_use" in named
    assert named <= ENGINE_OPTIONS | of_every_tier - refused
