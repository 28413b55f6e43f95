"""vLLM's own fs tier as a peer in a benchmark: driven as it is, on the same blocks."""

import json

import pytest
from laboratory.app import app
from laboratory.peers import load_peer
from typer.testing import CliRunner

from kvoffload_async.cli.inputs import parse_tier
from kvoffload_async.errors import InputError

SMALL = (
    *("--block-bytes", "4KiB", "--total-bytes", "128KiB", "--keys-per-job", "4"),
    *("--one-job", "8", "--rounds", "2"),
)


def test_it_is_measured_with_its_c_helper_and_through_the_page_cache(tmp_path):
    result = CliRunner().invoke(
        app,
        [
            *("bench", *SMALL, "--json", "-", "--tier", f"fs:root_dir={tmp_path}"),
            *("--peer", f"vllm-fs:root_dir={tmp_path},n_read_threads=2"),
        ],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout[result.stdout.index("{") :])
    facts = report["contenders"]["vllm-fs"]
    assert facts["options"].pop("vllm").startswith("0.3")
    assert facts["options"] == {
        "n_read_threads": 2,
        "n_write_threads": 16,
        "direct_io": False,
        "c_helper": True,
    }
    standings = report["sizes"][0]["contenders"]
    assert standings["vllm-fs"]["verified_blocks"] == standings["fs"]["verified_blocks"] == 80
    assert standings["vllm-fs"]["wrong_blocks"] == standings["vllm-fs"]["failed_jobs"] == 0
    assert standings["vllm-fs"]["passes"]["at_rest"]["lookup_us"]["median"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [("n_read_threads=0", "n_read_threads: 0"), ("direct_io=2", "direct_io: 2")],
)
def test_its_options_are_checked(options, reason):
    with pytest.raises((InputError, ValueError), match=reason):
        load_peer(parse_tier(f"vllm-fs:{options}"))
