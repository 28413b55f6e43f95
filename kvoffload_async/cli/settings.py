"""Builds the configuration of a replay from command-line options and a configuration file.

The built-in workload's tier uses a temporary directory, which is removed after the replay.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from kvoffload_async.cli.command import CommandOptions, argument, flag
from kvoffload_async.cli.inputs import parse_json, parse_tier, parse_yaml
from kvoffload_async.config import OffloadConfig, parse_size_bytes
from kvoffload_async.errors import InputError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.source import STDIN
from kvoffload_async.runtime.buffer import row_stride_bytes
from kvoffload_async.runtime.machine import temporary_directory


class ScratchFolder(ExitStack):
    """A temporary directory, created on first use and removed on exit."""

    @property
    def is_used(self) -> bool:
        """Whether the directory has been created."""
        return "path" in vars(self)

    @cached_property
    def path(self) -> str:
        """The directory's path; creates the directory on first use, or raises InputError."""
        parent = temporary_directory()
        try:  # a hung copy may still write into the directory during the cleanup
            folder = tempfile.TemporaryDirectory(
                prefix="kvoffload-replay-", dir=parent, ignore_cleanup_errors=True
            )
        except OSError as error:
            raise InputError(
                f"cannot write to {parent!r} ({error.strerror}); set TMPDIR to another directory"
            ) from error
        return self.enter_context(folder)


CONFIG_VARIABLE = "KVOFFLOAD_CONFIG"
"""The environment variable that names the configuration file if no option does."""
YAML_SUFFIXES = frozenset({".yaml", ".yml"})
DEFAULT_BLOCK_BYTES = 16 * 1024
MODEL = "replay"
"""Default model name: a replay derives the bytes of a block only from its key."""
BUILT_IN_PRIMARY_BLOCKS = 256
TRACE_PRIMARY_BLOCKS = 10_000
MAX_CONCURRENT: Final = 1 << 16
MAX_BLOCKS_PER_CHUNK: Final = 1 << 16
PER_CHUNK: Final = (
    "Offload each N consecutive blocks of the trace as one block; what remains of a prompt is not "
    "offloaded."
)
BUILT_IN_TIER = "fs"
BUILT_IN_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class ReplayFlags(CommandOptions):
    """The options of `kvoffload replay`; engine options that are not given are None."""

    trace: Path | None = argument(
        "Trace file of JSON lines with hash_ids; - reads standard input. Default: a built-in chat "
        "workload.",
        None,
    )
    primary_blocks: int | None = flag(
        None, "Capacity of the primary tier, in blocks.", metavar="N", min=1
    )
    block_bytes: str | None = flag(
        None, "Size of one offloaded block. Default: 16KiB.", metavar="SIZE"
    )
    blocks_per_chunk: int | None = flag(
        None, f"{PER_CHUNK} Default: 1.", metavar="N", min=1, max=MAX_BLOCKS_PER_CHUNK
    )
    policy: str | None = flag(
        None, "Eviction policy of the primary tier. Default: lru.", metavar="lru|arc|hd"
    )
    tiers: list[str] | None = flag(
        None,
        "A secondary tier. Repeat the option for more tiers, in lookup order. `kvoffload tiers` "
        "lists types and keys.",
        "--tier",
        metavar="TYPE[:key=value,...]",
    )
    config: Path | None = flag(
        None,
        "Engine configuration, JSON or YAML; - reads standard input. Options of the command line "
        "override it.",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
    )
    limit: int | None = flag(None, "Replay only the first N requests.", metavar="N", min=1)
    passes: int | None = flag(
        None,
        "Replay the trace N times, each time with a new engine over the same tiers. Default: 1; "
        "2 for the built-in workload with its built-in tier.",
        metavar="N",
        min=1,
    )
    concurrency: int = flag(
        1, "Number of concurrent requests.", metavar="K", min=1, max=MAX_CONCURRENT
    )
    arrivals: int | None = flag(
        None,
        "Requests arrive by the trace's timestamps, SPEED times as fast, and wait while K are in "
        "flight. Default: each arrives when another one has ended.",
        metavar="SPEED",
        min=1,
    )
    prefetch: bool = flag(
        True,
        "With --arrivals: promote blocks of waiting requests before these start.",
        "--prefetch/--no-prefetch",
    )
    engine: str = flag(
        "sync",
        "API to drive: sync, the connector for schedulers, step by step; or async, OffloadEngine "
        "on an event loop.",
        metavar="sync|async",
    )
    device: str = flag(
        "cpu",
        "Location of the device memory: the host, or a CUDA device.",
        metavar="cpu|cuda",
    )
    device_blocks: int | None = flag(
        None,
        "Give the device N blocks and a prefix cache. Default: enough blocks for the concurrent "
        "requests, and no prefix cache.",
        metavar="N",
        min=1,
    )
    json: str | None = flag(
        None, "Write the figures as JSON; - is standard output.", metavar="PATH|-"
    )
    explain: int | None = flag(
        None,
        "Print the timeline of request N in each pass; the first request is 0.",
        metavar="N",
        min=0,
    )
    trace_out: str | None = flag(
        None, "Write the timelines of all requests as trace events for Perfetto.", metavar="FILE"
    )
    plot: Path | None = flag(
        None, "Plot the replay over time; needs kvoffload-async[plot].", metavar="PNG"
    )
    report: Path | None = flag(
        None,
        "Write a page with figures and plots; needs kvoffload-async[plot].",
        metavar="HTML",
    )


