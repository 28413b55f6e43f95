"""Benchmarks of tiers against the raw speed of the machine.

`run_bench` executes a `Plan` and returns a `Report`; the command line parses and prints.
"""

from kvoffload_async.bench.figures import Report
from kvoffload_async.bench.plan import Plan
from kvoffload_async.bench.run import run_bench

__all__ = ["Plan", "Report", "run_bench"]
