"""The command is what some of these tests run."""

from command_line import command

__all__ = ["command"]
