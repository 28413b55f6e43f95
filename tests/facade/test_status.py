"""What a running engine says on its status socket, and when the socket is there."""

import asyncio
import dataclasses
import gc
import os
import socket

import pytest
import torch
from runtime.sockets import connected, received
from scripted_tier import ScriptedTier

from kvoffload_async import (
    CPUOffloadingSpec,
    EngineStatistics,
    OffloadConfig,
    OffloadEngine,
    ReqContext,
    SecondaryTierFactory,
    TieringOffloadingSpec,
)
from kvoffload_async.errors import ConfigError, OffloadError
from kvoffload_async.status.client import NoAnswerError, ask, parse_report
from kvoffload_async.status.server import SOCKET_VARIABLE, StatusSocket

CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "m"}
WITH_TIER = {**CONFIG, "secondary_tiers": [{"type": "example"}]}


@pytest.fixture
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "kv.sock"


@pytest.fixture
def tiers(monkeypatch):
    """Registers tiers of a test."""
    registry = SecondaryTierFactory._registry

    def register(name, tier):
        monkeypatch.setattr(registry, "_loaders", {**registry._loaders, name: lambda: tier})
        return {**CONFIG, "secondary_tiers": [{"type": name}]}

    return register


def report_of(path):
    return parse_report(ask(str(path)), str(path))


# -- what it says -------------------------------------------------------------------------------


def test_it_says_what_stats_says(path):
    with TieringOffloadingSpec({**WITH_TIER, "status_socket": str(path)}) as spec:
        manager = spec.get_manager()
        report = report_of(path)
        assert report.statistics == manager.stats()
        assert (report.pid, report.model) == (os.getpid(), "m")
        assert report.slowest is None


def test_it_says_which_requests_were_slow_where_requests_are_recorded(path):
    config = {**WITH_TIER, "status_socket": str(path), "explain_requests": 4}
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        assert report_of(path).slowest == manager.slowest_requests() == ()
        manager.recorder.begin(ctx := ReqContext("slow"))
        manager.recorder.begin_round(ctx)
        manager.recorder.advance(manager.recorder.now_s + 3.0)
        manager.recorder.scheduled(ctx)
        (slow,) = report_of(path).slowest
        assert (slow.req_id, slow.longest_phase) == ("slow", "lookups")
        assert slow.seconds == pytest.approx(3.0)


def test_whatever_else_is_asked_is_an_error(path):
    with TieringOffloadingSpec({**CONFIG, "status_socket": str(path)}) as spec:
        spec.get_manager()
        client = connected(str(path))
        client.sendall(b"\xff GET / HTTP/1.1\r\n")
        assert b'{"error": "the request must be' in received(client)
        client.close()


def test_gauges_that_are_no_numbers_are_left_out(path, tiers):
    class Odd(ScriptedTier):
        def gauges(self):
            return {"used_bytes": float("nan"), "capacity_bytes": 7, "a": object(), 3: 1}

    config = tiers("odd", Odd)
    with TieringOffloadingSpec({**config, "status_socket": str(path)}) as spec:
        spec.get_manager()
        (tier,) = report_of(path).statistics.tiers
        assert tier.used_bytes is None
        assert tier.capacity_bytes == 7
        assert tier.gauges == {"capacity_bytes": 7, "3": 1}


def test_statistics_that_cannot_be_read_are_an_error_and_one_line_in_the_log(path, caplog):
    class Broken:
        def stats(self):
            raise ZeroDivisionError

    broken = Broken()
    config = {**CONFIG, "status_socket": str(path)}
    with TieringOffloadingSpec(config, read_stats=broken.stats) as spec:
        spec.get_manager()
        for _ in range(2):
            with pytest.raises(NoAnswerError, match="the statistics cannot be read: ZeroDiv"):
                report_of(path)
    assert caplog.text.count("reading the statistics for the status socket failed") == 1


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), Unspeakable()])
def test_it_answers_on_whatever_statistics_raise(path, error):
    class Broken:
        failures = 2

        def stats(self):
            if self.failures:
                self.failures -= 1
                raise error
            return spec.get_manager().stats()

    broken = Broken()
    config = {**CONFIG, "status_socket": str(path)}
    with TieringOffloadingSpec(config, read_stats=broken.stats) as spec:
        spec.get_manager()
        for _ in range(2):
            with pytest.raises(NoAnswerError, match=f"cannot be read: {type(error).__name__}"):
                report_of(path)
        assert report_of(path).statistics == spec.get_manager().stats()


def test_gauges_that_raise_an_interrupt_end_no_status_thread(path, tiers):
    class Interrupting(ScriptedTier):
        def gauges(self):
            raise KeyboardInterrupt

    config = tiers("interrupting", Interrupting)
    with TieringOffloadingSpec({**config, "status_socket": str(path)}) as spec:
        spec.get_manager()
        for _ in range(2):
            with pytest.raises(NoAnswerError, match="cannot be read: KeyboardInterrupt"):
                report_of(path)


