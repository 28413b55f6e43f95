"""The command's parts, each on its own."""

import io
import signal
import threading

import pytest
from rich.console import Console

from kvoffload_async.cli import app as commands
from kvoffload_async.cli.command import Interrupt
from kvoffload_async.cli.inputs import parse_tier
from kvoffload_async.cli.output import Gauge, progress_bar
from kvoffload_async.errors import InputError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory


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

    def test_where_it_is_ignored_it_stays_so(self):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with Interrupt() as interrupt:
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                signal.raise_signal(signal.SIGINT)
                assert not interrupt.is_requested
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    def test_on_another_thread_it_does_nothing(self):
        done = []

        def work():
            with Interrupt() as interrupt:
                done.append(interrupt.is_requested)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert done == [False]


class TestProgress:
    def test_shows_nothing_where_there_is_no_terminal(self):
        out = io.StringIO()
        with progress_bar(Console(file=out), lambda: 0.5, "replay"):
            pass
        assert out.getvalue() == ""

    def test_shows_a_share_on_a_terminal(self):
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        with progress_bar(console, lambda: 0.25, "replay 1/2"):
            pass
        assert "25%" in console.file.getvalue()
        assert "replay 1/2" in console.file.getvalue()

    def test_a_gauge_counts_what_is_done_of_what_is_to_be_done(self):
        gauge = Gauge()
        assert gauge.fraction_done() == 0
        gauge.expect(4)
        gauge.advance(1)
        assert gauge.fraction_done() == 0.25
        gauge.expect(4)
        assert gauge.fraction_done() == 0.125
        gauge.advance(7)
        assert gauge.fraction_done() == 1


class TestTiers:
    def test_lists_every_tier_with_its_options(self, command):
        result = command.run("tiers")
        assert result.exit_code == 0
        for name in SecondaryTierFactory.names():
            assert f"{name}: " in result.stdout
        for text in ("custom_param", "io_timeout_s", "30.0", "backpressure"):
            assert text in result.stdout

    def test_says_what_options_mean(self):
        options = {option.name: option for option in commands.common_options()}
        assert options["probe_timeout_s"].default == 2.0
        assert options["probe_timeout_s"].summary.startswith("Seconds until an unanswered")
        assert "backpressure_detector" not in options

    def test_options_of_an_out_of_tree_tier(self, faulty_tiers, monkeypatch):
        names = ("whole", "gone", "undocumented")
        monkeypatch.setattr(SecondaryTierFactory, "names", lambda: list(names))

        class Undocumented:
            tier_class = None

            def __init__(self, must, may="x"):
                pass

        def get(name):
            if name == "gone":
                raise ImportError("no such module")
            return Undocumented

        monkeypatch.setattr(SecondaryTierFactory, "get_tier_class", get)
        whole, gone, _ = commands.tier_entries()
        assert [o.name for o in whole.options] == ["must", "may"]
        assert whole.options[0].default is commands.REQUIRED
        assert whole.summary == ""
        assert gone.summary == "cannot be used: no such module"

    def test_a_tier_without_options_has_no_table(self, command, monkeypatch):
        entry = commands.TierEntry("bare", "Nothing to set.")
        monkeypatch.setattr("kvoffload_async.cli.app.tier_entries", lambda: [entry])
        assert "bare: Nothing to set." in command.run("tiers").stdout
