"""Names to classes: policies and tiers, built in, registered, out of tree, by entry point."""

import sys
import uuid

import pytest

from kvoffload_async import CachePolicy, ConfigError, SecondaryTierFactory
from kvoffload_async.errors import UnknownNameError
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.registry import (
    POLICIES,
    Registry,
    check_policy,
    check_tier_policy,
    create_policy,
    load_class,
)


@pytest.fixture
def register(monkeypatch):
    """Register tiers for one test only."""
    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", dict(registry._loaders))
    return SecondaryTierFactory.register_tier


# -- registries ---------------------------------------------------------------------------------


def test_registering_a_name_twice_is_refused(register):
    register("mine", "nowhere", "Tier")
    for name in ("mine", "example"):
        with pytest.raises(ValueError, match=f"'{name}' is already registered"):
            register(name, "elsewhere", "Tier")


def test_registering_imports_nothing(register):
    register("mine", "no.such.module", "Tier")
    assert "mine" in SecondaryTierFactory.names()
    assert "no" not in sys.modules


def test_an_unknown_name_is_answered_with_the_nearest_and_all_that_are_known():
    with pytest.raises(UnknownNameError) as raised:
        SecondaryTierFactory.get_tier_class("exmaple")
    message = str(raised.value)
    assert "Unknown secondary tier type: 'exmaple'" in message
    assert "did you mean 'example'?" in message
    assert "Supported types: [" in message


def test_a_broken_module_or_class_shows_as_its_import_does(register):
    register("no-module", "no.such.module", "Tier")
    register("no-class", "kvoffload_async.types", "NoSuchTier")
    with pytest.raises(ModuleNotFoundError):
        SecondaryTierFactory.get_tier_class("no-module")
    with pytest.raises(AttributeError):
        SecondaryTierFactory.get_tier_class("no-class")


def test_what_is_no_class_is_refused(module):
    with pytest.raises(ConfigError, match="not_even_a_class is no class"):
        load_class(module, "not_even_a_class")


@pytest.mark.parametrize("path", ["", ".relative", "a..b"])
def test_what_is_no_module_name_is_refused(path):
    with pytest.raises(ConfigError, match="must be the full name of a module"):
        load_class(path, "Tier")


@pytest.mark.parametrize("failure", ["1 / 0", "raise SystemExit(3)"])
def test_a_module_that_fails_by_itself_is_named(tmp_path, monkeypatch, install, failure):
    name = f"failing_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(failure, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"import_path: '{name}' cannot be imported"):
        load_class(name, "Tier")
    install("kvoffload_async.tiers", failing=f"{name}:Tier")
    with pytest.raises(ConfigError, match=r"'failing'.* cannot be imported"):
        SecondaryTierFactory.get_tier_class("failing")


def test_validate_is_content_with_what_is_built_in():
    SecondaryTierFactory.validate()


def test_validate_names_every_entry_that_cannot_be_used(register, module):
    register("no-module", "no.such.module", "Tier")
    register("no-class", "kvoffload_async.types", "NoSuchTier")
    register("no-tier", module, "NoTier")
    register("fine", module, "PlainTier")
    with pytest.raises(ConfigError) as raised:
        SecondaryTierFactory.validate()
    message = str(raised.value)
    assert all(name in message for name in ("no-module", "no-class", "no-tier"))
    assert "fine" not in message


def test_a_tier_of_an_entry_point_is_known_by_its_name(install, module, create):
    install("kvoffload_async.tiers", elsewhere=f"{module}:PlainTier")
    assert "elsewhere" in SecondaryTierFactory.names()
    tier = create({"type": "elsewhere", "colour": "red"})
    assert tier.tier.colour == "red"


def test_a_policy_of_an_entry_point_is_known_by_its_name(install, module):
    install("kvoffload_async.policies", mine="kvoffload_async.policies.arc:ArcPolicy")
    assert check_policy("mine") is ArcPolicy


def test_a_registered_name_comes_before_an_entry_point(install):
    install("kvoffload_async.policies", lru="nowhere:Nothing")
    assert check_policy("lru").name == "lru"


def test_an_empty_registry_knows_nothing():
    assert Registry("thing", f"group_{uuid.uuid4().hex}").names() == []


# -- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lru", "arc", "hd"])
def test_a_built_in_policy_is_created_by_name(name):
    policy = create_policy(name, 7)
    assert isinstance(policy, CachePolicy)
    assert policy.name == name
    assert policy.capacity_blocks == 7


def test_an_unknown_policy_is_a_value_error_that_lists_the_choices():
    with pytest.raises(ValueError, match=r"eviction_policy: 'lfu' is unknown.*'arc', 'hd', 'lru'"):
        create_policy("lfu", 7)


def test_a_policy_that_is_none_is_refused(monkeypatch, module):
    monkeypatch.setattr(POLICIES, "_loaders", {"bad": lambda: load_class(module, "NoTier")})
    with pytest.raises(ConfigError, match="'bad' is no subclass of CachePolicy"):
        check_policy("bad")


def test_a_policy_that_follows_requests_is_none_for_a_tier():
    check_tier_policy("lru")
    with pytest.raises(ConfigError, match=r'.hd. ranks the blocks of requests.*"lru" or "arc"'):
        check_tier_policy("hd")
