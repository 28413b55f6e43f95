"""The tiers that vLLM's `TieringOffloadingSpec` can be given by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.integrations.vllm.tier import VllmTier
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.types import make_offload_key

_DECIDED = frozenset({"model", "rank", "run_config"})


class FsTier(VllmTier):
    """One file a block, in the folders of vLLM's own `fs` tier: each reads what the other wrote.

    Takes vLLM's options for that tier and those of this package's, but for what vLLM knows itself.

    Attributes:
        file_mapper: vLLM's own, for this run's configuration; `get_file_name(key)` is the path of
            a block.
    """

    kind: ClassVar[str] = "fs"
    decided: ClassVar[frozenset[str]] = _DECIDED

    file_mapper: FileMapper

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the namespace that vLLM's own tier would use."""
        self.file_mapper, options = fs_namespace(offloading_spec, options.get("root_dir"))
        return options


class SlabTier(VllmTier):
    """A bounded store of preallocated files, for a local disk; one engine at a time has it open.

    Data-parallel replicas have a store each, below the same directory.
    """

    kind: ClassVar[str] = "slab"
    decided: ClassVar[frozenset[str]] = _DECIDED

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the run configuration of vLLM's own `fs` tier, and this engine's replica."""
        directory = _absolute(options.get("root_dir"))
        return {
            "root_dir": directory,
            "run_config": convert.file_mapper_of(offloading_spec, directory).get_run_config(),
            "rank": offloading_spec.config.parallel.data_parallel_index,
        }


def fs_namespace(
    offloading_spec: base.OffloadingSpec, root_dir: object
) -> tuple[FileMapper, dict[str, Any]]:
    """Return where vLLM's own `fs` tier would keep its blocks, and the options that say so.

    Raises:
        ConfigError: `root_dir` is not a path, or the two would not meet there.
    """
    directory = _absolute(root_dir)
    file_mapper = convert.file_mapper_of(offloading_spec, directory)
    run_config, rank = file_mapper.get_run_config(), file_mapper.rank
    probe = make_offload_key(bytes(range(32)))
    ours = Namespace(directory, run_config, rank).get_file_name(probe)
    theirs = file_mapper.get_file_name(probe)
    if ours != theirs:
        raise ConfigError(
            f"root_dir: {directory!r}: vLLM would keep blocks as {theirs!r} and this package as "
            f"{ours!r}; a model name this long cannot be shared, so serve it under a short path"
        )
    return file_mapper, {"root_dir": directory, "run_config": run_config, "rank": rank}


def _absolute(root_dir: object) -> str:
    """Return a directory as vLLM takes it: a relative one starts at the working directory."""
    if not isinstance(root_dir, str) or not root_dir:
        raise ConfigError(f"root_dir: {root_dir!r} is not valid; give the path of a directory")
    return os.path.abspath(root_dir)  # noqa: PTH100 - Path.absolute keeps the dots
