"""Creates secondary tiers from their configuration; an error says which of several tiers it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import AsyncTier, TierPlace
from kvoffload_async.config import (
    OffloadConfig,
    Parser,
    nearest,
    parse_bool,
    parse_seconds,
    reject_unknown,
    shown,
)
from kvoffload_async.core.backpressure import (
    LOCAL_BACKPRESSURE,
    Backpressure,
    BackpressureSettings,
)
from kvoffload_async.errors import (
    ConfigError,
    OffloadError,
    TierTimeoutError,
    TierUnavailableError,
    UnknownNameError,
    text_of,
)
from kvoffload_async.facade.places import check_places
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import check_tier_options, config_of, identity_of
from kvoffload_async.registry import Registry, load_class
from kvoffload_async.runtime.buffer import row_stride_bytes


@contextmanager
def naming_tier(index: int, tier_config: Mapping[str, Any]) -> Iterator[None]:
    """Begin the message of what is raised with the tier's place in the configuration.

    Raises:
        ConfigError: Its own kind of it, or the tier's module cannot be imported.
        TierUnavailableError: As it was raised, or the tier has raised what it must not.
        TierTimeoutError: It did not open in time.
    """
    prefix = f"secondary_tiers[{index}]: "
    try:
        yield
    except TimeoutError as error:
        text = str(error) or "did not open in time; give it more as open_timeout_s"
        raise TierTimeoutError(prefix + text) from error
    except OffloadError as error:
        raise _like(error, prefix + text_of(error)) from error
    except (ImportError, AttributeError) as error:
        key = "module_path" if "module_path" in tier_config else "type"
        raise ConfigError(
            f"{prefix}{key}: {tier_config.get(key)!r} cannot be used ({error}); module_path must "
            "name a module that can be imported, and type a class in it"
        ) from error
    except Exception as error:
        raise TierUnavailableError(prefix + text_of(error)) from error


def _like(error: OffloadError, text: str) -> OffloadError:
    """Return an error of the same class, or of the nearest that takes a text."""
    for cls in type(error).__mro__:
        try:
            made = cls(text)
        except TypeError:  # somebody else's class, with arguments of its own
            continue
        if isinstance(made, OffloadError):
            return made
    return OffloadError(text)  # pragma: no cover - it is in every order of resolution


class UnknownOptionError(UnknownNameError, TypeError):
    """A tier does not take an option of this name."""


class SecondaryTierFactory:
    """Creates secondary tiers from their configuration; the registry is class-level.

    A registered class is either a `SecondaryTierManager` or an `AsyncTier`, which is then wrapped
    into one. Keys of a tier's configuration:

    * `type`: the registered name, or with `module_path` the class's name in that module;
    * `module_path`: the module of an out-of-tree tier;
    * `required` (true) and `reopen_pause_s`: see `facade.tier_group`;
    * `backpressure_cls` (`"ema"`) and `backpressure` (its settings): see `Backpressure`;
    * everything else goes to the constructor.
    """

    _registry = Registry("secondary tier", "kvoffload_async.tiers")

    @classmethod
    def register_tier(cls, name: str, import_path: str, class_name: str) -> None:
        """Make a tier known under a name; nothing is imported yet.

        Raises:
            ConfigError: The name is already registered.
        """
        cls._registry.register(name, import_path, class_name)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names that `type` may have."""
        return cls._registry.names()

    @classmethod
    def get_tier_class(cls, name: str) -> type:
        """Import and return the class registered under a name; raises what that raises."""
        return cls._checked(name, cls._registry.load(name))

    @classmethod
    def get_maintenance(cls, name: str) -> type[StoreMaintenance] | None:
        """Return what looks after the stores of a registered tier, if anything does.

        Raises what `get_tier_class` raises.
        """
        loaded: type[AsyncTier | SecondaryTierManager] = cls.get_tier_class(name)
        return loaded.maintenance()

    @classmethod
    def validate(cls) -> None:
        """Import every registered tier, to find a broken entry before it is used.

        Raises:
            ConfigError: Some cannot be imported, or are no tiers; names each of them.
        """
        broken = []
        for name in cls._registry.names():
            try:
                cls.get_tier_class(name)
            except (ImportError, AttributeError, ConfigError) as error:
                broken.append(f"{name}: {error}")
        if broken:
            raise ConfigError("secondary tiers that cannot be used: " + "; ".join(broken))

    @classmethod
    def check_config(
        cls, tier_config: Mapping[str, Any], config: OffloadConfig | None = None
    ) -> tuple[TierPlace, ...]:
        """Check a tier's configuration as far as it can be without a place; creates nothing.

        Args:
            tier_config: The tier's configuration.
            config: That of the spec which the tier is for, where there is one: a tier takes
                `model` and `fingerprint` from it, and its geometry.

        Returns:
            The places that the tier will keep its blocks in; see `check_places`.

        Raises:
            ConfigError: As `create_secondary_tier`.
            ImportError: As `create_secondary_tier`.
            AttributeError: As `create_secondary_tier`.
            TierUnavailableError: The tier's place does not answer.
        """
        loaded, _, options = cls._resolve(dict(tier_config))
        block_bytes = 0
        if config is not None and config.block_bytes:
            block_bytes = row_stride_bytes(config.block_bytes, config.num_workers)
        return _check(loaded, options, config, block_bytes)

    @classmethod
    def create_secondary_tier(
        cls,
        tier_config: Mapping[str, Any],
        primary_kv_view: memoryview,
        offloading_spec: object,
    ) -> SecondaryTierManager:
        """Check a tier's configuration, create and open it; the caller's mapping is not changed.

        Raises:
            ConfigError: `type` is missing or unknown, an option is missing or unusable, or the
                tier's place is.
            ImportError: The tier's module cannot be imported.
            AttributeError: Its module has no such class.
            TierUnavailableError: The tier's place cannot be reached.
            TierTimeoutError: It did not open in time.
        """
        loaded, tier_type, options = cls._resolve(dict(tier_config))
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        places = _check(loaded, options, config_of(offloading_spec), row_bytes)
        check_places([("", place) for place in places])
        common: dict[str, Any] = {
            "offloading_spec": offloading_spec,
            "primary_kv_view": primary_kv_view,
            "tier_type": tier_type,
        }
        if issubclass(loaded, SecondaryTierManager):
            return loaded(**common, **options)
        own = accepted_options(loaded)
        tier: AsyncTier = loaded(**{key: options[key] for key in options if key in own})
        shared = {key: value for key, value in options.items() if key not in own}
        return SecondaryTierManager(**common, tier=tier, **shared)

    @classmethod
    def _resolve(cls, config: dict[str, Any]) -> tuple[type[Any], str, dict[str, Any]]:
        tier_type = config.pop("type", None)
        if not tier_type:
            raise ConfigError("Secondary tier configuration must include 'type'")
        module_path = config.pop("module_path", None)
        for key, name in (("type", tier_type), ("module_path", module_path)):
            if name is not None and not isinstance(name, str):
                raise ConfigError(f"{key}: {shown(name)} is not valid; it must be a name")
        if module_path is None:
            loaded = cls.get_tier_class(tier_type)
        else:
            loaded = cls._checked(tier_type, load_class(module_path, tier_type, "module_path"))
        for key, parse in _OF_THE_ENGINE.items():
            if key in config:
                parse(config.pop(key), key)
        _move_backpressure(config)
        accepted = accepted_options(loaded) | accepted_options(SecondaryTierManager)
        for name in config:
            if name not in accepted:
                names = sorted(
                    accepted - _HIDDEN
                    | _OF_THE_ENGINE.keys()
                    | {"backpressure_cls", "backpressure"}
                )
                raise UnknownOptionError(
                    f"secondary tier {tier_type!r}: unknown key {shown(name)}"
                    f"{nearest(name, names)}; allowed: {', '.join(names)}"
                )
        own = accepted_options(loaded) if issubclass(loaded, AsyncTier) else set()
        check_tier_options({key: config[key] for key in config if key not in own})
        return loaded, tier_type, config

    @staticmethod
    def _checked(name: str, loaded: type) -> type:
        if issubclass(loaded, AsyncTier | SecondaryTierManager):
            return loaded
        raise ConfigError(
            f"secondary tier {name!r}: {loaded.__qualname__} is a subclass of neither "
            "SecondaryTierManager nor AsyncTier"
        )


