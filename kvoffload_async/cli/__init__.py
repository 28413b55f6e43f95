"""The `kvoffload` command: replays traces through the engine, checks configurations."""

from kvoffload_async.cli.app import main

__all__ = ["main"]
