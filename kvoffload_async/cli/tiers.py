"""The registered tiers and their options; the tables of `tiers`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from kvoffload_async.config import REQUIRED, Option, TierOptions
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_factory import EngineTierOptions, SecondaryTierFactory
from kvoffload_async.facade.tier_options import options_of

_ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One registered tier.

    Attributes:
        name: Its `type` in the configuration.
        summary: One line; the reason if the tier cannot be used.
        options: Its own options, without those common to all tiers.
        is_usable: Whether its class can be imported.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    is_usable: bool = True


def tier_entries() -> list[TierEntry]:
    """Return every registered tier, including those that cannot be imported."""
    return [_entry(name) for name in SecondaryTierFactory.names()]


def common_options() -> list[Option]:
    """Return the options common to all tiers, including those handled by the factory."""
    return TierOptions.described() + EngineTierOptions.described()


def _entry(name: str) -> TierEntry:
    try:
        cls = SecondaryTierFactory.get_tier_class(name)
    except (ImportError, AttributeError, ConfigError) as error:
        return TierEntry(name, f"cannot be used: {error}", is_usable=False)
    lines = (inspect.getdoc(cls.tier_class or cls) or "").splitlines()
    return TierEntry(name, lines[0] if lines else "", tuple(_own_options(cls)))


def _own_options(cls: type[SecondaryTierManager]) -> Iterator[Option]:
    """Yield the options of a tier that not every tier takes."""
    summaries = _summaries(cls)
    for name, default in options_of(cls).items():
        if name not in options_of(SecondaryTierManager):
            yield Option(name, default, summaries.get(name, ""))


def _summaries(cls: type[SecondaryTierManager]) -> dict[str, str]:
    """Return the description of each option: declared, or in the `Args` of class or constructor."""
    found: dict[str, str] = {}
    tier_class = cls.tier_class
    for base in (*reversed(cls.__mro__), *reversed(tier_class.__mro__ if tier_class else ())):
        for owner in (base, base.__dict__.get("__init__")):
            _, _, arguments = (inspect.getdoc(owner) or "").partition("\nArgs:\n")
            found |= {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(arguments)}
    if tier_class is not None and tier_class.declares is not None:
        found |= {option.name: option.summary for option in tier_class.declares.described()}
    return found


def tiers_as_json() -> dict[str, Any]:
    """Return the registered tiers and their options, as JSON has them."""
    return {
        "tiers": [
            {
                "type": entry.name,
                "summary": entry.summary,
                "is_usable": entry.is_usable,
                "options": list(map(_as_json, entry.options)),
            }
            for entry in tier_entries()
        ],
        "common_options": list(map(_as_json, common_options())),
    }


def _as_json(option: Option) -> dict[str, Any]:
    is_required = option.default is REQUIRED
    return {
        "name": option.name,
        "is_required": is_required,
        "default": None if is_required else option.default,
        "summary": option.summary,
    }


def option_table(options: Sequence[Option]) -> Table:
    """Return a table of a tier's options."""
    table = Table("option", "default", "")
    for option in options:
        default = "required" if option.default is REQUIRED else json.dumps(option.default)
        table.add_row(option.name, Text(default), Text(option.summary))
    return table
