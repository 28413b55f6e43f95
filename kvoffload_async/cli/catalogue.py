"""The registered tiers, and the options that they take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.factory import SecondaryTierFactory, accepted_options
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.factory import load_class

REQUIRED = inspect.Parameter.empty

_INTERNAL = {"backpressure_detector"}  # made by the factory, from its own two keys
_ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TierOption:
    """One option of a tier's constructor.

    Attributes:
        name: Its key in the configuration.
        default: What holds if it is not given, or `REQUIRED`.
        summary: What it means, or empty where the constructor's docstring does not say.
    """

    name: str
    default: object
    summary: str


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One registered tier.

    Attributes:
        name: Its `type` in the configuration.
        summary: One line; of a tier that cannot be used, why.
        options: Its own options, without those that every tier takes.
        is_usable: Whether its class could be imported.
    """

    name: str
    summary: str
    options: tuple[TierOption, ...] = ()
    is_usable: bool = True


def tier_entries() -> list[TierEntry]:
    """Return every registered tier; one that cannot be imported says so."""
    return [_entry(name) for name in SecondaryTierFactory.names()]


def common_options() -> tuple[TierOption, ...]:
    """Return the options that every tier takes, back-pressure's two keys included."""
    backpressure = (
        TierOption("backpressure_cls", None, '"ema" spares a slow tier some stores.'),
        TierOption("backpressure", None, "high_water_s_per_mib and low_water_s_per_mib."),
    )
    return (*_options(SecondaryTierManager, set()), *backpressure)


def check_option_types(tier_config: Mapping[str, Any]) -> None:
    """Check the options whose default tells what they are: numbers, text, true or false.

    The names must have been checked before.

    Raises:
        ConfigError: A value is of another type.
    """
    module_path = tier_config.get("module_path")
    cls = (
        SecondaryTierFactory.get_tier_class(tier_config["type"])
        if module_path is None
        else load_class(module_path, tier_config["type"])
    )
    defaults = _parameters(SecondaryTierManager) | _parameters(cls)
    for key, value in tier_config.items():
        default = defaults[key].default if key in defaults else REQUIRED
        allowed = _ALLOWED.get(type(default))
        if allowed is not None and type(value) not in allowed[0]:
            raise ConfigError(f"{key}: {value!r} is not valid; it must be {allowed[1]}")


_ALLOWED: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
}


def _entry(name: str) -> TierEntry:
    try:
        cls = SecondaryTierFactory.get_tier_class(name)
    except (ImportError, AttributeError, ConfigError) as error:
        return TierEntry(name, f"cannot be used: {error}", is_usable=False)
    lines = (inspect.getdoc(cls) or "").splitlines()
    common = accepted_options(SecondaryTierManager)
    return TierEntry(name, lines[0] if lines else "", _options(cls, common))


def _options(cls: type, without: set[str]) -> tuple[TierOption, ...]:
    parameters = _parameters(cls)
    summaries = _summaries(cls)
    names = accepted_options(cls) - without - _INTERNAL
    return tuple(
        TierOption(name, parameter.default, summaries.get(name, ""))
        for name, parameter in parameters.items()
        if name in names
    )


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters, its bases' behind its own."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        init = base.__dict__.get("__init__")
        if init is not None:
            found = {**dict(inspect.signature(init).parameters), **found}
    return found


def _summaries(cls: type) -> dict[str, str]:
    """Return what the docstrings of class and constructor say of each argument, as one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for owner in (base, base.__dict__.get("__init__")):
            _, _, arguments = (inspect.getdoc(owner) or "").partition("\nArgs:\n")
            found |= {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(arguments)}
    return found
