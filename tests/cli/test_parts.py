"""The command's parts, each on its own."""

import io
import os
import signal
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.cli import catalogue
from kvoffload_async.cli.device import FramePool
from kvoffload_async.cli.errors import InputError, StalledError
from kvoffload_async.cli.gauge import Gauge
from kvoffload_async.cli.interrupt import Interrupt
from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.cli.replay import Manner, replay, stall_timeout_s, unique_names
from kvoffload_async.cli.roads.stepwise import StepwiseRoad
from kvoffload_async.cli.roads.workers import Workers
from kvoffload_async.cli.scratch import ScratchFolder
from kvoffload_async.cli.settings import Flags, resolve
from kvoffload_async.cli.tally import Tally
from kvoffload_async.cli.tierspec import parse_tier
from kvoffload_async.cli.trace import TraceFile
from kvoffload_async.cli.workload import NUM_REQUESTS, SYSTEM_PROMPT_BLOCKS, ChatWorkload
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.transport.paged import PagedMemory


class TestTierSpec:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("fs", {"type": "fs"}),
            ("fs:", {"type": "fs"}),
            ("fs:root_dir=/a/b", {"type": "fs", "root_dir": "/a/b"}),
            ("fs:root_dir=", {"type": "fs", "root_dir": ""}),
            ("t:a=1,b=0.5,c=true,d=null", {"type": "t", "a": 1, "b": 0.5, "c": True, "d": None}),
            ('t:a="1",b=x=y', {"type": "t", "a": "1", "b": "x=y"}),
            ("t:a=NaN,b=[1],c={}", {"type": "t", "a": "NaN", "b": "[1]", "c": "{}"}),
            ("t:url=redis://h:6379/0", {"type": "t", "url": "redis://h:6379/0"}),
        ],
    )
    def test_values_are_json_scalars_or_text(self, text, expected):
        assert parse_tier(text) == expected

    @pytest.mark.parametrize("text", ["", ":a=1", "t:a", "t:=1", "t:a=1,", "t:type=x"])
    def test_what_is_no_tier(self, text):
        with pytest.raises(InputError, match="--tier"):
            parse_tier(text)


class TestWorkload:
    def test_is_the_same_for_the_same_seed(self):
        assert list(ChatWorkload()) == list(ChatWorkload())
        assert list(ChatWorkload(seed=1)) != list(ChatWorkload(seed=2))

    def test_equal_ids_mean_equal_prefixes(self):
        prefix_of = {}
        for blocks in ChatWorkload():
            for i, block in enumerate(blocks):
                assert prefix_of.setdefault(block, blocks[:i]) == blocks[:i]

    def test_conversations_share_system_prompts_and_return(self):
        requests = list(ChatWorkload())
        assert len(requests) == NUM_REQUESTS
        assert {r[0] for r in requests} == {0, 12, 20}
        assert min(map(len, requests)) > min(SYSTEM_PROMPT_BLOCKS)
        heads = [r[max(SYSTEM_PROMPT_BLOCKS)] for r in requests if len(r) > 20]
        assert len(set(heads)) < len(heads) / 2

    def test_tells_how_far_it_is(self):
        source = ChatWorkload()
        assert source.fraction_done == 0.0
        for _ in source:
            pass
        assert source.fraction_done == 1.0

    def test_tells_how_far_it_is_to_the_limit(self):
        source = ChatWorkload(limit=4)
        requests = iter(source)
        next(requests)
        assert source.fraction_done == 0.25


def test_a_trace_tells_how_far_it_is(command):
    source = TraceFile(command.trace([[1], [2]]))
    fractions = [source.fraction_done for _ in source]
    source.close()
    assert fractions == [0.5, 1.0]


def test_an_empty_trace_is_no_division_by_zero(command):
    source = TraceFile(command.trace([]))
    assert list(source) == []
    assert source.fraction_done == 0.0
    source.close()


def test_a_read_error_is_bad_input(command):
    source = TraceFile(command.trace([[1]]))
    os.close(source._file.fileno())
    with pytest.raises(InputError, match="cannot be read: Bad file descriptor"):
        list(source)
    with pytest.raises(OSError, match="Bad file descriptor"):
        source.close()


class TestInterrupt:
    def test_the_first_only_asks_and_the_second_acts_as_always(self):
        before = signal.getsignal(signal.SIGINT)
        with Interrupt() as interrupt:
            assert not interrupt.is_requested
            signal.raise_signal(signal.SIGINT)
            assert interrupt.is_requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before

    def test_leaves_the_handler_as_it_was(self):
        before = signal.getsignal(signal.SIGINT)
        with Interrupt():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before

    def test_on_another_thread_it_does_nothing(self):
        done = []

        def work():
            with Interrupt() as interrupt:
                done.append(interrupt.is_requested)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
        assert done == [False]


