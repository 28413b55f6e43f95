"""A fleet whose server is killed on the way, and comes back empty, beside a process that is."""

import pytest
from laboratory.fleet.run import FleetOptions, run_fleet
from servers.process import at_length

from kvoffload_async import OffloadConfig

REQUESTS = [[1, 2, 3], [1, 2, 4], [7, 8], [1, 2, 3, 5], [7, 8, 9], [1, 2, 4, 6], [7, 8, 9, 3]]


@at_length
@pytest.mark.timeout(300)
def test_nothing_wrong_is_served_and_every_job_ends(own_server, tmp_path):
    config = OffloadConfig.parse(
        {
            "cpu_bytes_to_use": "64KiB",
            "block_bytes": 4096,
            "model": "replay",
            "breaker_retry_s": 0.2,
            "secondary_tiers": [
                {"type": "example"},
                {
                    "type": "valkey",
                    "url": own_server.url(),
                    "call_timeout_s": 0.5,
                    "required": False,
                },
            ],
        }
    )

    def disturb(name, number):
        if name == "lockstep":
            {3: own_server.kill, 5: own_server.start}.get(number, lambda: None)()

    options = FleetOptions(size=2, kill_at=4, before_request=disturb)
    report = run_fleet(config, REQUESTS, options, tmp_path)
    assert report.complaints == []
    assert not report.interrupted
    for one in report.passes:
        assert one.total.requests == len(REQUESTS)
        assert one.total.jobs_submitted == one.total.job_results
        assert one.total.corrupt_blocks == 0
        assert one.total.hit_ratio <= report.unbounded
