"""The measurements for hardware run, on the simulated device; their figures mean nothing there."""

from gpu.measurements import Load, report

from kvoffload_async.testing.cuda import SimulatedCuda


def test_all_measurements_run():
    lines = []
    load = Load(4096, blocks=2, transfers=2, layers=2, repeats=1, staging_bytes=1)
    report(SimulatedCuda(), [load], lines.append, size=8, at_most=4)
    assert [line.split(":")[0] for line in lines] == [
        "store     4 KiB blocks",
        "load      4 KiB blocks",
    ]
