"""What tiers cost on this machine, beside what the machine itself can do.

`run_bench` does what a `Plan` says, and returns a `Report`; the command parses and prints.
"""

from kvoffload_async.bench.contender import PEERS
from kvoffload_async.bench.figures import Report
from kvoffload_async.bench.plan import Plan
from kvoffload_async.bench.run import run_bench

__all__ = ["PEERS", "Plan", "Report", "run_bench"]
