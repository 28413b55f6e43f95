"""`check-config` against mutated configurations: fine or one line, and what is fine opens."""

import copy
import json
import math
import tempfile
from pathlib import Path

import own_threads
import pytest
from command_line import Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.cli.settings import read_config

VALID = {
    "cpu_bytes_to_use": "64KiB",
    "block_bytes": 4096,
    "block_size": 16,
    "model": "org/model",
    "deferral_timeout_s": 3.0,
    "eviction_policy": "arc",
    "secondary_tiers": [
        {"type": "example", "custom_param": 1, "n_read_threads": 1},
        {
            "type": "fs",
            "root_dir": "FOLDER/a",
            "capacity_bytes": "1MiB",
            "run_config": {"x": [1, {"y": 2}]},
            "high_watermark": 0.9,
            "low_watermark": 0.5,
        },
        {
            "type": "slab",
            "root_dir": "FOLDER/b",
            "capacity_bytes": "1MiB",
            "io_threads": 2,
            "backpressure_cls": "ema",
            "backpressure": {"high_water_s_per_mib": 0.5},
        },
    ],
}
KEYS = sorted(
    {"namespace", "rank", "verify", "on_mismatch", "segment_bytes", "module_path", "fsync", "zzz"}
    | VALID.keys()
    | {key for tier in VALID["secondary_tiers"] for key in tier}
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([1 << 40, 1 << 62, 1 << 63, 10**60, -(10**60)]),
    st.sampled_from([0.0, -1.0, 0.25, 1.0, 1.5, 1e300, math.nan, math.inf]),
    st.sampled_from(["", "lru", "fs", "slab", "example", "off", "4KiB", "1 MiB", "9" * 300 + "B"]),
    st.sampled_from(["FOLDER/a", "FOLDER/a/below", "FOLDER/c", "relative", "/proc/x", "\ud800"]),
    st.sampled_from(["x" * 300, "a\nb", "\0", "../..", "json", "\N{SNOWMAN}"]),
    st.recursive(
        st.integers(0, 3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ),
)


def places(value, at=()):
    """Yield the path of everything in a value that can be replaced."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield (*at, key)
        if isinstance(one, dict | list):
            yield from places(one, (*at, key))


@st.composite
def mutated(draw):
    """A valid configuration with up to four changes: values, keys and whole parts."""
    config = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(0, 4))):
        *path, last = draw(st.sampled_from(sorted(places(config), key=repr)))
        parent = config
        for key in path:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                parent[last] = draw(ODD)
            case "remove":
                del parent[last]
            case "add" if isinstance(parent, dict):
                parent[draw(st.sampled_from(KEYS))] = draw(ODD)
            case "add":
                parent.append(copy.deepcopy(parent[last]))
        if not config:
            break
    return config


@pytest.mark.no_cover
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(mutated())
def test_a_configuration_is_fine_or_one_line_and_what_is_fine_opens(config):
    before = own_threads.running()
    with tempfile.TemporaryDirectory(prefix="kvoffload-fuzz-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config).replace("FOLDER", folder))
        result = Command(Path(folder)).run("check-config", file)
        assert [path.name for path in Path(folder).iterdir()] == ["config.json"]
        if result.exit_code:
            assert result.exit_code == 2, result.output
            assert result.stdout == ""
            assert result.stderr.startswith("kvoffload: error: ")
            assert result.stderr.count("\n") == 1
            assert len(result.stderr) < 4000
            return
        assert result.stderr == ""
        # Without block_bytes it is a configuration of OffloadEngine, whose caches give them.
        with TieringOffloadingSpec({"block_bytes": 4096, **read_config(file)}) as spec:
            spec.get_manager()
    assert not own_threads.left(before)
