"""Tiers from their configuration: what is created, and what a refusal says."""

import uuid

import pytest

from kvoffload_async import ConfigError, SecondaryTierFactory, SecondaryTierManager
from kvoffload_async.core.backpressure import LOCAL_BACKPRESSURE, Backpressure
from kvoffload_async.facade.secondary import ExampleSecondaryTierManager
from kvoffload_async.facade.tier_factory import parse_backpressure

# -- creating tiers -----------------------------------------------------------------------------


def test_the_example_tier_is_created_with_its_options(create, caplog):
    caplog.set_level("INFO")
    tier = create({"type": "example", "custom_param": 9, "io_timeout_s": 3.0})
    assert isinstance(tier, ExampleSecondaryTierManager)
    assert tier.tier_type == "example"
    assert "custom_param=9" in caplog.text


def test_the_callers_mapping_is_not_changed(create):
    config = {"type": "example", "backpressure_cls": "ema", "backpressure": {}}
    before = dict(config)
    create(config)
    assert config == before


@pytest.mark.parametrize("config", [{}, {"type": ""}, {"type": None}, {"custom_param": 3}])
def test_a_missing_type_is_refused(create, config):
    with pytest.raises(ValueError, match="Secondary tier configuration must include 'type'"):
        create(config)


@pytest.mark.parametrize("name", [5, ["example"], {"a": 1}])
def test_a_type_that_is_no_name_is_refused(create, name):
    with pytest.raises(ConfigError, match=r"type: .* must be a name"):
        create({"type": name})


def test_a_module_path_that_is_no_name_is_refused(create):
    with pytest.raises(ConfigError, match="module_path: 5 is not valid"):
        create({"type": "Tier", "module_path": 5})


def test_an_unknown_option_is_a_type_error_and_a_value_error_that_names_the_nearest(create):
    with pytest.raises(TypeError, match="did you mean 'custom_param'") as raised:
        create({"type": "example", "custm_param": 3})
    assert isinstance(raised.value, ValueError)
    assert "backpressure_cls" in str(raised.value)
    assert "backpressure_detector" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("io_timeout_s", "soon"),
        ("io_timeout_s", 0),
        ("probe_timeout_s", -1.0),
        ("open_timeout_s", float("nan")),
        ("close_timeout_s", None),
        ("n_read_threads", 0),
        ("n_write_threads", "2"),
        ("enable_kv_events", "yes"),
    ],
)
def test_an_impossible_option_is_refused_before_anything_starts(view, key, value):
    config = {"type": "example", key: value}
    with pytest.raises(ConfigError, match=f"{key}: "):
        SecondaryTierFactory.check_config(config)
    with pytest.raises(ConfigError, match=f"{key}: "):
        ExampleSecondaryTierManager(None, view, **{key: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "colour: missing"),
        ({"colour": "red", "depth": 1.5}, "depth: 1.5 is not valid; it must be an integer"),
        ({"colour": "red", "depth": True}, "depth: True is not valid; it must be an integer"),
        ({"colour": "red", "deep": 1}, "deep: 1 is not valid; it must be true or false"),
        ({"colour": "red", "io_timeout_s": "x"}, "io_timeout_s: 'x' .* must be a number"),
    ],
)
def test_an_option_is_checked_against_its_default_before_anything_starts(module, options, message):
    with pytest.raises(ConfigError, match=message):
        SecondaryTierFactory.check_config({"type": "PlainTier", "module_path": module, **options})


def test_an_out_of_tree_manager_is_found_by_module_path(create, module):
    tier = create({"type": "PlainManager", "module_path": module, "custom_param": 1})
    assert type(tier).__name__ == "PlainManager"
    assert tier.tier_type == "PlainManager"


def test_an_out_of_tree_async_tier_is_wrapped_and_keeps_the_options_it_knows(create, module):
    tier = create(
        {"type": "PlainTier", "module_path": module, "colour": "blue", "close_timeout_s": 2}
    )
    assert isinstance(tier, SecondaryTierManager)
    assert type(tier).tier_class is type(tier.tier)
    assert tier.tier.colour == "blue"


def test_an_async_tiers_own_option_is_its_own_to_check(create, module):
    create({"type": "PlainTier", "module_path": module, "colour": "x", "io_timeout_s": -1})


