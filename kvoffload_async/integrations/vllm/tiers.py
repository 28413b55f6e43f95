"""This package's tiers for vLLM's `TieringOffloadingSpec`, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.v1.kv_offload import base

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.integrations.vllm.identity import Identity, of_this_process
from kvoffload_async.integrations.vllm.tier import VllmTier
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.types import make_offload_key

_DECIDED = frozenset({"model", "rank", "run_config"})


class FsTier(VllmTier):
    """One file per block. Replicas and hosts serving the same model can share a directory.

    Accepts the options of vLLM's own `fs` tier and of this package's, except those that vLLM
    determines, plus `namespace`, `fingerprint` and `trust_vllm_directory`; see `identity`.

    Attributes:
        file_mapper: `get_file_name(key)` returns the path of a block.
    """

    kind: ClassVar[str] = "fs"
    decided: ClassVar[frozenset[str]] = _DECIDED

    file_mapper: Namespace

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the directory and the identity of the tier's blocks."""
        directory = _absolute(options.get("root_dir"))
        identity = self.identify(offloading_spec)
        if self.identity_options.trust_vllm_directory:
            _check_common_name(offloading_spec, directory, identity)
        directory = self.own_directory(directory, identity)
        self.file_mapper = Namespace(directory, identity.run_config, identity.rank)
        return {"root_dir": directory, "run_config": identity.run_config, "rank": identity.rank}


class SlabTier(VllmTier):
    """A bounded store in preallocated files on a local disk, opened by one engine at a time.

    Each data-parallel replica has its own store below the same directory. A store whose blocks are
    invalid because the model's weights or settings changed is emptied (`on_mismatch`).
    """

    kind: ClassVar[str] = "slab"
    decided: ClassVar[frozenset[str]] = _DECIDED

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the directory, the identity of the tier's blocks, and this engine's replica."""
        directory = _absolute(options.get("root_dir"))
        identity = self.identify(offloading_spec)
        if self.identity_options.trust_vllm_directory:
            raise ConfigError("trust_vllm_directory: vLLM has no tier of this kind; leave it out")
        return {
            "on_mismatch": options.get("on_mismatch", "replace"),
            "root_dir": self.own_directory(directory, identity),
            "run_config": identity.run_config,
            "rank": offloading_spec.config.parallel.data_parallel_index,
        }


class RemoteTier(VllmTier):
    """A networked tier, shared by all hosts that serve the same model.

    If the model's content is unknown, blocks are used by this process only and never removed.
    """

    decided: ClassVar[frozenset[str]] = _DECIDED
    fixed_locality: ClassVar[base.Locality | None] = base.Locality.REMOTE

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options that name this identity's blocks."""
        identity = self.identify(offloading_spec)
        if self.identity_options.trust_vllm_directory:
            raise ConfigError("trust_vllm_directory: vLLM has no tier of this kind; leave it out")
        if identity.unknown:
            self._content.warn_of_unknown(self.tier_type, "names of their own")
        return {
            "run_config": of_this_process(identity),
            "rank": identity.rank,
        }


class ObjectTier(RemoteTier):
    """One object per block in S3, Google Cloud Storage or Azure."""

    kind: ClassVar[str] = "object"


class MooncakeTier(RemoteTier):
    """Blocks in a Mooncake Store, accessed through a helper process."""

    kind: ClassVar[str] = "mooncake"


class ValkeyTier(RemoteTier):
    """Blocks in memory of Valkey or Redis servers."""

    kind: ClassVar[str] = "valkey"


def _check_common_name(
    offloading_spec: base.OffloadingSpec, directory: str, identity: Identity
) -> None:
    """Check that vLLM's own tier and this one use the same file names; raises ConfigError."""
    probe = make_offload_key(bytes(range(32)))
    ours = Namespace(directory, identity.run_config, identity.rank).get_file_name(probe)
    theirs = convert.file_mapper_of(offloading_spec, directory).get_file_name(probe)
    if ours != theirs:
        raise ConfigError(
            f"root_dir: {directory!r}: vLLM would keep blocks as {theirs!r} and this package as "
            f"{ours!r}; a model name this long cannot be shared, so serve it under a short path"
        )


def _absolute(root_dir: object) -> str:
    """Return the absolute directory, resolved as vLLM does: relative to the working directory."""
    if not isinstance(root_dir, str) or not root_dir:
        raise ConfigError(f"root_dir: {root_dir!r} is not valid; give the path of a directory")
    return os.path.abspath(root_dir)  # noqa: PTH100 - Path.absolute keeps the dots
