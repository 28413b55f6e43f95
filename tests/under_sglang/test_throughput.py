"""Throughput beside SGLang's own file backend: alternating runs, medians of five."""

import random
import shutil
import statistics
import time

import pytest
import torch
from sglang_world import PAGE_SIZE

PAGES, RUNS = 1000, 5


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_slab_and_sglangs_file_backend_in_turn(  # noqa: PLR0917 - fixtures
    rank, tmp_path, monkeypatch, capsys, kind, layout
):
    folder = tmp_path / "file"
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
    tier = {"type": "slab", "root_dir": str(tmp_path / "slab"), "capacity_bytes": "1GiB"}
    seconds = {backend: ([], []) for backend in ("dynamic", "file")}
    for run in range(RUNS):
        tokens = random.Random(run).choices(range(1 << 15), k=PAGES * PAGE_SIZE)
        for backend, (stores, loads) in seconds.items():
            here = rank(kind, layout, backend, {"tier": tier}, pages=2 * PAGES + 1, seed=run)
            began_s = time.perf_counter()
            stored, _ = here.store(tokens)
            stores.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            slots, _, loaded = here.load(tokens)
            loads.append(time.perf_counter() - began_s)
            assert loaded == PAGES
            assert torch.equal(here.page(stored, PAGES - 1), here.page(slots, PAGES - 1))
            here.close()
            here.pool.destroy()
        shutil.rmtree(folder)
        folder.mkdir()
    ours, theirs = ([statistics.median(times) for times in seconds[name]] for name in seconds)
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    with capsys.disabled():
        print(  # noqa: T201 - the figures are its purpose
            f"\n{kind} {layout}: stores {ratios[0]:.2f}, loads {ratios[1]:.2f} times as fast"
        )
