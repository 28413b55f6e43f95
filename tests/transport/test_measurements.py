"""What a transport measures, on the simulated device; throughput means nothing there."""

from gpu.measurements import Load, report
from simulated_cuda.device import SimulatedCuda
from transport.launches import check_durations, check_staging_bytes


def test_all_measurements_run():
    lines = []
    load = Load(4096, blocks=2, transfers=2, layers=2, repeats=1, staging_bytes=1)
    report(SimulatedCuda(), [load], lines.append, size=8, at_most=4)
    assert [line.split(":")[0] for line in lines] == [
        "store     4 KiB blocks",
        "load      4 KiB blocks",
    ]


def test_an_outcome_has_the_seconds_of_the_copies_without_the_wait_for_the_compute():
    check_durations()


def test_staging_takes_no_more_memory_than_its_bytes_on_each_stream():
    check_staging_bytes()
