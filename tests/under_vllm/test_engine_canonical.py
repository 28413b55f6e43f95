"""Real vLLM engines of one and of two ranks that share a directory of canonical pages."""

import hashlib

import pytest
from test_engine import BLOCK_BYTES, BLOCK_TOKENS, FULL_BLOCKS, MODULE, connector, run
from tiny_model import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("spec", ["KVOffloadSpec", "HostTieringOffloadingSpec"])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1)])
def test_what_some_ranks_stored_is_a_hit_for_other_numbers_of_ranks(spec, sizes, tmp_path):
    model = str(save_tiny_model(tmp_path / "model"))
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv")}
    if spec == "HostTieringOffloadingSpec":
        tier |= {"type": "FsTier", "module_path": MODULE}
    settings = connector(spec, tiers=[tier], canonical_layout=True)
    hits, stored = [], set()
    for ranks in sizes:
        found = run(
            model=model,
            connector=settings,
            processes=ranks > 1,
            ranks=ranks,
            steps=["generate", "pages"],
        )
        hits += found["hits"]
        files = list((tmp_path / "kv").rglob("*.bin"))
        stored = stored or {digest_of(path) for path in files}
        assert {digest_of(path) for path in files} == stored, "later engines store no other rows"
        assert stored <= set(found["pages"]), "the engine has the pages that the first one stored"
    assert hits == [0] + [FULL_BLOCKS] * (len(sizes) - 1)
    assert len(stored) == FULL_BLOCKS // BLOCK_TOKENS


def digest_of(path):
    return hashlib.sha256(path.read_bytes()[:BLOCK_BYTES]).hexdigest()
