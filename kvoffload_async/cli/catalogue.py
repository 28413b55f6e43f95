"""The registered tiers and their options; the tables of `tiers` and `check-config`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from kvoffload_async.cli.host_config import HostConfig
from kvoffload_async.config import REQUIRED, Option, TierOptions, without_secrets
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.spec import TieringOffloadingSpec
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
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()


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
        return TierEntry(name, f"cannot be used: {error}")
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


def derived_settings(spec: TieringOffloadingSpec, found: HostConfig) -> dict[str, Any]:
    """Return a configuration's derived settings, as JSON has them; without secrets.

    Args:
        spec: Made from the configuration.
        found: The configuration; what has a placeholder in it is None, as what follows from it.
    """
    config = spec.config
    sizes = {
        "primary_blocks": spec.num_blocks,
        "row_stride_bytes": spec.stride_bytes,
        "block_bytes": config.block_bytes,
        "num_workers": config.num_workers,
        "used_bytes": spec.num_blocks * spec.stride_bytes,
        "tokens_per_block": config.block_size * config.blocks_per_chunk,
    }
    return {
        **(dict.fromkeys(sizes) if found.placeholders else sizes),
        "cpu_bytes_to_use": found.engine.get("cpu_bytes_to_use") and config.cpu_bytes_to_use,
        "eviction_policy": config.eviction_policy,
        "decided_by": found.host or None,
        "status_socket": config.status_socket,
        "secondary_tiers": [
            {key: without_secrets(value, key) for key, value in tier.items()}
            for tier in config.secondary_tiers
        ],
    }


def geometry_table(settings: Mapping[str, Any]) -> Table:
    """Return a table of a configuration's derived settings; see `derived_settings`."""
    table = Table(title="Configuration", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    memory = "unknown"
    if settings["cpu_bytes_to_use"] is not None:
        memory = f"{settings['cpu_bytes_to_use']:,} bytes"
    if settings["primary_blocks"] is None:
        table.add_row("memory", memory)
        table.add_row("not checked", f"what only {settings['decided_by']} knows, as a block's size")
    else:
        workers = f"on {settings['num_workers']} worker(s)"
        table.add_row("primary blocks", f"{settings['primary_blocks']:,}")
        table.add_row("row stride", f"{settings['row_stride_bytes']:,} bytes")
        table.add_row("block", f"{settings['block_bytes']:,} bytes {workers}")
        table.add_row("memory", f"{settings['used_bytes']:,} of {memory}")
        table.add_row("tokens per block", f"{settings['tokens_per_block']:,}")
    table.add_row("eviction policy", settings["eviction_policy"])
    if settings["status_socket"] is not None:
        table.add_row("status socket", Text(settings["status_socket"]))
    for number, tier in enumerate(settings["secondary_tiers"], 1):
        options = ", ".join(f"{k}={json.dumps(v)}" for k, v in tier.items() if k != "type")
        text = f"{tier['type']}: {options}" if options else str(tier["type"])
        table.add_row(f"secondary tier {number}", Text(text))
    if not settings["secondary_tiers"]:
        table.add_row("secondary tiers", "none")
    return table


def option_table(options: Sequence[Option]) -> Table:
    """Return a table of a tier's options."""
    table = Table("option", "default", "")
    for option in options:
        default = "required" if option.default is REQUIRED else json.dumps(option.default)
        table.add_row(option.name, Text(default), Text(option.summary))
    return table
