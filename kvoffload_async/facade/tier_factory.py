"""Creation of secondary tiers from their configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import inf
from typing import Any, ClassVar, Final

from kvoffload_async.abc.tier import AsyncTier, TierLocation
from kvoffload_async.config import (
    REQUIRED,
    OffloadConfig,
    Options,
    one_of,
    option,
    or_none,
    parse_bool,
    parse_size_bytes,
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
    check_remedies,
    shortage_remedy,
    text_of,
)
from kvoffload_async.facade.locations import check_locations, examine
from kvoffload_async.facade.secondary import SecondaryTierManager, manager_of
from kvoffload_async.facade.tier_options import (
    config_of,
    identity_of,
    options_of,
    reject_unknown_options,
)
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.registry import Registry, load_class
from kvoffload_async.runtime.buffer import row_stride_bytes


@contextmanager
def naming_tier(
    index: int, tier_config: Mapping[str, Any], key: str = "secondary_tiers"
) -> Iterator[None]:
    """Prefix error messages with the tier's position in the list named `key`.

    Raises:
        ConfigError: The configuration is unusable, or the tier's module cannot be imported.
        TierUnavailableError: The tier is unavailable, or raised an unexpected error.
        TierTimeoutError: The tier did not open in time.
    """
    prefix = f"{key}[{index}]: "
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
        remedies = filter(None, (text_of(error), shortage_remedy(error)))
        raise TierUnavailableError(prefix + "; ".join(remedies)) from error


def _like(error: OffloadError, text: str) -> OffloadError:
    """Return a copy of an error with another text, of its class or the nearest base class."""
    for cls in type(error).__mro__:
        try:
            made = cls(text)
        except TypeError:  # a third party's class whose constructor takes other arguments
            continue
        if isinstance(made, OffloadError):
            return made
    return OffloadError(text)  # pragma: no cover - it is in every order of resolution


_MOST_S_PER_MIB: Final = 1e9


def parse_backpressure(value: object, key: str) -> BackpressureSettings:
    """Return back-pressure settings; missing keys get the defaults of a local tier.

    Raises:
        ConfigError: A key is unknown, or the water marks are not positive and in order.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: {shown(value)} is not valid; it must be an object")
    reject_unknown(value, [field.name for field in fields(BackpressureSettings)], key)
    settings = replace(LOCAL_BACKPRESSURE, **value)
    low, high = settings.low_water_s_per_mib, settings.high_water_s_per_mib
    are_numbers = all(isinstance(mark, int | float) for mark in (low, high))
    if not are_numbers or not 0 < low < high < _MOST_S_PER_MIB:
        raise ConfigError(
            f"{key}: low_water_s_per_mib={shown(low)} and "
            f"high_water_s_per_mib={shown(high)} must be numbers with 0 < low < high < "
            f"{_MOST_S_PER_MIB:g}"
        )
    return settings


class BackpressureClass(StrEnum):
    """Names of the back-pressure detectors."""

    EMA = "ema"


class TierAdmission(StrEnum):
    """Admission policy: which stored blocks are written to a tier."""

    ALL = "all"
    REUSE = "reuse"


@dataclass(frozen=True, kw_only=True)
class EngineTierOptions(Options):
    """Options of every tier that only the engine uses; the tier's class does not get them."""

    backpressure_cls: BackpressureClass | None = option(or_none(one_of(BackpressureClass)), None)
    """With "ema", the engine delays some stores to the tier while the tier is slow."""
    backpressure: BackpressureSettings | None = option(or_none(parse_backpressure), None)
    """Settings of `backpressure_cls`: `high_water_s_per_mib` and `low_water_s_per_mib`."""
    required: bool = option(parse_bool, default=True)
    """Whether the tier must open. If False, the engine starts without a tier that cannot be opened
    and retries in the background, after pauses that double from 1 s to 60 s."""
    admission: TierAdmission = option(one_of(TierAdmission), TierAdmission.ALL)
    """Which stored blocks are written to the tier: "all", or with "reuse" only those that are
    likely to be used again while the tier would keep them."""