class TestProgress:
    def test_shows_nothing_where_there_is_no_terminal(self):
        out = io.StringIO()
        with progress_bar(Console(file=out), lambda: 0.5, "replay") as on_step:
            on_step()
        assert out.getvalue() == ""

    def test_shows_a_share_on_a_terminal(self):
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        with progress_bar(console, lambda: 0.25, "replay 1/2") as on_step:
            on_step()
            on_step()  # too soon to be shown again
        assert "25%" in console.file.getvalue()
        assert "replay 1/2" in console.file.getvalue()

    def test_a_gauge_counts_what_is_done_of_what_is_to_be_done(self):
        gauge, shares = Gauge(), []
        gauge.on_change = lambda: shares.append(gauge.fraction_done)
        gauge.advance(0)
        gauge.expect(4)
        gauge.advance(1)
        gauge.expect(4)
        gauge.advance(7)
        assert shares == [0, 0, 0.25, 0.125, 1]


class TestStop:
    def test_stopping_ends_the_requests_in_flight(self, command):
        answers = iter([False] * 50)
        spec = resolve(Flags(primary_blocks=100, tiers=["example"]), ScratchFolder())
        manner = Manner(concurrency=4, should_stop=lambda: next(answers, True))
        report = replay(spec, ChatWorkload(), manner)
        assert report.interrupted
        assert 0 < report.requests < NUM_REQUESTS
        assert report.complaints == []

    def test_work_that_never_ends_is_given_up_at_the_deadline(self, faulty_tiers):
        spec = resolve(Flags(tiers=[f"Stuck:module_path={faulty_tiers}"]), ScratchFolder())
        manager = spec.get_manager()
        tally = Tally.of_tiers(["Stuck"], device_keeps=False)
        workers = Workers(spec, [PagedMemory(2, 16 * 1024)], tally)
        pool = FramePool(2, keeps_contents=False)
        road = StepwiseRoad(
            manager, workers, pool, tally, tier_names=["Stuck"], stall_timeout_s=0.25
        )
        with pytest.raises(StalledError, match="0 requests wait and 1 jobs have no result"):
            road.run([[1, 2]])
        assert not road.drain(0.05)
        workers.shutdown(5)
        spec.shutdown(0.2)
        assert manager.planner.counters.job_results == 1

    def test_the_stall_deadline_is_behind_the_engines_own(self):
        tiers = [{"type": "example", "io_timeout_s": 70}, {"type": "example"}]
        config = {"cpu_bytes_to_use": 4096, "block_bytes": 1}
        assert stall_timeout_s(TieringOffloadingSpec(config)) > 30
        spec = TieringOffloadingSpec({**config, "secondary_tiers": tiers})
        assert stall_timeout_s(spec) > 70


class TestReport:
    def test_complains_of_what_must_never_happen(self):
        good = replay(
            resolve(Flags(tiers=["example"]), ScratchFolder()), ChatWorkload(limit=3), Manner()
        )
        assert good.complaints == []
        bad = replace(good, corrupt_blocks=1, leaked_pins=2, job_results=good.job_results - 3)
        assert bad.complaints == [
            "1 loaded blocks had wrong bytes",
            "2 slots were never given back",
            "3 jobs got no result",
        ]


def test_names_of_tiers_are_unique():
    assert unique_names(["fs", "primary", "fs", "device"]) == [
        "fs",
        "primary#2",
        "fs#2",
        "device#2",
    ]


class TestCatalogue:
    def test_lists_every_tier_with_its_options(self, command):
        result = command.run("tiers")
        assert result.exit_code == 0
        for name in SecondaryTierFactory.names():
            assert f"{name}: " in result.stdout
        for text in ("custom_param", "io_timeout_s", "30.0", "backpressure"):
            assert text in result.stdout

    def test_says_what_options_mean(self):
        options = {option.name: option for option in catalogue.common_options()}
        assert options["probe_timeout_s"].default == 2.0
        assert options["probe_timeout_s"].summary.startswith("Seconds until an unanswered")
        assert "backpressure_detector" not in options

    def test_options_of_an_out_of_tree_tier(self, faulty_tiers, monkeypatch):
        names = ("whole", "gone", "untold")
        monkeypatch.setattr(SecondaryTierFactory, "names", lambda: list(names))

        class Untold:
            def __init__(self, must, may="x"):
                pass

        def get(name):
            if name == "gone":
                raise ImportError("no such module")
            return Untold

        monkeypatch.setattr(SecondaryTierFactory, "get_tier_class", get)
        whole, gone, _ = catalogue.tier_entries()
        assert [o.name for o in whole.options] == ["must", "may"]
        assert whole.options[0].default is catalogue.REQUIRED
        assert whole.summary == ""
        assert not gone.is_usable
        assert gone.summary == "cannot be used: no such module"

    def test_a_tier_without_options_has_no_table(self, command, monkeypatch):
        entry = catalogue.TierEntry("bare", "Nothing to set.")
        monkeypatch.setattr("kvoffload_async.cli.app.tier_entries", lambda: [entry])
        assert "bare: Nothing to set." in command.run("tiers").stdout
