"""Bad input: one clear line on standard error, status 2, and nothing has been started."""

import json
import os
import tempfile

import pytest

from kvoffload_async.replay import source as trace_module


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"hash_ids": [1, 2', "not JSON: Expecting ',' delimiter at column 19"),
        (b"[1, 2]", 'it must be an object with a list "hash_ids"'),
        (b'{"input_length": 3}', 'it must be an object with a list "hash_ids"'),
        (b'{"hash_ids": 3}', 'it must be an object with a list "hash_ids"'),
        (b'{"hash_ids": [1, "x"]}', 'hash_ids[1] is "x"'),
        (b'{"hash_ids": [true]}', "hash_ids[0] is true"),
        (b'{"hash_ids": [1.5]}', "hash_ids[0] is 1.5"),
        (b'{"hash_ids": [-1]}', "hash_ids[0] is -1"),
        (b'{"hash_ids": [18446744073709551616]}', "hash_ids[0] is 18446744073709551616"),
        (b'{"hash_ids": ["\xff"]}', "not UTF-8 at byte 15"),
        (b"[" * 200_000, "not usable JSON"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(command, line, reason):
    path = command.directory / "trace.jsonl"
    path.write_bytes(b'{"hash_ids": [1]}\n\n' + line + b"\n")
    message = command.refusal("replay", path, "--json", "-")
    assert "Malformed line 3: " in message
    assert reason in message


def test_a_file_that_is_no_trace_is_not_read_as_one_line(command, monkeypatch):
    monkeypatch.setattr(trace_module, "MAX_LINE_BYTES", 100)
    path = command.file("x" * 1000, "trace.jsonl")
    assert "Malformed line 1: longer than 100 bytes" in command.refusal("replay", path)


def test_the_largest_block_id_is_replayed(command):
    assert command.figures(command.trace([[0, 2**64 - 1]] * 2))["hits"] == {"primary": 2}


def test_a_trace_that_is_not_there(command):
    message = command.refusal("replay", command.directory / "nope.jsonl")
    assert "nope.jsonl: cannot be read: No such file or directory" in message


def test_a_trace_that_is_a_directory(command):
    assert "Is a directory" in command.refusal("replay", command.directory)


def test_an_unknown_tier_is_answered_with_the_nearest_name(command):
    message = command.refusal("replay", "--tier", "exampel")
    assert "'exampel'" in message
    assert "did you mean 'example'?" in message


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tier", "example:custom_parm=1"], "did you mean 'custom_param'?"),
        (["--tier", "example:custom_param=x"], "custom_param: 'x' is not valid"),
        (["--tier", "example:io_timeout_s=soon"], "io_timeout_s: 'soon' is not valid"),
        (["--tier", "example:enable_kv_events=3"], "enable_kv_events: 3 is not valid"),
        (["--tier", "example:a=1,custom_param"], "'example': option 2 is not key=value; expected"),
        (["--tier", "example:a=1,a=2"], "'a' is given twice"),
        (["--tier", ":a=1"], "no type"),
        (["--tier", "Nothing:module_path=json"], "no attribute 'Nothing'"),
        (["--tier", "Nothing:module_path=no_such_module"], "No module named"),
        (["--tier", "Nothing:module_path=no_such_module"], "module_path: 'no_such_module'"),
        (["--tier", "Tier:module_path="], "module_path: '' is not valid"),
        (["--tier", "Tier:module_path=.x"], "module_path: '.x' is not valid"),
        (["--tier", "Tier:module_path=0"], "module_path: 0 is not valid; it must be a name"),
        (["--tier", "fs"], "root_dir: missing"),
        (["--tier", "fs:root_dir=relative"], "root_dir: 'relative' is not an absolute path"),
        (["--block-bytes", "4Q"], "--block-bytes: '4Q' is not valid"),
        (["--policy", "lur"], "did you mean 'lru'?"),
        (["--json", "no/such/place"], "--json no/such/place: cannot be written"),
        (["--config", "no-such-file"], "no-such-file: cannot be read"),
    ],
)
def test_bad_flags(command, arguments, reason):
    assert reason in command.refusal("replay", *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["replay", "--primary-blocks", "0"], "--primary-blocks"),
        (["replay", "--limit", "x"], "--limit"),
        (["replay", "--passes", "0"], "--passes"),
        (["replay", "--nope"], "--nope"),
        (["replay", "--limit"], "--limit"),
        (["replay", "a", "b"], "b"),
        (["store", "gc", "/", "--older-than", "-1"], "--older-than"),
        (["store", "inspect"], "DIR"),
        (["store", "nope"], "nope"),
        (["nope"], "nope"),
    ],
)
def test_wrong_usage_is_one_line_too(command, arguments, named):
    assert named in command.refusal(*arguments)


