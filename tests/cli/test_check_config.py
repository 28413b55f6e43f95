"""What `check-config` refuses: whatever opening would, and what would misbehave afterwards."""

import json
import os

import host_configs
import pytest

MODEL = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "m"}


def slab(directory, **options):
    return {"type": "slab", "root_dir": str(directory), "capacity_bytes": "1MiB", **options}


def fs(directory, **options):
    return {"type": "fs", "root_dir": str(directory), **options}


@pytest.fixture
def refusal(command):
    """Return what the command says of a configuration; nothing appears on disk meanwhile."""

    def check(*tiers, **keys):
        config = command.config(**(MODEL | keys), secondary_tiers=list(tiers))
        before = sorted(command.directory.rglob("*"))
        message = command.refusal("check-config", config)
        assert sorted(command.directory.rglob("*")) == before
        return message

    return check


# -- what opening refuses -----------------------------------------------------------------------


@pytest.mark.parametrize("tier", [slab, fs])
def test_a_capacity_below_one_block_is_refused(refusal, tmp_path, tier):
    message = refusal({"type": "example"}, tier(tmp_path / "d", capacity_bytes=5000))
    assert "secondary_tiers[1]: capacity_bytes: 5000 " in message
    assert "give at least " in message


@pytest.mark.parametrize("tier", [slab, fs])
def test_a_relative_directory_is_refused(refusal, tier):
    message = refusal(tier("some/where"))
    assert "secondary_tiers[0]: root_dir: 'some/where' is not an absolute path; write '/" in message


def test_two_slabs_in_one_directory_are_refused(refusal, tmp_path):
    message = refusal(slab(tmp_path / "d"), slab(tmp_path / "d"))
    assert f"secondary_tiers[1]: root_dir: '{tmp_path}/d'" in message
    assert "where secondary_tiers[0] keeps its blocks" in message
    assert "give each tier a directory of its own" in message


def test_watermarks_the_wrong_way_round_are_refused(refusal, tmp_path):
    message = refusal(fs(tmp_path, capacity_bytes="1MiB", low_watermark=0.9, high_watermark=0.8))
    assert "secondary_tiers[0]: low_watermark: 0.9 is above high_watermark=0.8" in message


def test_options_of_another_tier_are_refused(refusal, tmp_path):
    message = refusal(slab(tmp_path, n_read_threads=4))
    assert "secondary_tiers[0]: n_read_threads: 4 is not an option of this tier" in message
    assert "use io_threads" in message


def test_a_primary_larger_than_the_machines_memory_is_refused(refusal):
    message = refusal(cpu_bytes_to_use="100TiB")
    assert f"cpu_bytes_to_use: {100 << 40} bytes are more than " in message
    assert " memory" in message
    assert "use less" in message


@pytest.mark.parametrize("tier", [slab, fs])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/dev/null/below", "'/dev/null' is no directory"),
        ("/proc/kv", "keeps no files (proc)"),
        ("/" + "x" * 300, "File name too long"),
        ("/nowhere/" + "x" * 300, "at most 255 bytes"),
        ("/tmp" + "/x" * 2000, "too long"),
        ("/nul\0l", "absolute path"),
        ("/half\ud800", "absolute path"),
    ],
)
def test_an_impossible_path_is_refused(refusal, tier, path, reason):
    message = refusal(tier(path))
    assert "secondary_tiers[0]: root_dir: " in message
    assert reason in message


# -- what would misbehave -----------------------------------------------------------------------


def test_fs_twice_on_one_directory_is_refused(refusal, tmp_path):
    assert "secondary_tiers[1]: root_dir: " in refusal(fs(tmp_path), fs(tmp_path))


@pytest.mark.parametrize("tiers", [(fs, slab), (slab, fs)])
def test_fs_and_slab_in_one_directory_are_refused(refusal, tmp_path, tiers):
    message = refusal(*(tier(tmp_path) for tier in tiers))
    assert "where secondary_tiers[0] keeps its blocks" in message


