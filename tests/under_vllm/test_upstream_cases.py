"""On the sources of another vLLM: its own tests of its `fs` tier run with ours, and so do ours.

Set KVOFFLOAD_VLLM_SDIST to an unpacked source distribution of vLLM 0.33.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from upstream_plugin import INSTALLED, REPLACES, SDIST

pytestmark = pytest.mark.skipif(
    SDIST not in os.environ or INSTALLED in os.environ,
    reason=f"{SDIST} is not set, or these are the tests that run on it",
)

HERE = Path(__file__).parent
CASES = "tests/v1/kv_offload/tiering/test_fs_tier.py"
DIFFERS = {
    # Every block is checked on its own: one bad block costs no other.
    "test_batched_load_first_block_fails_marks_whole_batch[True]",
    "test_batched_load_first_block_fails_marks_whole_batch[False]",
    # A block that was stored is announced, whatever became of the others of its job.
    "test_partially_failed_store_emits_no_event",
}


@pytest.fixture
def outcomes_of(tmp_path):
    """Return what runs tests on the sources and returns case -> "passed" or what else."""
    import vllm

    report = tmp_path / "report.xml"
    sources = str(Path(os.environ[SDIST]).resolve())
    path = [sources, str(HERE), str(HERE.parent.parent), *filter(None, sys.path)]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        INSTALLED: str(Path(vllm.__file__).parent),
    }

    def run(*arguments, **variables):
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "upstream_plugin"),
                *("-p", "no:cacheprovider", f"--junit-xml={report}", *arguments),
            ],
            cwd=tmp_path,
            env=environ | variables,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert report.exists(), ended.stdout[-4000:] + ended.stderr[-4000:]
        found = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314 - our own
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            found[case.attrib["name"]] = kinds.pop() if kinds else "passed"
        return found

    return run


def test_every_case_of_vllms_tier_passes_but_those_that_differ_on_purpose(outcomes_of):
    root = Path(os.environ[SDIST]).resolve() / "tests"
    outcomes = outcomes_of(
        *("--noconftest", "--import-mode=importlib", "-c", os.devnull, "-W", "ignore"),
        *("--rootdir", str(root), str(root.parent / CASES)),
        **{REPLACES: "1"},
    )
    others = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert others.keys() == DIFFERS, others
    assert set(others.values()) == {"failure"}
    assert len(outcomes) > len(DIFFERS) + 40


def test_our_own_cases_pass_on_those_sources_too(outcomes_of):
    own = [*sorted(HERE.glob("test_tier_*.py"))]
    own += [HERE / f"test_{name}.py" for name in ("environment", "interface")]
    outcomes = outcomes_of(*map(str, own), str(HERE / "test_convert.py"))
    others = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert not others
    assert len(outcomes) > 80