def test_an_out_of_tree_class_that_is_no_tier_is_refused(create, module):
    with pytest.raises(ConfigError, match="NoTier is a subclass of neither"):
        create({"type": "NoTier", "module_path": module})


def test_an_out_of_tree_module_that_is_missing_shows_as_its_import_does(create, module):
    with pytest.raises(ModuleNotFoundError):
        create({"type": "Tier", "module_path": "no.such.module"})
    with pytest.raises(AttributeError):
        create({"type": "NoSuchTier", "module_path": module})


def test_a_tier_that_cannot_open_leaves_nothing_running(create, module):
    with pytest.raises(ConfigError, match="colour: 'refused'"):
        create({"type": "PlainTier", "module_path": module, "colour": "refused"})


# -- back-pressure ------------------------------------------------------------------------------


def test_back_pressure_is_off_unless_asked_for(create):
    assert create({"type": "example"}).backpressure_detector is None


def test_back_pressure_takes_its_settings(create):
    tier = create(
        {
            "type": "example",
            "backpressure_cls": "ema",
            "backpressure": {"high_water_s_per_mib": 0.5},
        }
    )
    assert isinstance(tier.backpressure_detector, Backpressure)
    assert parse_backpressure({}, "backpressure") == LOCAL_BACKPRESSURE


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backpressure": {}}, "backpressure: goes with backpressure_cls"),
        ({"backpressure_cls": "pid"}, "backpressure_cls: 'pid' is unknown"),
        ({"backpressure_cls": "ema", "backpressure": 3}, "backpressure: 3 is not valid"),
        ({"backpressure_cls": "ema", "backpressure": {"hi": 1}}, "unknown key 'hi'"),
        (
            {"backpressure_cls": "ema", "backpressure": {"low_water_s_per_mib": 1}},
            "low_water_s_per_mib=1",
        ),
        (
            {"backpressure_cls": "ema", "backpressure": {"high_water_s_per_mib": "fast"}},
            "high_water_s_per_mib='fast'",
        ),
    ],
)
def test_back_pressure_that_makes_no_sense_is_refused(create, config, message):
    with pytest.raises(ConfigError, match=message):
        create({"type": "example", **config})


# -- checking without creating -------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", ".x", "a..b", "x."])
def test_what_is_no_full_module_name_is_refused(path):
    with pytest.raises(ConfigError, match=r"module_path: .* must be the full name of a module"):
        SecondaryTierFactory.check_config({"type": "Tier", "module_path": path})


@pytest.mark.parametrize("code", ["1 / 0", "raise SystemExit", "raise ValueError('no')"])
def test_a_module_that_fails_at_import_is_a_config_error(tmp_path, monkeypatch, install, code):
    name = f"broken_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"module_path: '{name}' cannot be imported"):
        SecondaryTierFactory.check_config({"type": "Tier", "module_path": name})
    install("kvoffload_async.tiers", elsewhere=f"{name}:Tier")
    with pytest.raises(ConfigError, match=f"'elsewhere': '{name}:Tier' cannot be imported"):
        SecondaryTierFactory.get_tier_class("elsewhere")


def test_an_option_without_a_default_must_be_given(module):
    with pytest.raises(ConfigError, match="colour: missing"):
        SecondaryTierFactory.check_config({"type": "PlainTier", "module_path": module})
    with pytest.raises(ConfigError, match="root_dir: missing"):
        SecondaryTierFactory.check_config({"type": "fs"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "example", "custom_param": "x"}, "custom_param: 'x' .* an integer"),
        ({"type": "example", "custom_param": True}, "custom_param: True .* an integer"),
        ({"type": "fs", "root_dir": "/x", "model": "m", "fsync": 1}, "fsync: 1 .* true or false"),
        ({"type": "fs", "root_dir": "/x", "high_watermark": "1"}, "high_watermark: '1' .* a numb"),
    ],
)
def test_a_value_of_another_type_than_its_default_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        SecondaryTierFactory.check_config(config)


def test_a_whole_number_will_do_for_a_fraction():
    SecondaryTierFactory.check_config(
        {"type": "fs", "root_dir": "/x", "model": "m", "high_watermark": 1}
    )