def test_a_capacity_larger_than_the_disk_is_refused(refusal, tmp_path):
    message = refusal(slab(tmp_path / "new", capacity_bytes=(1 << 40) * 4))
    if "reduce it to" not in message:
        assert f"secondary_tiers[0]: capacity_bytes: {4 << 40} do not fit on the " in message
    message = refusal(fs(tmp_path / "new" / "er", capacity_bytes="4000000TiB"))
    assert "secondary_tiers[0]: capacity_bytes: " in message
    assert "do not fit on the filesystem of " in message
    assert "give less" in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"block_bytes": 1, "block_bytes": 2}', "block_bytes"),
        ('{"secondary_tiers": [{"type": "fs", "root_dir": "/a", "root_dir": "/b"}]}', "root_dir"),
    ],
)
def test_a_key_that_is_given_twice_is_named(command, text, key):
    for arguments in (["check-config"], ["replay", "--config"]):
        message = command.refusal(*arguments, command.file(text))
        assert f"config.json: the key '{key}' is given twice in one object; keep one" in message


# -- the same, less plainly ---------------------------------------------------------------------


def test_one_directory_under_two_names_is_one_directory(refusal, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "b")
    assert "[1]: root_dir" in refusal(fs(tmp_path / "a"), fs(tmp_path / "link"))
    assert "[1]: root_dir" in refusal(fs(tmp_path / "b"), fs(tmp_path / "dangling"))
    assert "[1]: root_dir" in refusal(fs(tmp_path / "x" / ".." / "a" / "."), fs(tmp_path / "a"))


@pytest.mark.parametrize("first", ["", "deep", "deep/new"])
def test_a_directory_within_another_tiers_is_refused(refusal, tmp_path, first):
    (tmp_path / "deep").mkdir()
    below = tmp_path / "deep" / "new" / "er"
    assert "lies above or below" in refusal(fs(tmp_path / first), slab(below))
    assert "lies above or below" in refusal(slab(below), fs(tmp_path / first))


def test_directories_side_by_side_are_fine(command, tmp_path):
    tiers = [fs(tmp_path / "a"), slab(tmp_path / "ab"), fs(tmp_path / "b" / "a")]
    config = command.config(**MODEL, secondary_tiers=tiers)
    assert command.run("check-config", config).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_capacities_that_fit_one_by_one_and_not_together_are_refused(refusal, tmp_path):
    found = os.statvfs(tmp_path)
    most = found.f_blocks * found.f_frsize * 2 // 3
    message = refusal(
        fs(tmp_path / "a", capacity_bytes=most), fs(tmp_path / "b", capacity_bytes=most)
    )
    assert "secondary_tiers[1]: capacity_bytes: " in message
    assert "of the tiers before it" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"io": NaN}', "NaN is not a JSON number"),
        ('{"io": [-Infinity]}', "-Infinity is not a JSON number"),
        ('{"io": 1e999}', "1e999 is not a JSON number"),
        ('{"block_bytes": ' + "9" * 5000 + "}", "a number of 5000 digits is too large"),
        ('{"block_bytes": 18446744073709551616}', "block_bytes: 18446744073709551616"),
        ('{"num_workers": 18446744073709551616}', "num_workers: 18446744073709551616"),
        ('{"cpu_bytes_to_use": "' + "9" * 4290 + 'TiB"}', "cpu_bytes_to_use: '99"),
        ("[" * 50 + "]" * 50, "nested more than 32 deep"),
        ("[" * 100_000, "nested more than 32 deep"),
        ('{"secondary_tiers": [{"type": {"type": "fs"}}]}', "type: {'type': 'fs'} is not valid"),
        ('{"secondary_tiers": {"type": "fs"}}', "secondary_tiers: {'type': 'fs'} is not valid"),
        ('{"secondary_tiers": [[{"type": "fs"}]]}', "secondary_tiers[0]: [{'type': 'fs'}]"),
        ('{"model": "\\ud800"}', "model: '\\ud800' is not valid"),
        ('{"\\ud800": 1}', "unknown key '\\ud800'"),
        ("\ufeff{}", "not JSON"),
        ("", "not JSON"),
        ("\x00", "not JSON"),
    ],
)
def test_what_is_no_configuration_is_one_short_line(command, text, reason):
    text = text.replace('{"secondary', json.dumps(MODEL)[:-1] + ', "secondary')
    message = command.refusal("check-config", command.file(text))
    assert reason in message
    assert len(message) < 1500


