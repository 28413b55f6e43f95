"""An option is declared in one place, from which signature, check, hints and reference follow."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
from faulty_files import FaultyFileOps

from kvoffload_async import (
    ConfigError,
    FileSystemTierManager,
    SecondaryTierFactory,
    SecondaryTierManager,
)
from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import TierSettings
from kvoffload_async.cli.app import common_options, tier_entries
from kvoffload_async.config import (
    REQUIRED,
    OffloadConfig,
    at_least,
    option,
    parse_name,
    parse_size_bytes,
)
from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.facade.maintenance import maintenance_kinds
from kvoffload_async.facade.tier_options import UnknownOptionError
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.example import ExampleTier


@dataclass(frozen=True, kw_only=True)
class ToySettings(TierSettings):
    """Options of the toy tier.

    Attributes:
        label: Follows from others.
    """

    colour: str = option(parse_name, remedy="the name of a colour")
    """Colour of the blocks;
    any name."""
    depth: int = option(at_least(1, 9), 3, key="toy_depth")
    """Depth of the blocks."""
    toy_bytes: int = option(parse_size_bytes, 1 << 20)
    """Bytes of the toy."""
    label: str = ""

    @classmethod
    def of(cls, options, identity):
        return cls.take(options, label="derived")


class ToyMaintenance(StoreMaintenance):
    tier_type = "toy"


class ToyTier(ExampleTier):
    """A toy."""

    declares = ToySettings
    requires: ClassVar = {"json": "part of Python"}
    remedies: ClassVar = {TierUnavailableError: "wind it up, or lower toy_depth"}

    @classmethod
    def maintenance(cls):
        return ToyMaintenance

    def __init__(self, settings):
        super().__init__()
        self.settings = settings


class ToyManager(SecondaryTierManager):
    tier_type = "toy"
    tier_class = ToyTier


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "toy": lambda: ToyTier})


def toy(**options):
    return {"type": "toy", "colour": "red", **options}


def test_the_signature_has_it_with_its_default():
    parameters = inspect.signature(ToyManager).parameters
    assert parameters["colour"].default is inspect.Parameter.empty
    assert parameters["toy_depth"].default == 3
    assert parameters["io_timeout_s"].default == 30.0
    assert not {"label", "depth", "runtime", "options"} & parameters.keys()
    assert "toy_depth" not in inspect.signature(SecondaryTierManager).parameters


def test_a_subclass_with_a_constructor_of_its_own_has_its_own_signature():
    class Fixed(ToyManager):
        def __init__(self, offloading_spec, primary_kv_view, shade="dark"):
            super().__init__(offloading_spec, primary_kv_view, colour=shade)

    class Deeper(ToyManager):
        def __init__(self, offloading_spec, primary_kv_view, *, level, **options):
            super().__init__(offloading_spec, primary_kv_view, toy_depth=level, **options)

        tier_class = ToyTier

    assert list(inspect.signature(Fixed).parameters)[2:] == ["shade"]
    assert {"level", "colour", "rank"} <= inspect.signature(Deeper).parameters.keys()


@pytest.mark.parametrize("value", [0, 10, "3", True])
def test_its_check_names_key_value_and_remedy_before_anything_starts(view, value, threads_left):
    with pytest.raises(ConfigError, match=r"toy_depth: .* must be an integer of at least 1"):
        SecondaryTierFactory.check_config(toy(toy_depth=value))
    with pytest.raises(ConfigError, match=r"toy_depth: .* must be an integer of at least 1"):
        ToyManager(None, view, colour="red", toy_depth=value)
    assert not threads_left()


def test_its_values_are_those_that_its_parser_takes_whatever_the_type_of_its_default(view):
    SecondaryTierFactory.check_config(toy(toy_bytes="4KiB"))
    manager = SecondaryTierFactory.create_secondary_tier(toy(toy_bytes="4KiB"), view, None)
    assert manager.tier.settings.toy_bytes == 4096
    manager.shutdown()


def test_without_a_default_it_must_be_given(view):
    with pytest.raises(ConfigError, match="colour: missing; give the name of a colour"):
        SecondaryTierFactory.check_config({"type": "toy"})
    with pytest.raises(ConfigError, match="colour: missing; give the name of a colour"):
        ToyManager(None, view)


def test_a_misspelt_name_has_a_hint(view):
    with pytest.raises(UnknownOptionError, match="did you mean 'toy_depth'"):
        SecondaryTierFactory.check_config(toy(toy_deth=1))
    with pytest.raises(UnknownOptionError, match=r"'toy': .*'toy_deth' .*did you mean 'toy_depth'"):
        ToyManager(None, view, toy_deth=1)


def test_the_reference_has_it():
    (entry,) = (entry for entry in tier_entries() if entry.name == "toy")
    colour, depth, _ = entry.options
    assert (colour.name, colour.default) == ("colour", REQUIRED)
    assert colour.summary == "Colour of the blocks; any name."
    assert (depth.name, depth.default, depth.summary) == ("toy_depth", 3, "Depth of the blocks.")


def test_the_settings_have_it(view):
    manager = SecondaryTierFactory.create_secondary_tier(toy(toy_depth=5), view, None)
    assert manager.tier.settings == ToySettings(colour="red", depth=5, label="derived")
    assert manager.tier_type == "toy"
    manager.shutdown()
    manager = ToyManager(None, view, colour="blue")
    assert manager.tier.settings.depth == 3
    manager.shutdown()


def test_an_internal_option_is_for_python_only_and_shown_nowhere(view, tmp_path):
    refusing = (
        lambda: SecondaryTierFactory.check_config({"type": "fs", "root_dir": "/x", "opts": 1}),
        lambda: FileSystemTierManager(None, view, root_dir="/x", opts=1),
    )
    for refuse in refusing:
        with pytest.raises(UnknownOptionError) as raised:
            refuse()
        allowed = str(raised.value).partition("allowed: ")[2].split(", ")
        assert "root_dir" in allowed
        assert not {"ops", "runtime", "backpressure_detector"} & set(allowed)
    fs = {"type": "fs", "root_dir": str(tmp_path), "model": "m"}
    ops = FaultyFileOps()
    manager = SecondaryTierFactory.create_secondary_tier({**fs, "ops": ops}, view, None)
    assert manager.tier._ops is ops
    manager.shutdown()
    with pytest.raises(ConfigError, match="ops: 1 is not valid; it must be a FileOps"):
        SecondaryTierFactory.check_config({**fs, "ops": 1})


@pytest.mark.parametrize("library", ["no_such_library", "no_such_library.part", "json.no_such"])
def test_a_library_that_it_requires_and_that_is_missing_is_named_before_anything_starts(
    view, monkeypatch, threads_left, library
):
    monkeypatch.setattr(ToyTier, "requires", {library: "run pip install toys"})
    message = f"type: ToyTier needs the library {library}, .* installed; run pip install toys"
    with pytest.raises(ConfigError, match=message):
        SecondaryTierFactory.check_config(toy())
    with pytest.raises(ConfigError, match=message):
        ToyManager(None, view, colour="red")
    assert not threads_left()


def test_its_remedies_are_in_the_log_of_its_errors(view, monkeypatch, caplog):
    async def fail(*_args):
        raise TierUnavailableError("run down")

    monkeypatch.setattr(ToyTier, "store", fail)
    manager = SecondaryTierFactory.create_secondary_tier(toy(), view, None)
    manager.submit_store(make_job(1, [key_of(1)], [0], is_promotion=False))
    assert manager.drain_jobs(30.0)
    manager.shutdown()
    assert "run down (wind it up, or lower toy_depth)" in caplog.text


@pytest.mark.parametrize("remedies", [None, [], "wind it up"])
def test_remedies_that_are_no_mapping_are_refused_before_a_job_could_fail(
    view, monkeypatch, remedies, threads_left
):
    monkeypatch.setattr(ToyTier, "remedies", remedies)
    with pytest.raises(ConfigError, match=r"type: .*ToyTier\.remedies is not a mapping"):
        SecondaryTierFactory.create_secondary_tier(toy(), view, None)
    assert not threads_left()
    monkeypatch.setattr(ToyManager, "remedies", remedies)
    with pytest.raises(ConfigError, match=r"type: ToyManager\.remedies is not a mapping"):
        SecondaryTierFactory.check_config({"type": "ToyManager", "module_path": __name__})


def test_its_maintenance_is_found():
    assert ToyMaintenance in maintenance_kinds()


def test_every_option_is_described():
    described = [*OffloadConfig.described(), *common_options()]
    for entry in tier_entries():
        described += entry.options
    assert [option.name for option in described if not option.summary] == []
