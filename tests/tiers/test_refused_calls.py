"""Where the system refuses a call, a tier does without it, or says at the start that it cannot."""

import json
import platform
import subprocess
from pathlib import Path

import pytest
import seccomp
from preloaded import python

from kvoffload_async.system_calls import CALLS

SCRIPT = Path(__file__).with_name("without_a_call.py")
DEADLINE_S = 100
STORED = {"found": 8, "wrong": 0, "failed": {}}
TIERS = {
    "fs": {"type": "fs"},
    "fs, strict": {"type": "fs", "capacity_bytes": "8MiB", "fsync": True, "verify": "required"},
    "slab": {"type": "slab", "capacity_bytes": "8MiB"},
}
TIERS["slab, strict"] = TIERS["slab"] | {"direct_io": True, "fsync": True}
NEEDING = {
    "fsetxattr": {"fs, strict": "verify: 'required' needs extended attributes"},
    "fgetxattr": {"fs, strict": "verify: 'required' needs extended attributes"},
    "flock": dict.fromkeys(("fs, strict", "slab", "slab, strict"), "flock: "),
    "fsync": {"fs, strict": "fsync: ", "slab": "fsync: ", "slab, strict": "fsync: "},
    "fdatasync": {"slab": "fdatasync: ", "slab, strict": "fdatasync: "},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls differ"),
]


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
@pytest.mark.parametrize("call", CALLS)
def test_without_a_system_call_every_tier_works_or_refuses_to_start(call, error, tmp_path):
    tiers = {
        name: {**tier, "root_dir": str(tmp_path / str(number))}
        for number, (name, tier) in enumerate(TIERS.items())
    }
    done = subprocess.run(
        [python(), SCRIPT, call, error, json.dumps(tiers)],
        env={"PYTHONPATH": str(SCRIPT.parents[1])},
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    outcomes = json.loads(done.stdout)
    for name, outcome in outcomes.items():
        refusal = NEEDING.get(call, {}).get(name)
        if refusal is None:
            assert outcome == STORED, name
        else:
            assert refusal in outcome.get("refused", outcome), name


def test_the_filter_knows_every_call_of_the_table():
    assert seccomp.NUMBERS.keys() == CALLS.keys()
    assert all(call in CALLS and not CALLS[call].instead for call in ("flock", "fsync"))
