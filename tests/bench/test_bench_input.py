"""What a bench refuses: one clear line on standard error, status 2, and nothing was written."""

import pytest

from kvoffload_async.bench import contender, plan

UNPLAYABLE = """
from kvoffload_async.facade.secondary import ExampleSecondaryTierManager

class Unplayable(ExampleSecondaryTierManager):
    def __init__(self, *arguments, **options):
        raise OSError("no medium")
"""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--block-bytes", "64QiB"], "--block-bytes: '64QiB' is not valid"),
        (["--block-bytes", "0"], "--block-bytes: '0' is not valid"),
        (["--block-bytes", ""], "--block-bytes: '' is not valid"),
        (["--block-bytes", "5000"], "'5000' is not valid; it must be a multiple of 4096"),
        (["--block-bytes", "4KiB,8KiB,4096"], "--block-bytes: '4096' is given twice"),
        (["--total-bytes", "lots"], "--total-bytes: 'lots' is not valid"),
        (["--total-bytes", "1MiB"], "use at least 67108864, or smaller --block-bytes"),
        (["--total-bytes", "900TiB"], "more than half of what this machine has; use at most"),
        (["--keys-per-job", "0"], "Invalid value for '--keys-per-job'"),
        (["--one-job", "-1"], "Invalid value for '--one-job'"),
        (["--in-flight", "0"], "Invalid value for '--in-flight'"),
        (["--in-flight", "2000"], "Invalid value for '--in-flight'"),
        (["--rounds", "0"], "Invalid value for '--rounds'"),
        (["--threads", "0"], "Invalid value for '--threads'"),
        (["--tier", "fss"], "did you mean 'fs'?"),
        (["--tier", "fs:verfy=off"], "did you mean 'verify'?"),
        (["--tier", "fs:verify=maybe"], "verify: 'maybe' is unknown"),
        (["--tier", "fs:root_dir=3"], "root_dir: 3 is not valid; give a path"),
        (["--tier", "fs:root_dir"], "expected TYPE[:key=value,...]"),
        (["--tier", "fs:fsync=3"], "fsync: 3 is not valid; it must be true or false"),
        (["--tier", "fs:capacity_bytes=1MiB"], "capacity_bytes: '1MiB' is less than the"),
        (["--tier", "slab:capacity_bytes=1KiB"], "capacity_bytes: '1KiB' is less than the"),
        (["--tier", "slab:capacity_bytes=some"], "capacity_bytes: 'some' is not valid"),
        (["--tier", "Nothing:module_path=no_such_module"], "No module named"),
        (["--json", "/no/such/folder/bench.json"], "--json /no/such/folder/bench.json: cannot be"),
    ],
)
def test_nonsense_is_refused_with_the_key_and_the_remedy(command, monkeypatch, arguments, reason):
    monkeypatch.setattr("tempfile.tempdir", str(command.directory))
    assert reason in command.refusal("bench", *arguments)
    assert list(command.directory.iterdir()) == []


def test_a_root_dir_that_is_a_file(command):
    path = command.file("mine")
    message = command.refusal("bench", "--tier", f"fs:root_dir={path}")
    assert f"root_dir: cannot write to {str(path)!r}" in message
    assert path.read_text() == "mine"


def test_too_little_free_space_is_found_before_anything_is_written(command, monkeypatch):
    monkeypatch.setattr(contender, "_SPARE_BYTES", 2**60)
    folder = command.directory / "new"
    message = command.refusal("bench", "--tier", f"fs:root_dir={folder}")
    assert "bytes free and a round needs" in message
    assert "use fewer --total-bytes" in message
    assert list(command.directory.iterdir()) == []


def test_the_size_of_the_memory_decides_what_is_too_much(monkeypatch):
    monkeypatch.setattr(plan, "_MEMORY_SHARE", 1e-9)
    with pytest.raises(ValueError, match="for two buffers, more than half"):
        plan.Plan.parse(
            *("4KiB", "1MiB"),
            keys_per_job=1,
            one_job=0,
            in_flight=1,
            rounds=1,
            threads=1,
        )


@pytest.mark.parametrize(
    ("tier", "reason"),
    [
        ("Unplugged", "the first block has failed: pulled out"),
        ("Stale", "the first block was loaded with wrong bytes"),
        ("BitFlip", "the first block was loaded with wrong bytes"),
        ("Closed", "nobody there"),
        ("Unplayable", "Unplayable: cannot be opened: no medium"),
    ],
)
def test_a_tier_that_cannot_be_measured_says_so_before_the_measuring(
    command, faulty_tiers, tier, reason
):
    module = command.directory / f"{faulty_tiers}.py"
    module.write_text(module.read_text() + UNPLAYABLE)
    result = command.run("bench", "--tier", f"{tier}:module_path={faulty_tiers}")
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("kvoffload: error:"))
    assert reason in line


def test_a_tier_that_cannot_be_closed_is_no_success(command, faulty_tiers):
    result = command.run("bench", "--tier", f"Jammed:module_path={faulty_tiers}")
    assert result.exit_code == 1
    assert "Jammed: did not close" in result.stderr
