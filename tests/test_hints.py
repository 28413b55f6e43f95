"""The hints of requests: what clients and programs may give, and what becomes of it."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.errors import ConfigError
from kvoffload_async.hints import (
    ACTION_TYPE,
    ACTION_VERSION,
    HINTS_KEY,
    LOAD_TIERS_KEY,
    parse_hints,
    parse_tiers,
    read_hints,
)
from kvoffload_async.statistics import HINT_RESULTS
from kvoffload_async.types import (
    ALL_TIERS,
    MOST_RETAIN_S,
    NO_HINTS,
    Hints,
    Locality,
    Medium,
    Priority,
    ReqContext,
    TierMatcher,
)

LONG = "x" * (1 << 20)
HUGE = 10**5000
DEEP = []
for _ in range(10_000):
    DEEP = [DEEP]

INVALID = [
    {"priority": "highest"},
    {"priority": 1},
    {"priority": LONG},
    {"priority": None},
    {"retain_s": -1},
    {"retain_s": math.inf},
    {"retain_s": math.nan},
    {"retain_s": MOST_RETAIN_S + 1},
    {"retain_s": HUGE},
    {"retain_s": "60"},
    {"retain_s": True},
    {"max_offload_tokens": -1},
    {"max_offload_tokens": 1.5},
    {"max_offload_tokens": False},
    {"max_offload_tokens": HUGE},
    {"max_offload_tokens": DEEP},
]


def read(params=None, envelope=None, **fields):
    """Return a request that has begun, and the hints that were counted, zeros left out."""
    ctx = ReqContext("r", params, kv_hints=envelope, **fields)
    counts = dict.fromkeys(HINT_RESULTS, 0)
    read_hints(ctx, counts)
    return ctx, {result: count for result, count in counts.items() if count}


def action(payload, kind=ACTION_TYPE, version=ACTION_VERSION):
    return SimpleNamespace(action_id="1", action_type=kind, action_version=version, payload=payload)


def envelope(*actions):
    return SimpleNamespace(protocol_version="1", message_id="m", actions=list(actions))


# -- what is applied ----------------------------------------------------------------------------

WISHED = {"priority": "high", "retain_s": 60, "max_offload_tokens": 4096}
PARSED = Hints(Priority.HIGH, 60.0, 4096)


@pytest.mark.parametrize(
    "form",
    [
        {"params": {HINTS_KEY: WISHED}},
        {"envelope": envelope(action(WISHED))},
        {"envelope": {"actions": [vars(action(WISHED))]}},
        {"hints": PARSED},
    ],
)
def test_every_form_has_one_vocabulary(form):
    ctx, counts = read(**form)
    assert (ctx.hints, counts) == (PARSED, {"applied": 3})
    assert parse_hints(WISHED) == PARSED


def test_a_request_without_hints_has_none():
    for params in (None, {}, {"do_remote_decode": True}, "no mapping"):
        ctx, counts = read(params)
        assert ctx.hints is NO_HINTS
        assert not counts


def test_a_program_overrides_the_envelope_and_the_envelope_the_parameters():
    ctx, _ = read(
        {HINTS_KEY: {"priority": "low", "retain_s": 1, "max_offload_tokens": 1}},
        envelope(action({"retain_s": 2, "max_offload_tokens": 2}), action({"retain_s": 3})),
        hints=Hints(max_offload_tokens=0),
    )
    assert ctx.hints == Hints(Priority.LOW, 3.0, 0)


@pytest.mark.parametrize(
    ("given_", "retention_s"),
    [
        ({}, 0),
        ({"retain_s": 60}, 60),
        ({"priority": "high"}, 300),
        ({"priority": "high", "retain_s": 60}, 60),
        ({"priority": "low", "retain_s": 60}, 0),
    ],
)
def test_the_retention_follows_from_time_and_priority(given_, retention_s):
    assert parse_hints(given_).retention_s == retention_s


# -- what is ignored ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", INVALID, ids=lambda each: str(next(iter(each))))
def test_an_invalid_hint_of_a_client_is_counted_and_the_others_apply(wrong):
    valid = {"retain_s": 5} if "retain_s" not in wrong else {"max_offload_tokens": 5}
    for ctx, counts in (
        read({HINTS_KEY: {**wrong, **valid}}),
        read(envelope=envelope(action(wrong), action(valid))),
    ):
        assert ctx.hints == parse_hints(valid)
        assert counts == {"applied": 1, "invalid": 1}


@pytest.mark.parametrize(
    ("params", "given_", "counts"),
    [
        ({HINTS_KEY: {"ttl": 5}}, None, {"unknown": 1}),
        ({HINTS_KEY: {LONG: LONG}}, None, {"unknown": 1}),
        ({HINTS_KEY: {5: 5, None: 5}}, None, {"unknown": 2}),
        ({HINTS_KEY: LONG}, None, {"invalid": 1}),
        ({HINTS_KEY: DEEP}, None, {"invalid": 1}),
        ({HINTS_KEY: dict.fromkeys(range(1_000_000))}, None, {"invalid": 1}),
        (None, "hints", {"invalid": 1}),
        (None, envelope(action(WISHED, kind="kvcr.pin")), {"unknown": 1}),
        (None, envelope(action(WISHED, version="2")), {"unknown": 1}),
        (None, envelope(action(WISHED, kind=DEEP, version=HUGE)), {"unknown": 1}),
        (None, envelope(action(LONG)), {"invalid": 1}),
        (None, envelope("action", None, 5), {"unknown": 3}),
        (None, envelope(*[action({"ttl": 1})] * 1000), {"unknown": 16, "invalid": 984}),
    ],
)
def test_what_is_unknown_or_has_the_wrong_structure_is_counted(params, given_, counts):
    ctx, counted = read(params, given_)
    assert (ctx.hints, counted) == (NO_HINTS, counts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.text()
            | st.sampled_from(
                [
                    *WISHED,
                    *("actions", "action_type", "action_version", "payload"),
                    *("medium", "locality"),
                ]
            ),
            inner | st.sampled_from([ACTION_TYPE, ACTION_VERSION, "high", "cpu", "Local"]),
        )
    ),
)


@given(JSON, JSON, JSON)
def test_no_value_of_a_client_raises(hints, tiers, given_):
    ctx, counts = read({HINTS_KEY: hints, LOAD_TIERS_KEY: tiers}, given_)
    assert 0 <= ctx.hints.retention_s <= MOST_RETAIN_S
    assert isinstance(ctx.hints.priority, Priority)
    assert all(isinstance(each, TierMatcher) for each in ctx.load_tier_filter)
    assert all(count > 0 for count in counts.values())


# -- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", INVALID, ids=lambda each: str(next(iter(each))))
def test_an_invalid_hint_of_a_program_is_an_error_that_names_key_value_and_remedy(wrong):
    ((key, value),) = wrong.items()
    with pytest.raises(ConfigError) as caught:
        parse_hints(wrong)
    text = str(caught.value)
    assert text.startswith(f"hints: {key}: ")
    assert " is not valid; it must be " in text
    assert len(text) < 1000
    assert value is HUGE or value is DEEP or str(value)[:5] in text


def test_a_program_may_give_no_hints_and_any_collection_of_matchers():
    assert parse_hints(None) is NO_HINTS
    assert parse_tiers([TierMatcher()]) == ALL_TIERS


def test_a_program_learns_of_an_unknown_hint_and_of_a_wrong_structure():
    with pytest.raises(ConfigError, match=r"hints: unknown key 'retain'.*retain_s.*allowed: max"):
        parse_hints({"retain": 5})
    with pytest.raises(ConfigError, match="hints: 60 is not valid; give a mapping"):
        parse_hints(60)
    with pytest.raises(ConfigError, match="load_tier_filter: 'cpu' is not valid; give a set of"):
        parse_tiers("cpu")


def test_hints_that_a_scheduler_builds_are_checked_when_its_request_begins():
    assert read(hints=Hints(priority="high"))[0].hints.priority is Priority.HIGH
    with pytest.raises(ConfigError, match="hints: retain_s: inf is not valid"):
        read(hints=Hints(retain_s=math.inf))


# -- the filter of tiers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "expected", "counts"),
    [
        ([], frozenset(), {"applied": 1}),
        ([{}], ALL_TIERS, {"applied": 1}),
        ([{"medium": "cpu"}], {TierMatcher(Medium.CPU)}, {"applied": 1}),
        (
            [{"medium": "STORAGE", "locality": "Local"}, {"medium": "tape"}],
            {TierMatcher(Medium.STORAGE, Locality.LOCAL)},
            {"applied": 1, "invalid": 1},
        ),
        ([{"locality": LONG}, {"medium": 5}], ALL_TIERS, {"invalid": 2}),
        ("cpu", ALL_TIERS, {"invalid": 1}),
        ([{}] * 1000, ALL_TIERS, {"invalid": 1}),
    ],
)
def test_the_filter_of_tiers_is_read_like_vllms(given_, expected, counts):
    ctx, counted = read({LOAD_TIERS_KEY: given_})
    assert (ctx.load_tier_filter, counted) == (expected, counts)


def test_a_given_filter_of_tiers_is_kept():
    ctx, counts = read({LOAD_TIERS_KEY: [{"medium": "cpu"}]}, load_tier_filter=frozenset())
    assert (ctx.load_tier_filter, counts) == (frozenset(), {})
