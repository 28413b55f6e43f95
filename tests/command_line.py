"""The command, run in this process, with traces and tiers written on the spot, and its fixtures."""

import json
import signal
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import typer
import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from kvoffload_async.cli.app import app
from kvoffload_async.replay.source import NUM_REQUESTS, ChatWorkload

IGNORING = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh"]
"""Before a command: it is started with these signals ignored, as by a script or by nohup."""

# The runner makes the command anew for each run, which takes longer than many a run.
typer.testing._get_command = cache(get_command)

FAULTY_TIERS = """
    import asyncio
    import signal
    import numpy as np
    from kvoffload_async.errors import TierUnavailableError
    from kvoffload_async.tiers.example import ExampleTier

    class BitFlip(ExampleTier):
        '''Hands one byte back wrong.'''
        async def load(self, job):
            failures = await super().load(job)
            np.asarray(self._env.kv_view)[int(job.block_ids[-1]), -1] ^= 1
            return failures

    class Swapped(ExampleTier):
        '''Hands blocks back in the wrong order.'''
        async def load(self, job):
            failures = await super().load(job)
            slots = job.block_ids
            rows = np.asarray(self._env.kv_view)
            rows[slots] = rows[slots[::-1]]
            return failures

    class Stale(ExampleTier):
        '''Says that it has loaded, and has not.'''
        async def load(self, job):
            return {}

    class Unplugged(ExampleTier):
        '''Fails every load.'''
        async def load(self, job):
            raise TierUnavailableError("pulled out")

    class Stuck(ExampleTier):
        '''Never ends a store.'''
        async def store(self, job):
            await asyncio.Event().wait()

    class Closed(ExampleTier):
        '''Cannot be opened.'''
        async def open(self, env):
            raise TierUnavailableError("nobody there")

    class Interrupting(ExampleTier):
        '''Somebody presses Ctrl-C while it starts.'''
        def __init__(self, settings):
            super().__init__(settings)
            signal.raise_signal(signal.SIGINT)

    class Jammed(ExampleTier):
        '''Cannot be closed.'''
        async def close(self):
            raise OSError("jammed")
"""


class Command:
    """The command, and a directory to work in."""

    def __init__(self, directory: Path, app: typer.Typer = app) -> None:
        self.directory = directory
        self._app = app

    def run(self, *arguments: object) -> Result:
        return CliRunner().invoke(self._app, [str(a) for a in arguments])

    def figures(self, *arguments: object, exit_code: int = 0) -> dict:
        """Replay with `--json -`; standard output must be nothing but JSON."""
        result = self.run("replay", *arguments, "--json", "-")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    def refusal(self, *arguments: object) -> str:
        """Run what must be refused: status 2, one line on standard error, nothing else."""
        result = self.run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("kvoffload: error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr

    def trace(self, requests: Iterable[Sequence[int]]) -> Path:
        path = self.directory / "trace.jsonl"
        path.write_text("".join(json.dumps({"hash_ids": list(r)}) + "\n" for r in requests))
        return path

    def file(self, text: str, name: str = "config.json") -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def config(self, **keys: object) -> Path:
        return self.file(json.dumps(keys))


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def interrupted_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody presses Ctrl-C before the built-in workload's sixth request."""
    interrupt_workload(monkeypatch, signal.SIGINT)


def interrupt_workload(monkeypatch: pytest.MonkeyPatch, signal_number: int) -> None:
    """Let a signal arrive before the built-in workload's sixth request."""

    def requests(_source: ChatWorkload) -> Iterator[list[int]]:
        for number in range(NUM_REQUESTS):
            if number == 5:
                signal.raise_signal(signal_number)
            yield [number]

    monkeypatch.setattr(ChatWorkload, "_requests", requests)


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Make a module of a text; return its name, by which it is imported while the test runs."""

    def make(prefix: str, text: str) -> str:
        name = f"{prefix}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return make


@pytest.fixture
def faulty_tiers(importable: Callable[[str, str], str]) -> str:
    """The name of the module with the tiers above."""
    return importable("faulty_tiers", FAULTY_TIERS)
