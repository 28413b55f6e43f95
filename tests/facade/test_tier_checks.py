"""A tier class checks its own options: whenever a configuration is checked, and before it opens."""

import pytest
from facade.worlds import EXCLUSIVE
from scripted_tier import ScriptedTier

from kvoffload_async import (
    ConfigError,
    ExampleSecondaryTierManager,
    OffloadEngine,
    SecondaryTierFactory,
    TieringOffloadingSpec,
)
from kvoffload_async.abc.tier import TierLocation
from kvoffload_async.errors import TierTimeoutError, TierUnavailableError
from kvoffload_async.runtime.buffer import PrimaryBuffer

CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "m"}


class AskingError(ConfigError):
    """An error with arguments of its own."""

    def __init__(self, *, host):
        super().__init__(f"host: {host}")


class CheckedTier(ScriptedTier):
    seen = None
    opened = 0

    def __init__(self, colour, place=None, raises=None, model=None):
        super().__init__(EXCLUSIVE)
        self.raises = raises

    @classmethod
    def check_options(cls, options, identity):
        CheckedTier.seen = dict(options), identity
        if options["colour"] == "grey":
            raise ConfigError("colour: 'grey' is no colour; give another")
        if options["colour"] == "far":
            raise TierUnavailableError("colour: nobody answers")
        options["colour"].upper()
        place = options.get("place")
        return [] if place is None else [TierLocation(place, 1 << 62, key="place")]

    async def open(self, env):
        CheckedTier.opened += 1
        errors = {
            "config": ConfigError("x: 1 is wrong"),
            "gone": TierUnavailableError("nobody there"),
            "slow": TimeoutError(),
            "own": AskingError(host="h"),
            "any": ZeroDivisionError("third-party code"),
            "system": OSError(5, "third-party code"),
        }
        if self.raises:
            raise errors[self.raises]


class CheckedManager(ExampleSecondaryTierManager):
    @classmethod
    def check_options(cls, options, identity):
        raise ConfigError(f"custom_param: {options['custom_param']} is not to be had; take another")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    registry = SecondaryTierFactory._registry
    loaders = {"checked": lambda: CheckedTier, "manager": lambda: CheckedManager}
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, **loaders})
    monkeypatch.setattr(CheckedTier, "opened", 0)


def tier(colour="red", **options):
    return {"type": "checked", "colour": colour, **options}


def spec_of(*tiers, **config):
    return TieringOffloadingSpec({**CONFIG, **config, "secondary_tiers": list(tiers)})


def test_the_check_sees_the_constructors_options_and_the_blocks_identity():
    spec_of(tier(model="own", n_read_threads=2), num_workers=2, fingerprint="f")
    options, identity = CheckedTier.seen
    assert options == {"colour": "red", "model": "own"}
    assert (identity.model, identity.fingerprint) == ("m", "f"), "model is the tier's own option"
    assert (identity.block_bytes, identity.num_workers) == (8192, 2)


def test_what_the_check_refuses_is_named_with_its_tier_and_nothing_has_started(threads_left):
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[1\]: colour: 'grey' is no colour"):
        spec_of({"type": "example"}, tier("grey"))
    with pytest.raises(
        ConfigError, match=r"^secondary_tiers\[0\]: custom_param: 3 is not to be had"
    ):
        spec_of({"type": "manager", "custom_param": 3})
    with pytest.raises(
        TierUnavailableError, match=r"^secondary_tiers\[0\]: colour: nobody answers"
    ):
        spec_of(tier("far"))
    assert CheckedTier.opened == 0
    assert not threads_left()


def test_a_check_that_fails_is_the_classs_own_fault_and_no_traceback():
    with pytest.raises(
        ConfigError, match=r"\[0\]: type: CheckedTier .* as it raises AttributeError"
    ):
        spec_of(tier(5))


def test_an_engine_and_a_tier_on_its_own_are_checked_alike(tmp_path):
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]: colour"):
        OffloadEngine({**CONFIG, "secondary_tiers": [tier("grey")]}, lambda _view: None)
    buffer = PrimaryBuffer(4, 4096, prefault=False)
    with pytest.raises(ConfigError, match=r"^colour: 'grey'"):
        SecondaryTierFactory.create_secondary_tier(tier("grey"), buffer.view, None)
    with pytest.raises(ConfigError, match=r"^capacity_bytes: 4611686018427387904 do not fit"):
        SecondaryTierFactory.create_secondary_tier(tier(place=str(tmp_path)), buffer.view, None)
    assert buffer.release()
    assert CheckedTier.opened == 0


def test_the_locations_of_tiers_of_ones_own_are_compared_too(tmp_path):
    with pytest.raises(ConfigError, match=r"\[1\]: place: 'here' is where secondary_tiers\[0\]"):
        spec_of(tier(place="here"), tier(place="here"))
    spec_of(tier(place="here"), tier(place="there"))


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        ("config", ConfigError, "x: 1 is wrong"),
        ("gone", TierUnavailableError, "nobody there"),
        ("slow", TierTimeoutError, "tier checked (CheckedTier): did not open within 30 s; check"),
        ("own", ConfigError, "host: h"),
        ("any", TierUnavailableError, "ZeroDivisionError: third-party code"),
        ("system", TierUnavailableError, "OSError: "),
    ],
)
def test_an_error_at_opening_names_the_tier_and_keeps_its_kind(
    failure, kind, message, threads_left
):
    spec = spec_of({"type": "example"}, tier(raises=failure))
    with pytest.raises(kind) as raised:
        spec.get_manager()
    assert str(raised.value).startswith(f"secondary_tiers[1]: {message}")
    assert isinstance(raised.value, kind)
    assert not threads_left()


def test_a_tier_that_may_be_large_has_longer_to_open(monkeypatch):
    monkeypatch.setattr(CheckedTier, "opening_s", lambda _tier, block_bytes: block_bytes / 4)
    spec = spec_of({"type": "example"}, tier(raises="slow"))
    with pytest.raises(TierTimeoutError, match="did not open within 1054 s"):
        spec.get_manager()


def test_a_primary_that_is_larger_than_the_memory_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: 109951162777600 bytes are more "):
        spec_of(cpu_bytes_to_use="100TiB")
