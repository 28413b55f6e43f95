"""The identity of a stored block beyond its key: everything that must be equal for it to be served.

It is what vLLM's own `fs` tier names its directories by, with the real parallel sizes, the layout
of a row, and the content of the model. A tier's JSON may have three keys about it:

* `namespace`: any text; blocks of different namespaces are kept apart;
* `fingerprint`: stands for the content of the model where it cannot be known, or need not be looked
  at: a text that the user changes whenever weights or adapters do;
* `trust_vllm_directory`: the user's word that what lies where vLLM's own tier keeps its blocks is
  of this very model; then the two share a directory, and only vLLM's name keeps models apart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, cast

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvoffload_async.config import parse_bool, parse_name
from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import settings
from kvoffload_async.integrations.vllm.model_fingerprint import Fingerprint, fingerprint_model
from kvoffload_async.integrations.vllm.surroundings import Surroundings

logger = logging.getLogger(__name__)

IDENTITY_OPTIONS: Final = frozenset({"fingerprint", "namespace", "trust_vllm_directory"})
"""The keys of a tier's JSON that this module takes."""

_MAX_TEXT: Final = 200
_VLLM_LAYOUT: Final = "LBHNC"
"""The order that vLLM's offloading connector asks for: layer, block, head, token, content."""


@dataclass(frozen=True, slots=True)
class IdentityOptions:
    """What a tier's JSON says of identity; see the module for the keys."""

    namespace: str | None = None
    fingerprint: str | None = None
    trust_vllm_directory: bool = False

    @classmethod
    def take_from(cls, options: dict[str, Any]) -> IdentityOptions:
        """Take the keys out of a tier's options, checked; raises ConfigError."""
        namespace = options.pop("namespace", None)
        fingerprint = options.pop("fingerprint", None)
        trust = parse_bool(options.pop("trust_vllm_directory", False), "trust_vllm_directory")
        given = {"namespace": namespace, "fingerprint": fingerprint}
        for key, value in given.items():
            if value is None:
                continue
            if len(parse_name(value, key)) > _MAX_TEXT:
                raise ConfigError(f"{key}: {value!r} is longer than {_MAX_TEXT} characters")
            if trust:
                raise ConfigError(
                    f"{key}: {value!r} does not go with trust_vllm_directory, as vLLM's own tier "
                    "has no such name for its directories; leave one of them out"
                )
        return cls(namespace, fingerprint, trust)


@dataclass(frozen=True, slots=True)
class Identity:
    """The name of everything that must be equal for a block to be served.

    Attributes:
        run_config: The fields of that name, JSON; a tier's directory is called by their digest.
        rank: Whose rows they are: one scheduler has all its ranks' cells in one row.
        unknown: Why the model's content is not known, so that blocks are for this process alone;
            empty if it is.
    """

    run_config: dict[str, Any]
    rank: int
    unknown: str = ""


class ModelContent:
    """The fingerprint of the model that a connector serves, computed once, if it is needed."""

    def __init__(self, surroundings: Surroundings | None) -> None:
        self._surroundings = surroundings
        self._found: Fingerprint | None = None
        self._is_warned_of = False

    @classmethod
    def of(cls, offloading_spec: base.OffloadingSpec, surroundings: Surroundings | None) -> Self:
        """Return the one that all tiers of a spec share."""
        known = vars(offloading_spec).setdefault("_kvoffload_model_content", cls(surroundings))
        return cast("Self", known)

    def reason_to_change(self) -> str:
        """Return why the content may change while the server runs; empty if it stays."""
        config = None if self._surroundings is None else self._surroundings.vllm_config
        return next(settings.refused(config), "") if config is not None else ""

    def check_stays(self) -> None:
        """Check that the content stays what it is; raises ConfigError."""
        if reason := self.reason_to_change():
            raise ConfigError(
                f"type: a tier that is not emptied with them would serve KV of other weights, as "
                f"{reason}; leave the tier out, or give it a fingerprint if they never change"
            )

    def warn_of_unknown(self, tier_type: str, folder: str) -> None:
        """Say that blocks do not outlive the process, once, and what would change that."""
        if not self._is_warned_of:
            self._is_warned_of = True
            logger.warning(
                "the content of the model cannot be known (%s), so blocks in tiers are for this "
                'process alone; give each tier a "fingerprint" that you change whenever weights or '
                "adapters do, and they are kept and shared",
                self.fingerprint().unknown,
            )
        logger.info("%s: blocks of this process alone are kept in %s", tier_type, folder)

    def fingerprint(self) -> Fingerprint:
        """Return it; the first call may wait for a disk."""
        if self._found is None:
            if self._surroundings is None:
                self._found = Fingerprint(unknown="vLLM's configuration is not in reach")
            else:
                self._found = fingerprint_model(self._surroundings.vllm_config)
        return self._found