def test_a_file_of_bytes_is_one_line_too(command):
    path = command.directory / "bytes"
    path.write_bytes(b"\xff\xfe")
    assert "not JSON" in command.refusal("check-config", path)


def test_the_replay_checks_the_same(command, tmp_path):
    tier = f"slab:root_dir={tmp_path / 'd'},capacity_bytes=1MiB"
    message = command.refusal("replay", "--tier", tier, "--tier", tier)
    assert "secondary_tiers[1]: root_dir: " in message
    message = command.refusal("replay", "--tier", "fs:root_dir=/dev/null/x")
    assert "secondary_tiers[0]: root_dir: '/dev/null/x' cannot be made" in message


def test_the_bench_checks_the_same(command):
    message = command.refusal("bench", "--tier", "slab:n_read_threads=3")
    assert "n_read_threads: 3 is not an option of this tier" in message
    message = command.refusal(
        "bench", "--block-bytes", "1MiB", "--tier", "slab:segment_bytes=64KiB"
    )
    assert "segment_bytes: 65536 is less than a slot of 1048576" in message


# -- JSON, and vLLM's -----------------------------------------------------------------------------


def test_the_derived_settings_are_printed_as_json_without_secrets(command, tmp_path):
    config = command.config(
        cpu_bytes_to_use="64KiB",
        block_bytes=4096,
        model="org/model",
        secondary_tiers=[
            {"type": "fs", "root_dir": str(tmp_path / "fs")},
            {"type": "valkey", "url": "valkey://user:s3cret@host:1/0"},
        ],
    )
    result = command.run("check-config", config, "--json")
    assert result.exit_code == 0, result.output
    settings = json.loads(result.stdout)
    assert (settings["primary_blocks"], settings["block_bytes"]) == (16, 4096)
    assert [tier["type"] for tier in settings["secondary_tiers"]] == ["fs", "valkey"]
    assert "s3cret" not in result.stdout


@pytest.mark.parametrize(
    ("host", "case"),
    [
        pytest.param(host, case, id=f"{host}-{case.name}")
        for host, cases in host_configs.CASES.items()
        for case in cases
    ],
)
def test_a_hosts_configuration_is_checked_without_the_host(command, tmp_path, host, case):
    config = command.config(**host_configs.placed(case.config, tmp_path))
    if case.why is not None:
        assert case.why in command.refusal("check-config", config)
        return
    result = command.run("check-config", config)
    assert result.exit_code == 0, result.output
    assert f"what only {host} knows" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_what_the_host_decides_is_null_and_tiers_are_shown_under_their_own_names(command, tmp_path):
    relative = host_configs.FS_TIER | {"root_dir": "relative"}
    config = host_configs.tiering({"type": "fs", "root_dir": "/of/vllms/own"}, relative)
    result = command.run("check-config", command.config(**config), "--json")
    settings = json.loads(result.stdout)
    (tier,) = settings["secondary_tiers"]
    assert tier["type"] == "fs"
    assert tier["root_dir"].endswith("/relative")
    assert settings["primary_blocks"] is None
    assert settings["cpu_bytes_to_use"] == 1 << 20
    config = host_configs.placed(host_configs.ADAPTER, tmp_path)
    result = command.run("check-config", command.config(**config), "--json")
    assert json.loads(result.stdout)["cpu_bytes_to_use"] is None


def test_an_offload_engine_may_leave_the_size_of_a_block_to_its_tensors(command, tmp_path):
    config = {"cpu_bytes_to_use": "1MiB", "model": "org/model", "secondary_tiers": [fs(tmp_path)]}
    result = command.run("check-config", command.config(**config))
    assert result.exit_code == 0, result.output
    assert "what only OffloadEngine knows" in result.stdout
    del config["model"]
    message = command.refusal("check-config", command.config(**config))
    assert "model: missing; OffloadEngine needs it" in message