SecondaryTierFactory.register_tier(
    "example", "kvoffload_async.facade.example", "ExampleSecondaryTierManager"
)

SecondaryTierFactory.register_tier("fs", "kvoffload_async.facade.fs", "FileSystemTierManager")

SecondaryTierFactory.register_tier("slab", "kvoffload_async.facade.slab", "SlabTierManager")

SecondaryTierFactory.register_tier("valkey", "kvoffload_async.facade.valkey", "ValkeyTierManager")

SecondaryTierFactory.register_tier(
    "mooncake", "kvoffload_async.facade.mooncake", "MooncakeTierManager"
)

SecondaryTierFactory.register_tier("object", "kvoffload_async.facade.object", "ObjectTierManager")

_GIVEN = frozenset({"self", "offloading_spec", "primary_kv_view", "tier_type", "tier", "runtime"})
_HIDDEN = frozenset({"backpressure_detector", "ops"})
_OF_THE_ENGINE: Mapping[str, Parser] = {"required": parse_bool, "reopen_pause_s": parse_seconds}
"""Keys of a tier that say what is done with it, and never reach it."""
_MOST_S_PER_MIB = 1e9


_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
}


def constructor_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return a constructor's parameters, its bases' behind its own."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        init = base.__dict__.get("__init__")
        if init is not None:
            for name, parameter in inspect.signature(init).parameters.items():
                found.setdefault(name, parameter)
    return found


