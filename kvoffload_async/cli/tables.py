"""What `check-config` and `tiers` show."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from kvoffload_async.cli.catalogue import REQUIRED, TierOption
from kvoffload_async.config import without_secrets
from kvoffload_async.facade.spec import TieringOffloadingSpec


def geometry_table(spec: TieringOffloadingSpec) -> Table:
    """Return what a configuration comes to."""
    config = spec.config
    used_bytes = spec.num_blocks * spec.stride_bytes
    table = Table(title="Configuration", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("primary blocks", f"{spec.num_blocks:,}")
    table.add_row("row stride", f"{spec.stride_bytes:,} bytes")
    table.add_row("block", f"{config.block_bytes:,} bytes on {config.num_workers} worker(s)")
    table.add_row("memory", f"{used_bytes:,} of {config.cpu_bytes_to_use:,} bytes")
    table.add_row("tokens a block", f"{config.block_size * config.blocks_per_chunk:,}")
    table.add_row("eviction policy", config.eviction_policy)
    if config.status_socket is not None:
        table.add_row("status socket", Text(config.status_socket))
    for number, tier in enumerate(config.secondary_tiers, 1):
        shown = {key: without_secrets(value, key) for key, value in tier.items() if key != "type"}
        options = ", ".join(f"{key}={json.dumps(value)}" for key, value in shown.items())
        text = f"{tier['type']}: {options}" if options else str(tier["type"])
        table.add_row(f"secondary tier {number}", Text(text))
    if not config.secondary_tiers:
        table.add_row("secondary tiers", "none")
    return table


def option_table(options: Sequence[TierOption]) -> Table:
    """Return a tier's options."""
    table = Table("option", "default", "")
    for option in options:
        default = "required" if option.default is REQUIRED else json.dumps(option.default)
        table.add_row(option.name, Text(default), Text(option.summary))
    return table
