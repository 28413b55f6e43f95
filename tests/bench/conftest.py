"""The command is what these tests run."""

from command_line import command, faulty_tiers, importable

__all__ = ["command", "faulty_tiers", "importable"]
