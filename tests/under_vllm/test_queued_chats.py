"""First tokens of returning chats that queue: with prefetch, without, and with vLLM's own tiers.

Method: vLLM's real scheduler and connector over real copies, and a model that sleeps: 0.3 ms a
token and 5 ms a step. Sixteen chats of 24 to 48 blocks, which a tier has and a new engine has not,
return at once with 256 new tokens each, and 8 are generated; "busy" means that all places are taken
when they come. The three sides alternate, each over a copy of the same store; printed are the
medians of the repeats, and the ratio of each pair of repeats. Latencies are per job of the tier,
in addition to those of `fs`; vLLM's side always has vLLM's `fs`. "in vain" counts blocks that were
promoted and not loaded before they were promoted again. Nothing is asserted about time.

    VLLM_LOGGING_LEVEL=ERROR pytest tests/under_vllm/test_queued_chats.py --benchmark-enable -s \
        -k '150ms and busy'

Without the option it only shows that it works.
"""

import shutil
import statistics
from dataclasses import dataclass

import pytest
from queued_world import (
    BLOCK,
    PREFETCH,
    SIDES,
    VLLMS,
    WITHOUT,
    Disturbance,
    Queued,
    install,
    tiny_model,
    words,
)

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]

TIERS = {"fs": ("fs", 0), "slab": ("slab", 0), "30ms": ("fs", 0.03), "150ms": ("fs", 0.15)}
HOSTS = (64, 128, 256)
REPEATS = 3
CASES = [
    *((tier, seqs, 128, kind) for tier in TIERS for seqs in (2, 4) for kind in ("busy", "idle")),
    *(("150ms", seqs, host, "busy") for seqs in (2, 4) for host in (64, 256)),
    *((tier, seqs, 128, "failing") for tier in ("fs", "150ms") for seqs in (2, 4)),
    *((tier, seqs, 128, "aborted") for tier in ("fs", "150ms") for seqs in (2, 4)),
]


SHOWN = [("slab", 2, 128, "busy"), ("30ms", 4, 128, "idle"), ("fs", 2, 128, "aborted")]
"""The cases that run without the option, small."""


@dataclass
class Load:
    """How much there is to do."""

    chats: int = 16
    least: int = 24
    most: int = 48
    turn: int = 256
    token_s: float = 0.0003
    overhead_s: float = 0.005
    repeats: int = REPEATS

    def prompts(self):
        """Return the prompts of the chats so far, which whole blocks hold."""
        step = (self.most - self.least) / max(1, self.chats - 1)
        lengths = [
            BLOCK * round(self.least + step * (7 * n % self.chats)) for n in range(self.chats)
        ]
        return [words(f"chat {n}", length) for n, length in enumerate(lengths)]


PLAIN = Load(chats=4, least=4, most=7, turn=64, token_s=0.0, overhead_s=0.0, repeats=1)


@pytest.fixture
def load(request):
    return Load() if request.config.getoption("benchmark_enable") else PLAIN


@pytest.fixture
def run(monkeypatch, tmp_path, load):
    """Return a function that serves the chats once on a side."""
    install(monkeypatch)
    model = tiny_model(tmp_path)
    stores = {}

    def engine(folder, side, tier, **options):
        return Queued(folder, model, side, tier, **options)

    def store_of(side, tier):
        name = ("vllms", "fs") if side == VLLMS else ("ours", tier)
        if name not in stores:
            folder = stores[name] = tmp_path / "-".join(name)
            filling = engine(
                folder, side, tier, host_blocks=1024, seqs=4, token_s=0.0, overhead_s=0.0
            )
            filling.fill(load.prompts())
            filling.close()
        return stores[name]

    def serve(side, tier, latency_s, *, host_blocks, seqs, **disturbances):
        folder = tmp_path / "now"
        shutil.copytree(store_of(side, tier), folder)
        one = engine(
            folder,
            side,
            tier,
            host_blocks=host_blocks,
            seqs=seqs,
            token_s=load.token_s,
            overhead_s=load.overhead_s,
        )
        chats = [
            (prompt + words(f"turn {n}", load.turn), len(prompt))
            for n, prompt in enumerate(load.prompts())
        ]
        Disturbance.job_s = latency_s
        try:
            return one.serve(chats, **disturbances)
        finally:
            one.close()
            Disturbance.clear()
            shutil.rmtree(folder)

    return serve


KINDS = {
    "busy": {"busy": True},
    "idle": {},
    "failing": {"busy": True, "failing_s": 0.5},
    "aborted": {"busy": True, "abort_after_s": 0.3},
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_first_tokens_of_queued_chats(load, case, request):
    if load is PLAIN and case not in SHOWN:
        pytest.skip("measured only")
    tier, seqs, host, kind = case
    run = request.getfixturevalue("run")
    name, latency_s = TIERS[tier]
    took = {side: [] for side in SIDES}
    for number in range(load.repeats):
        for side in SIDES[:: -1 if number % 2 else 1]:
            outcome = run(side, name, latency_s, host_blocks=host, seqs=seqs, **KINDS[kind])
            took[side].append(outcome)
    tell(f"\n{tier}, max_num_seqs {seqs}, {host} host blocks, {kind}")
    tell(
        f"{'':9} {'p50 ms':>7} {'p95 ms':>7} {'all ms':>7} {'share':>6} {'prefetched':>10} "
        f"{'unused':>6} {'in vain':>7} {'stores':>6} {'places':>6} {'expired':>7}"
    )
    for side, outcomes in took.items():

        def middle(figure, outcomes=outcomes):
            return statistics.median(getattr(one, figure) for one in outcomes)

        tell(
            f"{side:9} {1000 * middle('p50'):7.0f} {1000 * middle('p95'):7.0f} "
            f"{1000 * middle('total_s'):7.0f} {middle('share'):6.3f} {middle('prefetched'):10.0f} "
            f"{middle('unused'):6.0f} {middle('in_vain'):7.0f} {middle('stores'):6.0f} "
            f"{middle('fullness'):6.2f} {middle('expired'):7.0f}"
        )
    for other in (WITHOUT, VLLMS):
        ratios = [
            " ".join(
                f"{getattr(mine, figure) / getattr(theirs, figure) - 1:+.1%}"
                for mine, theirs in zip(took[PREFETCH], took[other], strict=True)
            )
            for figure in ("p50", "p95", "total_s")
        ]
        tell(f"prefetch against {other}: p50 {ratios[0]}; p95 {ratios[1]}; all {ratios[2]}")
    if kind in {"busy", "idle"}:
        assert all(one.share == 1.0 for side in (PREFETCH, WITHOUT) for one in took[side])
        assert all(one.in_vain == one.unused == 0 for one in took[PREFETCH])


def tell(line):
    print(line, flush=True)  # noqa: T201 - the figures are what this is for
