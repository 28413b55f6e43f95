"""The command is what these tests run."""

from command_line import command, faulty_tiers, importable, interrupted_workload
from fs.maintenance.conftest import store

__all__ = ["command", "faulty_tiers", "importable", "interrupted_workload", "store"]
