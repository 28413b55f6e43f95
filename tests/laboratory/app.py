"""The commands of the laboratory."""

from __future__ import annotations

import typer

from kvoffload_async.cli.command import OneLineGroup, command
from laboratory.bench import PeerOptions, bench
from laboratory.replay import FleetFlags, replay

app = typer.Typer(
    cls=OneLineGroup,
    help="The measurements of this project: kvoffload's commands, with peers, plots and fleets.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command(app, PeerOptions)(bench)
command(app, FleetFlags)(replay)