class SecondaryTierFactory:
    """Creates secondary tiers from their configuration; the registry is class-level.

    A tier's class is an `AsyncTier`, for which a manager's class is made, a `SecondaryTierManager`,
    or a class of another contract that `register_adapter` added. Keys of a tier's configuration:

    * `type`: the registered name, or with `module_path` the class's name in that module;
    * `module_path`: the module of an out-of-tree tier;
    * the options that `EngineTierOptions` declares;
    * everything else goes to the constructor.
    """

    _registry = Registry("secondary tier", "kvoffload_async.tiers")
    _adapters: ClassVar[dict[type, Callable[[Any], type[SecondaryTierManager]]]] = {}

    @classmethod
    def register_tier(cls, name: str, import_path: str, class_name: str) -> None:
        """Register a tier under a name, without importing it.

        Raises:
            ConfigError: The name is already registered.
        """
        cls._registry.register(name, import_path, class_name)

    @classmethod
    def register_adapter(
        cls, contract: type, adapt: Callable[[Any], type[SecondaryTierManager]]
    ) -> None:
        """Register an adapter for tier classes of another contract.

        Args:
            contract: Base class of these classes.
            adapt: Returns the manager class that drives such a class; raises ConfigError for one
                that it cannot drive.
        """
        cls._adapters[contract] = adapt

    @classmethod
    def names(cls) -> list[str]:
        """Return the registered tier names, the valid values of `type`."""
        return cls._registry.names()

    @classmethod
    def get_tier_class(cls, name: str) -> type[SecondaryTierManager]:
        """Import the tier class registered under a name; return its manager class.

        Raises:
            ConfigError: The name is unknown, or the class is not one of a tier.
            ImportError: The tier's module cannot be imported.
            AttributeError: Its module has no such class.
        """
        return cls._checked(name, cls._registry.load(name))

    @classmethod
    def class_of(cls, tier_config: Mapping[str, Any]) -> type[SecondaryTierManager]:
        """Return the manager class of a configured tier; errors as in `get_tier_class`."""
        tier_type, module_path = tier_config.get("type"), tier_config.get("module_path")
        if not tier_type:
            raise ConfigError("Secondary tier configuration must include 'type'")
        for key, name in (("type", tier_type), ("module_path", module_path)):
            if name is not None and not isinstance(name, str):
                raise ConfigError(f"{key}: {shown(name)} is not valid; it must be a name")
        if module_path is None:
            return cls.get_tier_class(tier_type)
        return cls._checked(tier_type, load_class(module_path, tier_type, "module_path"))

    @classmethod
    def is_private(cls, tier_config: Mapping[str, Any]) -> bool:
        """Return whether only one process can use the tier's contents, as its class declares.

        Errors as `get_tier_class`.
        """
        capabilities = getattr(cls.class_of(tier_config).tier_class, "capabilities", None)
        return capabilities is not None and bool(capabilities.exclusive)

    @classmethod
    def host_defaults(cls, tier_config: Mapping[str, Any]) -> dict[str, str]:
        """Return those of a tier's defaults that differ under host software, such as vLLM.

        The model of such a host may differ at each start.

        Errors as `get_tier_class`.
        """
        options = options_of(cls.class_of(tier_config))
        return {"on_mismatch": "replace"} if "on_mismatch" in options else {}

    @classmethod
    def validate(cls) -> None:
        """Import every registered tier, to find broken entries before they are used.

        Raises:
            ConfigError: Some classes cannot be imported or are no tiers; the message names each.
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
    ) -> tuple[TierLocation, ...]:
        """Check a tier's configuration without creating anything or using its directory.

        Args:
            tier_config: The tier's configuration.
            config: The engine's configuration, if there is one: a tier takes `model`,
                `fingerprint` and the geometry from it.

        Returns:
            The directories or servers that the tier will use; see `check_locations`.

        Raises:
            ConfigError: As `create_secondary_tier`.
            ImportError: As `create_secondary_tier`.
            AttributeError: As `create_secondary_tier`.
            TierUnavailableError: The tier's filesystem does not answer.
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
        """Check a tier's configuration, then create and open the tier; the mapping is unchanged.

        Raises:
            ConfigError: `type` is missing or unknown, or an option or the tier's directory is
                missing or unusable.
            ImportError: The tier's module cannot be imported.
            AttributeError: Its module has no such class.
            TierUnavailableError: The tier's directory or server cannot be reached.
            TierTimeoutError: It did not open in time.
        """
        loaded, tier_type, options = cls._resolve(dict(tier_config))
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        locations = _check(loaded, options, config_of(offloading_spec), row_bytes)
        check_locations([("", location) for location in locations])
        return loaded(
            offloading_spec=offloading_spec,
            primary_kv_view=primary_kv_view,
            tier_type=tier_type,
            **options,
        )

    @classmethod
    def _resolve(
        cls, config: dict[str, Any]
    ) -> tuple[type[SecondaryTierManager], str, dict[str, Any]]:
        loaded = cls.class_of(config)
        tier_type = config.pop("type")
        config.pop("module_path", None)
        given = {key: config.pop(key) for key in EngineTierOptions.declared() if key in config}
        names = options_of(loaded).keys() | EngineTierOptions.declared().keys()
        reject_unknown_options(config, names, loaded.tier_class, tier_type)
        if (detector := _detector_of(EngineTierOptions.take(given))) is not None:
            config["backpressure_detector"] = detector
        return loaded, tier_type, config

    @classmethod
    def _checked(cls, name: str, loaded: type) -> type[SecondaryTierManager]:
        if issubclass(loaded, SecondaryTierManager):
            check_remedies(loaded.remedies, loaded)
            return loaded
        if issubclass(loaded, AsyncTier):
            return manager_of(loaded)
        for contract, adapt in cls._adapters.items():
            if issubclass(loaded, contract):
                return adapt(loaded)
        raise ConfigError(
            f"secondary tier {name!r}: {loaded.__qualname__} is a subclass of neither "
            "SecondaryTierManager nor AsyncTier"
        )