def identify(
    offloading_spec: base.OffloadingSpec,
    options: IdentityOptions,
    layout: str,
    content: ModelContent,
    *,
    must_stay: bool = True,
) -> Identity:
    """Return what a tier's blocks are called by.

    Args:
        offloading_spec: vLLM's spec.
        options: What the tier's JSON says.
        layout: The digest of a row's layout; see `row_layout`.
        content: The model's.
        must_stay: Whether weights that may change while the server runs are an error, and not only
            unknown.

    Raises:
        ConfigError: `trust_vllm_directory`, where vLLM's name does not tell layouts apart, or the
            weights change while the server runs.
    """
    mapper = _mapper(offloading_spec, parallel_agnostic=True)
    if options.trust_vllm_directory:
        _check_trust(offloading_spec, mapper)
        return Identity(mapper.get_run_config(), mapper.rank)
    config = offloading_spec.config
    if config.parallel.world_size > 1:
        mapper = _mapper(offloading_spec, parallel_agnostic=False)
    run_config = mapper.get_run_config() | {"row_layout": layout}
    if config.replicated_layout:
        run_config["replicated_layout"] = True
    if options.namespace is not None:
        run_config["namespace"] = options.namespace
    if options.fingerprint is not None:
        return Identity(run_config | {"given_fingerprint": options.fingerprint}, mapper.rank)
    if not must_stay and (reason := content.reason_to_change()):
        return Identity(run_config, mapper.rank, reason)
    content.check_stays()
    found = content.fingerprint()
    return Identity(run_config | {"fingerprint": found.digest}, mapper.rank, found.unknown)


# -- inside -------------------------------------------------------------------------------------


def _mapper(offloading_spec: base.OffloadingSpec, *, parallel_agnostic: bool) -> FileMapper:
    return FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=offloading_spec,
        blocks_per_file=offloading_spec.blocks_per_chunk,
        parallel_agnostic=parallel_agnostic,
    )


def _check_trust(offloading_spec: base.OffloadingSpec, mapper: FileMapper) -> None:
    """Check that vLLM's name says in which order a row holds its numbers."""
    parallel = offloading_spec.config.parallel
    kv_layout = offloading_spec.config.kv_cache_layout
    if kv_layout not in {None, _VLLM_LAYOUT}:
        raise ConfigError(
            f"trust_vllm_directory: the KV cache has the layout {kv_layout} here, and the name of "
            f"a directory of vLLM's own tier does not tell that from {_VLLM_LAYOUT}; leave it out"
        )
    named: Mapping[str, Any] = mapper.get_run_config()
    for size in ("tp_size", "pp_size", "pcp_size", "dcp_size"):
        if named[size] != getattr(parallel, size):
            raise ConfigError(
                f"trust_vllm_directory: with {size}={getattr(parallel, size)} vLLM's own tier "
                "keeps blocks of several layouts under one name, and some would be served "
                "wrongly; leave it out"
            )