@pytest.mark.parametrize("arguments", [[], ["store"]])
def test_without_a_command_the_help_is_shown(command, arguments):
    result = command.run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")


def test_a_defect_is_no_usage_error(command, monkeypatch):
    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr("kvoffload_async.cli.app.tier_entries", fail)
    assert isinstance(command.run("tiers").exception, ZeroDivisionError)


def test_a_pipe_cannot_be_replayed_twice(command):
    path = command.directory / "pipe"
    os.mkfifo(path)
    message = command.refusal("replay", path, "--passes", 2)
    assert "--passes 2" in message
    assert "cannot be read more than once" in message


@pytest.mark.parametrize("failure", ["raise ValueError('broken')", "raise SystemExit(3)", "1 / 0"])
def test_a_module_that_fails_when_it_is_imported_is_named(command, monkeypatch, failure):
    name = f"broken_{abs(hash((str(command.directory), failure)))}"
    command.file(failure, f"{name}.py")
    monkeypatch.syspath_prepend(command.directory)
    message = command.refusal("replay", "--tier", f"Tier:module_path={name}")
    assert f"secondary_tiers[0]: module_path: '{name}' cannot be imported, as it raises" in message
    assert "correct that module, or name another" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "expected a JSON object"),
        ('{"a": ', "not JSON"),
        ('{"blok_bytes": 1}', "did you mean 'block_bytes'?"),
        ('{"cpu_bytes_to_use": "4 elephants"}', "cpu_bytes_to_use: '4 elephants'"),
    ],
)
def test_bad_configuration_files(command, text, reason):
    assert reason in command.refusal("replay", "--config", command.file(text))


def test_a_report_that_cannot_be_written_is_known_before_the_replay(command, tmp_path):
    message = command.refusal("replay", "--json", tmp_path / ("x" * 300))
    assert "cannot be written: File name too long" in message


def test_a_report_that_cannot_be_written_in_the_end(command):
    result = command.run("replay", "--limit", 1, "--json", "/dev/full")
    assert result.exit_code == 2
    assert "--json /dev/full: cannot be written: No space left on device" in result.stderr
    assert "hit ratio" in result.stdout


def test_flags_override_the_file_and_the_file_the_defaults(command):
    config = command.config(
        cpu_bytes_to_use="1MiB", block_bytes=8192, eviction_policy="arc", secondary_tiers=[]
    )
    report = command.figures("--config", config, "--limit", 3)
    assert (report["primary_blocks"], report["block_bytes"]) == (128, 8192)
    assert report["policy"] == "arc"
    assert list(report["hits"]) == ["primary"]
    report = command.figures(
        *("--config", config, "--primary-blocks", 77, "--block-bytes", "16KiB"),
        *("--policy", "lru", "--tier", "example", "--limit", 3),
    )
    assert (report["primary_blocks"], report["block_bytes"]) == (77, 16384)
    assert report["policy"] == "lru"
    assert list(report["hits"]) == ["primary", "example"]


def test_primary_bytes_are_cut_to_whole_rows(command):
    config = command.config(cpu_bytes_to_use="1MiB")
    report = command.figures("--config", config, "--block-bytes", "5000", "--limit", 3)
    assert (report["primary_blocks"], report["row_bytes"]) == (128, 8192)