_MAX_CONFIG_BYTES: Final = 1 << 24
"""Maximum size of a configuration; ends the reading of a device or a wrong file."""


def read_config(path: Path) -> dict[str, Any]:
    """Return a configuration's keys without validating them.

    The suffix of the name selects YAML; otherwise the file is JSON. `-` is standard input: JSON if
    the text begins with `{`, else YAML.

    Raises:
        InputError: The file cannot be read, or does not contain one object.
    """
    is_stdin = str(path) == STDIN
    name = "standard input" if is_stdin else str(path)
    try:
        with nullcontext(sys.stdin.buffer) if is_stdin else path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_CONFIG_BYTES:
        raise InputError(f"{name}: a configuration has at most {_MAX_CONFIG_BYTES} bytes")
    try:
        text = content.decode()
        is_yaml = path.suffix in YAML_SUFFIXES or (is_stdin and not text.lstrip().startswith("{"))
        config = parse_yaml(text) if is_yaml else parse_json(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not JSON: {error}") from error
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if not isinstance(config, dict):
        expected = "YAML mapping" if is_yaml else "JSON object"
        raise InputError(f"{name}: expected a {expected} of keys and values")
    return config


def resolve(flags: ReplayFlags, scratch: ScratchFolder) -> TieringOffloadingSpec:
    """Return the spec of a replay; flags override the file, which overrides the defaults.

    Args:
        flags: Options of the command line.
        scratch: Directory for the built-in workload's tier, if no other tier is configured.

    Raises:
        InputError: The file is invalid, or it and the trace are both standard input.
        ConfigError: A key or a value is invalid; the message names it.
    """
    if str(flags.trace) == STDIN == str(flags.config):
        raise InputError("TRACE and --config are both -; standard input can be read only once")
    config = read_config(flags.config) if flags.config else {}
    if flags.block_bytes is not None:
        config["block_bytes"] = parse_size_bytes(flags.block_bytes, "--block-bytes")
    if flags.blocks_per_chunk is not None:
        config["blocks_per_chunk"] = flags.blocks_per_chunk
    if flags.policy is not None:
        config["eviction_policy"] = flags.policy
    if flags.tiers:
        config["secondary_tiers"] = [parse_tier(text) for text in flags.tiers]
    elif flags.trace is None and "secondary_tiers" not in config:
        config["secondary_tiers"] = [{"type": BUILT_IN_TIER, "root_dir": f"{scratch.path}/fs"}]
    config.setdefault("model", MODEL)
    config.setdefault("block_bytes", DEFAULT_BLOCK_BYTES)
    _size_primary(config, flags)
    return TieringOffloadingSpec(config)


def _size_primary(config: dict[str, Any], flags: ReplayFlags) -> None:
    """Size the primary for exactly the wanted number of blocks, including the rows' padding."""
    num_blocks = flags.primary_blocks
    if num_blocks is None:
        if "cpu_bytes_to_use" in config:
            return
        num_blocks = BUILT_IN_PRIMARY_BLOCKS if flags.trace is None else TRACE_PRIMARY_BLOCKS
    checked = OffloadConfig.parse({**config, "cpu_bytes_to_use": 1})
    stride_bytes = row_stride_bytes(checked.block_bytes, checked.num_workers)
    config["cpu_bytes_to_use"] = num_blocks * stride_bytes
