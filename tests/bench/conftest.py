"""The command is what these tests run."""

from command_line import command, importable

__all__ = ["command", "importable"]