def test_every_field_of_the_statistics_arrives(path):
    with TieringOffloadingSpec({**WITH_TIER, "status_socket": str(path)}) as spec:
        stats = spec.get_manager().stats()
        seen = report_of(path).statistics

    def same(sent, arrived):
        assert type(arrived) is type(sent)
        for field in dataclasses.fields(sent):
            one, other = getattr(sent, field.name), getattr(arrived, field.name)
            assert one == other, field.name
            if dataclasses.is_dataclass(one):
                same(one, other)

    same(stats, seen)


# -- when it is there ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["kv.sock", "/" + "x" * 107, "/\0", 3, "", "/half\ud800"])
def test_what_is_no_path_of_a_socket_is_refused(value):
    with pytest.raises(ConfigError, match=r"status_socket: .* absolute path of at most 107 bytes"):
        OffloadConfig.parse({**CONFIG, "status_socket": value})


def test_a_primary_alone_has_none():
    with pytest.raises(ConfigError, match=r"status_socket: .* use TieringOffloadingSpec"):
        CPUOffloadingSpec({**CONFIG, "status_socket": "/run/kv.sock"})


def test_it_is_refused_before_anything_has_started_where_another_engine_has_it(
    path, tiers, started_threads
):
    opened = []

    class Noting(ScriptedTier):
        async def open(self, env):
            opened.append(self)
            await super().open(env)

    config = {**tiers("noting", Noting), "status_socket": str(path)}
    with TieringOffloadingSpec({**CONFIG, "status_socket": str(path)}) as first:
        first.get_manager()
        before = started_threads()
        second = TieringOffloadingSpec(config)
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            second.get_manager()
        assert (opened, started_threads()) == ([], before)
        second.shutdown()
        assert report_of(path).pid == os.getpid()
    assert not path.exists()


def test_it_is_removed_where_a_tier_cannot_be_opened(path, tiers, threads_left):
    class Closed(ScriptedTier):
        def __init__(self):
            super().__init__(open_error=ConfigError("no"))

    spec = TieringOffloadingSpec({**tiers("closed", Closed), "status_socket": str(path)})
    for _ in range(2):
        with pytest.raises(ConfigError, match="no"):
            spec.get_manager()
        assert not path.exists()
        assert not threads_left()


def test_it_is_removed_where_a_tier_cannot_be_closed(path, tiers, threads_left):
    class Jammed(ScriptedTier):
        def __init__(self):
            super().__init__(close_error=OSError("umount"))

    spec = TieringOffloadingSpec({**tiers("jammed", Jammed), "status_socket": str(path)})
    manager = spec.get_manager()
    with pytest.raises(OffloadError, match="umount"):
        spec.shutdown()
    assert not path.exists()
    assert not threads_left()
    manager.secondary_tiers[0].link._view.release()


def test_the_environment_names_one_where_the_configuration_does_not(path, monkeypatch):
    monkeypatch.setenv(SOCKET_VARIABLE, str(path))
    with TieringOffloadingSpec(CONFIG) as spec:
        spec.get_manager()
        assert path.exists()
        other = path.with_name("other")
        with TieringOffloadingSpec({**CONFIG, "status_socket": str(other)}) as second:
            second.get_manager()
            assert other.exists()
    monkeypatch.setenv(SOCKET_VARIABLE, "relative")
    with pytest.raises(ConfigError, match=f"{SOCKET_VARIABLE}: 'relative' is not valid"):
        TieringOffloadingSpec(CONFIG).get_manager()


# -- under OffloadEngine ------------------------------------------------------------------------


def test_an_engine_shows_its_own_figures_and_its_loop_is_not_asked(path):
    async def shown():
        caches = {"layer": torch.zeros(4, 4096, dtype=torch.uint8)}
        engine = OffloadEngine({**CONFIG, "status_socket": str(path)}, kv_caches=caches)
        async with engine:
            # On the loop's thread, which therefore does nothing else.
            assert report_of(path).statistics == engine.stats()
            assert isinstance(engine.stats(), EngineStatistics)
        assert not path.exists()

    asyncio.run(shown())


def test_an_engine_that_nobody_closed_is_not_kept_alive(path, monkeypatch):
    answers = []
    monkeypatch.setattr(StatusSocket, "serve", lambda _socket, answer: answers.append(answer))
    spec = TieringOffloadingSpec({**CONFIG, "status_socket": str(path)})
    manager = spec.get_manager()
    (answer,) = answers
    stats = manager.stats
    spec.shutdown()
    assert b'"kind":"OffloadingStatistics"' in answer(b"status")
    del spec, manager, stats
    gc.collect()
    assert b"without `close()`" in answer(b"status")


def test_a_child_removes_nothing(path):
    with TieringOffloadingSpec({**CONFIG, "status_socket": str(path)}) as spec:
        spec.get_manager()
        pid = os.fork()
        if not pid:  # pragma: no cover - in the child
            spec.shutdown()
            os._exit(0)
        os.waitpid(pid, 0)
        assert report_of(path).pid == os.getpid()


def test_nobody_listens_once_it_is_closed(path):
    with TieringOffloadingSpec({**CONFIG, "status_socket": str(path)}) as spec:
        spec.get_manager()
    with pytest.raises(NoAnswerError, match="no engine answers: No such file"):
        report_of(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    with pytest.raises(NoAnswerError, match="Connection refused"):
        report_of(path)
    listener.close()