BUILT_IN: Final = {
    "example": ("example", "ExampleTier"),
    "fs": ("fs.tier", "FsTier"),
    "mooncake": ("mooncake.tier", "MooncakeTier"),
    "object": ("object.tier", "ObjectTier"),
    "slab": ("slab.tier", "SlabTier"),
    "valkey": ("valkey.tier", "ValkeyTier"),
}
"""Name of each tier of this package -> its module in `tiers`, and its class there."""

for _name, (_module, _class) in BUILT_IN.items():
    SecondaryTierFactory.register_tier(_name, f"kvoffload_async.tiers.{_module}", _class)


def check_tiers(
    tiers: Sequence[Mapping[str, Any]],
    config: OffloadConfig | None = None,
    *,
    key: str = "secondary_tiers",
    memory_bytes: int = 0,
) -> None:
    """Check configurations of tiers without creating anything.

    Args:
        tiers: Configuration of each tier; see `SecondaryTierFactory`.
        config: Gives the tiers their model, fingerprint and geometry.
        key: Name of the list of tiers, for messages.
        memory_bytes: Memory of the primary.

    Raises:
        ConfigError: A configuration is unusable; the message begins with `key` and the position.
        TierUnavailableError: The filesystem of a tier that is `required` cannot be reached.
    """
    locations: list[tuple[str, TierLocation]] = []
    for index, tier in enumerate(tiers):
        tolerated = [TierUnavailableError] if tier.get("required") is False else []
        with naming_tier(index, tier, key), suppress(*tolerated):
            found = SecondaryTierFactory.check_config(tier, config)
            locations += [(f"{key}[{index}]: ", location) for location in found]
    check_locations(locations, memory_bytes)


def with_quotas(
    tiers: Sequence[Mapping[str, Any]], quotas: TenantQuotas, key: str = "secondary_tiers"
) -> list[Mapping[str, Any]]:
    """Return configurations of tiers that divide their capacities among tenants.

    A tier that cannot is unchanged if no tenant has a quota: then all share it.

    Raises:
        ConfigError: A tenant has a quota, and a tier cannot bound tenants, or has no capacity.
    """
    given: list[Mapping[str, Any]] = []
    for index, tier in enumerate(tiers):
        with naming_tier(index, tier, key):
            tier_class = SecondaryTierFactory.class_of(tier).tier_class
            declares = None if tier_class is None else tier_class.declares
            can = declares is not None and "quotas" in declares.declared()
            bounds = can and tier.get("capacity_bytes") is not None
            if not bounds and any(quota is not None for quota in quotas.quota_bytes):
                raise ConfigError(
                    "quota_bytes: the tier cannot keep tenants to their quotas; "
                    + (
                        "give it capacity_bytes"
                        if can
                        else "use fs, slab or object, or no quota_bytes"
                    )
                )
            given.append({**tier, "quotas": quotas} if bounds else tier)
    return given


def reuse_capacity(tier_config: Mapping[str, Any], row_bytes: int) -> float | None:
    """Return how many blocks fit into a tier with `admission` "reuse"; None for other tiers.

    A tier without `capacity_bytes` counts as endless.
    """
    if tier_config.get("admission", TierAdmission.ALL) != TierAdmission.REUSE:
        return None
    capacity = tier_config.get("capacity_bytes")
    if capacity is None:
        return inf
    return parse_size_bytes(capacity, "capacity_bytes") / row_bytes


_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
}


def _check(
    cls: type[SecondaryTierManager],
    options: Mapping[str, Any],
    config: OffloadConfig | None,
    block_bytes: int,
) -> tuple[TierLocation, ...]:
    """Check a tier's options, except for unknown names; return the locations of its blocks."""
    allowed = options_of(cls)
    declares = None if cls.tier_class is None else cls.tier_class.declares
    # Their declaration checks them, with remedies of its own.
    declared = {} if declares is None else declares.declared()
    for key in sorted(allowed.keys() - declared.keys() - options.keys()):
        if allowed[key] is REQUIRED:
            raise ConfigError(f"{key}: missing; this tier does not work without it")
    identity = identity_of(cls.common_options(options), config, block_bytes)
    try:
        locations = tuple(cls.check_options(options, identity))
    except (ConfigError, TierUnavailableError):
        raise
    except Exception as error:
        raise ConfigError(
            f"type: {(cls.tier_class or cls).__qualname__} cannot check its options, as it raises "
            f"{type(error).__name__} ({error}); correct its check_options"
        ) from error
    for location in locations:
        if location.check is not None:
            location.check(examine(location).status)
    for key, value in options.items():
        kinds = None if key in declared else _TYPES.get(type(allowed.get(key)))
        # Not isinstance, because bool is a subclass of int.
        if kinds is not None and type(value) not in kinds[0]:
            raise ConfigError(f"{key}: {shown(value)} is not valid; it must be {kinds[1]}")
    return locations


def _detector_of(options: EngineTierOptions) -> Backpressure | None:
    """Return the back-pressure detector that a tier's configuration asks for."""
    if options.backpressure_cls is None:
        if options.backpressure is not None:
            raise ConfigError('backpressure: goes with backpressure_cls; add "ema"')
        return None
    return Backpressure(options.backpressure or LOCAL_BACKPRESSURE)