def accepted_options(cls: type) -> set[str]:
    """Return the names of the options that a constructor takes, its bases' for `**options`."""
    accepted: set[str] = set()
    for base in cls.__mro__:
        init = base.__dict__.get("__init__")
        if init is None:
            continue
        parameters = inspect.signature(init).parameters.values()
        accepted |= {
            p.name
            for p in parameters
            if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY} and p.name not in _GIVEN
        }
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return accepted


def _check(
    cls: type[Any], options: Mapping[str, Any], config: OffloadConfig | None, block_bytes: int
) -> tuple[TierPlace, ...]:
    """Check the options of a tier whose names are known; return where it will keep its blocks."""
    own = accepted_options(cls)
    parameters = constructor_parameters(SecondaryTierManager) | constructor_parameters(cls)
    for key in sorted(own - options.keys()):
        if parameters[key].default is inspect.Parameter.empty:
            raise ConfigError(f"{key}: missing; this tier does not work without it")
    is_async = issubclass(cls, AsyncTier)
    labels = {key: options[key] for key in options if not (is_async and key in own)}
    identity = identity_of(labels, config, block_bytes)
    seen = {key: options[key] for key in options if key in own or not is_async}
    try:
        places = tuple(cls.check_options(seen, identity))
    except (ConfigError, TierUnavailableError):
        raise
    except Exception as error:
        raise ConfigError(
            f"type: {cls.__qualname__} cannot check its options, as it raises "
            f"{type(error).__name__} ({error}); correct its check_options"
        ) from error
    for key, value in options.items():
        allowed = _TYPES.get(type(parameters[key].default))
        # By type and not isinstance: true and false are integers to that.
        if allowed is not None and type(value) not in allowed[0]:
            raise ConfigError(f"{key}: {shown(value)} is not valid; it must be {allowed[1]}")
    return places


def _move_backpressure(config: dict[str, Any]) -> None:
    """Replace the two back-pressure keys of a tier's configuration by a detector."""
    name = config.pop("backpressure_cls", None)
    settings = config.pop("backpressure", None)
    if name is None:
        if settings is not None:
            raise ConfigError('backpressure: goes with backpressure_cls; add "ema"')
        return
    if name != "ema":
        raise ConfigError(f'backpressure_cls: {shown(name)} is unknown; allowed: "ema"')
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"backpressure: {shown(settings)} is not valid; it must be an object")
    config["backpressure_detector"] = Backpressure(parse_backpressure(settings or {}))


def parse_backpressure(raw: Mapping[str, Any]) -> BackpressureSettings:
    """Return back-pressure settings; what is left out is that of a local tier.

    Raises:
        ConfigError: A key is unknown, or the water marks are not positive and in order.
    """
    names = [option.name for option in fields(BackpressureSettings)]
    reject_unknown(raw, names, "backpressure")
    settings = replace(LOCAL_BACKPRESSURE, **raw)
    low, high = settings.low_water_s_per_mib, settings.high_water_s_per_mib
    are_numbers = all(isinstance(mark, int | float) for mark in (low, high))
    if not are_numbers or not 0 < low < high < _MOST_S_PER_MIB:
        raise ConfigError(
            f"backpressure: low_water_s_per_mib={shown(low)} and "
            f"high_water_s_per_mib={shown(high)} must be numbers with 0 < low < high < "
            f"{_MOST_S_PER_MIB:g}"
        )
    return settings