def test_primary_blocks_are_exact_with_several_workers_too(command):
    config = command.config(num_workers=3)
    sizes = ("--primary-blocks", 99, "--block-bytes", 1000)
    report = command.figures("--config", config, *sizes, "--limit", 3)
    assert (report["primary_blocks"], report["row_bytes"]) == (99, 4096)


def test_a_trace_has_no_tier_unless_one_is_given(command):
    report = command.figures(command.trace([[1]]))
    assert list(report["hits"]) == ["primary"]
    assert report["primary_blocks"] == 10_000


class TestCheckConfig:
    def test_shows_what_follows_from_a_configuration(self, command):
        config = command.config(
            cpu_bytes_to_use="1MiB",
            block_bytes=5000,
            status_socket="/run/[kv].sock",
            secondary_tiers=[{"type": "example", "custom_param": 3}, {"type": "example"}],
        )
        result = command.run("check-config", config)
        assert result.exit_code == 0
        for text in ("128", "8,192 bytes", "example: custom_param=3", "lru", "/run/[kv].sock"):
            assert text in result.stdout

    def test_shows_that_there_is_no_tier(self, command):
        result = command.run("check-config", command.config(cpu_bytes_to_use=4096, block_bytes=1))
        assert "none" in result.stdout

    def test_starts_nothing(self, command, faulty_tiers):
        tier = {"type": "Closed", "module_path": faulty_tiers}
        config = command.config(cpu_bytes_to_use=4096, block_bytes=1, secondary_tiers=[tier])
        assert command.run("check-config", config).exit_code == 0

    @pytest.mark.parametrize(
        ("keys", "reason"),
        [
            ({"cpu_bytes_to_use": 1}, "TieringOffloadingSpec needs block_bytes"),
            ({"cpu_bytes_to_use": 1, "block_bytes": 1}, "hold no block"),
            ({"secondary_tiers": [{"type": "fsx"}]}, "missing"),
        ],
    )
    def test_refuses(self, command, keys, reason):
        assert reason in command.refusal("check-config", command.config(**keys))

    @pytest.mark.parametrize("tier", [{"type": "fs"}, {"type": "slab", "capacity_bytes": "1MiB"}])
    def test_refuses_a_tier_on_disk_whose_model_nobody_names(self, command, tier):
        tiers = [{"type": "example"}, tier | {"root_dir": str(command.directory / "new")}]
        keys = {"cpu_bytes_to_use": 4096, "block_bytes": 1, "secondary_tiers": tiers}
        message = command.refusal("check-config", command.config(**keys))
        assert "secondary_tiers[1]: model: missing; " in message
        assert '"run_config": {"model_name"' in message
        assert 'add "model"' in message
        assert not (command.directory / "new").exists()
        named = command.config(**keys, model="m")
        assert command.run("check-config", named).exit_code == 0

    def test_refuses_a_tier_option_of_another_type(self, command):
        tier = {"type": "example", "custom_param": "3"}
        config = command.config(cpu_bytes_to_use=4096, block_bytes=1, secondary_tiers=[tier])
        message = command.refusal("check-config", config)
        assert (
            "secondary_tiers[0]: custom_param: '3' is not valid; it must be an integer" in message
        )


def test_json_on_standard_output_stands_alone(command):
    result = command.run("replay", "--json", "-", "--limit", 3)
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert {
        "requests", "block_refs", "hits", "hit_ratio", "jobs_submitted", "job_results",
        "job_failures", "verified_blocks", "corrupt_blocks", "bytes_stored", "bytes_loaded",
        "wall_s", "block_refs_per_s", "owner_us_per_step", "leaked_pins",
    } <= report.keys()  # fmt: skip
    assert report["owner_us_per_step"].keys() == {"p50", "p99", "max"}


@pytest.mark.parametrize("words", [("replay", "--limit", "1"), ("bench",)])
def test_without_a_directory_for_temporary_files_the_remedy_is_one_line(
    command, monkeypatch, words
):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    message = command.refusal(*words)
    assert "No usable temporary directory" in message
    assert "set TMPDIR" in message


def test_a_directory_for_temporary_files_that_is_full_is_named(command, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert "cannot write to '/nonexistent'" in command.refusal("replay", "--limit", "1")
