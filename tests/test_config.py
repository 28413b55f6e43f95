"""The configuration: what is accepted, and what a refusal says."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.config import OffloadConfig, parse_size_bytes
from kvoffload_async.errors import ConfigError, OffloadError, UnknownNameError

MINIMAL = {"cpu_bytes_to_use": "1MiB", "block_bytes": 4096}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (1, 1),
        ("4096", 4096),
        ("4096B", 4096),
        ("64KiB", 65536),
        ("64 kib", 65536),
        (" 1.5 KB ", 1500),
        ("512 MB", 512_000_000),
        ("4GiB", 4 << 30),
        ("1TiB", 1 << 40),
        ("1 PiB", 1 << 50),
        ("2PB", 2 * 10**15),
        ("7.5EiB", 15 << 59),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_bytes_or_text_with_a_unit(text, num_bytes):
    assert parse_size_bytes(text, "k") == num_bytes


@pytest.mark.parametrize(
    "value",
    [0, -1, True, 1.5, None, [], "", "big", "-4KiB", "4 XiB", "0GiB", "0.1B", "1e3", "1.KB"],
)
def test_a_size_that_is_none_names_key_and_value(value):
    with pytest.raises(ConfigError) as raised:
        parse_size_bytes(value, "block_bytes")
    assert str(raised.value).startswith("block_bytes: ")
    assert "bytes" in str(raised.value).split("must be")[1]


@given(st.text())
def test_any_text_is_a_size_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_size_bytes(text, "k") > 0


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000 + "TiB", "9EiB", 1 << 63, 10**4000])
def test_a_size_beyond_what_the_system_can_count_is_refused_in_one_short_line(size):
    with pytest.raises(ConfigError, match=r"k: .*9999|k: '9EiB|k: 92233|k: 1000") as raised:
        parse_size_bytes(size, "k")
    assert "below 8 EiB" in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_the_two_required_keys_are_enough():
    config = OffloadConfig.parse(MINIMAL)
    assert config.cpu_bytes_to_use == 1 << 20
    assert config.eviction_policy == "lru"
    assert config.secondary_tiers == ()


@pytest.mark.parametrize("key", ["cpu_bytes_to_use", "block_bytes"])
def test_a_missing_required_key_is_named_with_an_example(key):
    raw = {k: v for k, v in MINIMAL.items() if k != key}
    with pytest.raises(ConfigError, match=f"{key}: missing; give .* such as"):
        OffloadConfig.parse(raw)


def test_an_unknown_key_is_named_with_the_nearest_and_all_that_are_allowed():
    with pytest.raises(UnknownNameError) as raised:
        OffloadConfig.parse({**MINIMAL, "evicton_policy": "lru"})
    message = str(raised.value)
    assert "'evicton_policy'" in message
    assert "did you mean 'eviction_policy'?" in message
    assert "secondary_tiers" in message.split("allowed:")[1]


def test_an_unknown_key_with_no_likeness_has_no_hint():
    with pytest.raises(UnknownNameError) as raised:
        OffloadConfig.parse({**MINIMAL, "zzz": 1})
    assert "did you mean" not in str(raised.value)


def test_a_key_that_is_no_text_is_unknown_too():
    with pytest.raises(UnknownNameError, match="unknown key 5"):
        OffloadConfig.parse({**MINIMAL, 5: 1})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("block_size", 0, "an integer of at least 1"),
        ("block_size", True, "an integer of at least 1"),
        ("block_size", "16", "an integer of at least 1"),
        ("blocks_per_chunk", 1.0, "an integer of at least 1"),
        ("store_threshold", -1, "an integer of at least 0"),
        ("eviction_policy", "", "a name"),
        ("eviction_policy", 3, "a name"),
        ("enable_kv_cache_events", 1, "true or false"),
        ("deferral_timeout_s", 0, "a positive number of seconds"),
        ("deferral_timeout_s", float("nan"), "a positive number of seconds"),
        ("deferral_timeout_s", float("inf"), "a positive number of seconds"),
        ("drain_timeout_s", "30", "a positive number of seconds"),
        ("drain_timeout_s", True, "a positive number of seconds"),
        ("generation", "", "a text of 1 to 200 printable characters"),
        ("generation", True, "a text of 1 to 200 printable characters"),
        ("secondary_tiers", {"type": "example"}, 'a list of objects, each with a "type"'),
        ("secondary_tiers", "example", 'a list of objects, each with a "type"'),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_remedy(key, value, allowed):
    with pytest.raises(ConfigError) as raised:
        OffloadConfig.parse({**MINIMAL, key: value})
    message = str(raised.value)
    assert message.startswith(f"{key}: {value!r} is not valid")
    assert allowed in message


@pytest.mark.parametrize(("given", "label"), [(3, "3"), ("3", "3"), ("step-7", "step-7")])
def test_a_generation_is_a_number_or_a_label(given, label):
    assert OffloadConfig.parse({**MINIMAL, "generation": given}).generation == label


def test_a_tier_that_is_no_object_is_refused_with_its_place_in_the_list():
    with pytest.raises(ConfigError, match=r"secondary_tiers\[1\]: 'example' is not valid"):
        OffloadConfig.parse({**MINIMAL, "secondary_tiers": [{"type": "example"}, "example"]})


@pytest.mark.parametrize("raw", [None, [], "text", 5])
def test_a_config_that_is_no_mapping_is_refused(raw):
    with pytest.raises(ConfigError, match=r"config: .* an object of keys and values"):
        OffloadConfig.parse(raw)


def test_a_store_threshold_goes_with_tiers():
    raw = {**MINIMAL, "store_threshold": 2, "secondary_tiers": [{"type": "example"}]}
    assert OffloadConfig.parse(raw).store_threshold == 2


@pytest.mark.parametrize("path", ["/\ud800", "trace.jsonl", 3, "/a\0b"])
def test_a_trace_is_recorded_at_an_absolute_path(path):
    assert OffloadConfig.parse({**MINIMAL, "record_trace": "/tmp/t"}).record_trace == "/tmp/t"
    shown = re.escape(repr(path))
    with pytest.raises(ConfigError, match=rf"record_trace: .*{shown}.* an absolute path"):
        OffloadConfig.parse({**MINIMAL, "record_trace": path})


def test_the_callers_mapping_is_not_changed():
    tiers = [{"type": "example"}]
    raw = {**MINIMAL, "secondary_tiers": tiers}
    before = {**raw, "secondary_tiers": [dict(tier) for tier in tiers]}
    OffloadConfig.parse(raw)
    assert raw == before


def test_a_config_error_is_a_value_error_of_this_package():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, OffloadError)
