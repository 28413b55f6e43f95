"""This package's tiers as contenders."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, Final

from kvoffload_async.bench.contender import UnfitError
from kvoffload_async.bench.places import Place
from kvoffload_async.config import OffloadConfig, parse_size_bytes
from kvoffload_async.errors import InputError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_factory import (
    SecondaryTierFactory,
    accepted_options,
    constructor_parameters,
)
from kvoffload_async.registry import load_class
from kvoffload_async.types import (
    BlockIds,
    JobMetadata,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)

_DIRECTORY: Final = "root_dir"
_CAPACITY: Final = "capacity_bytes"
_SPARE_BYTES: Final = 16 << 20
"""Beside the blocks: indexes, journals, and what a rehearsal needs of a tier's least size."""
_MODEL: Final = "bench"
_SPEC: Final = SimpleNamespace(config=OffloadConfig(model=_MODEL))
"""In the place of a spec: names the model of blocks that are made up."""


class OpenOwnTier:
    """A `SecondaryTierManager` on threads of its own; see `OpenTier`."""

    def __init__(self, manager: SecondaryTierManager) -> None:
        self.manager = manager
        self.request = ReqContext("bench")
        self.step = ScheduleEndContext()

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> JobMetadata:
        """Return a job."""
        return JobMetadata(job_id, tuple(keys), rows, is_load, self.request)

    def close(self) -> None:
        """Close it.

        Raises:
            UnfitError: It could not be closed cleanly.
        """
        report = self.manager.shutdown()
        if not report.is_clean:
            raise UnfitError(f"{self.manager.tier_type}: did not close: {report}")


class OwnTier:
    """A tier that `SecondaryTierFactory` makes; see `Contender`.

    A tier that needs a capacity and is given none gets one that a round does not exhaust.
    """

    def __init__(self, tier_config: Mapping[str, Any]) -> None:
        """Check a tier's configuration, `type` included; nothing is opened.

        Raises:
            InputError: It cannot be imported, or its directory is no path.
            ConfigError: The tier, an option or a value is unknown.
        """
        config = dict(tier_config)
        self.name: str = config["type"]
        self.options: Mapping[str, Any] = {k: v for k, v in config.items() if k != "type"}
        cls = _class_of(config)
        accepted = accepted_options(cls)
        self._sizes_itself = (
            _CAPACITY in accepted
            and _CAPACITY not in config
            and constructor_parameters(cls)[_CAPACITY].default is Parameter.empty
        )
        self.place = None
        if _DIRECTORY in accepted:
            directory = config.pop(_DIRECTORY, None)
            if directory is not None and not isinstance(directory, str):
                raise InputError(f"--tier: {_DIRECTORY}: {directory!r} is not valid; give a path")
            self.place = Place(directory, f"--tier {self.name}: {_DIRECTORY}")
        self._config = config
        self.check(1, ())

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenOwnTier:
        """Open it; raises what its constructor raises."""
        config = self._configured(directory, stored_bytes)
        return OpenOwnTier(SecondaryTierFactory.create_secondary_tier(config, view, _SPEC))

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return its capacity, given or made up."""
        given = self._configured(None, stored_bytes).get(_CAPACITY)
        return None if given is None else parse_size_bytes(given, _CAPACITY)

    def check(self, stored_bytes: int, block_sizes: Collection[int]) -> None:
        """Check its configuration for blocks of so many bytes; raises ConfigError."""
        directory = None if self.place is None else str(self.place.path)
        config = self._configured(directory, stored_bytes)
        for block_bytes in block_sizes or (None,):
            geometry = _SPEC.config if block_bytes is None else _geometry(block_bytes)
            SecondaryTierFactory.check_config(config, geometry)

    def check_capacity(self, stored_bytes: int) -> None:
        """Refuse a capacity that a round would exhaust: it would measure evictions and misses.

        Raises:
            InputError: The user has given such a one.
            ConfigError: It is no size.
        """
        given = self._config.get(_CAPACITY)
        if given is not None and parse_size_bytes(given, _CAPACITY) < stored_bytes:
            raise InputError(
                f"--tier {self.name}: {_CAPACITY}: {given!r} is less than the {stored_bytes} bytes "
                "that a round stores; give more, or use fewer --total-bytes or a smaller --one-job"
            )

    def _configured(self, directory: str | None, stored_bytes: int) -> dict[str, Any]:
        config = dict(self._config)
        if self.place is not None:
            config[_DIRECTORY] = directory
        if self._sizes_itself:
            config[_CAPACITY] = stored_bytes + stored_bytes // 4 + _SPARE_BYTES
        return config


def _geometry(block_bytes: int) -> OffloadConfig:
    return OffloadConfig(model=_MODEL, block_bytes=block_bytes)


def _class_of(config: Mapping[str, Any]) -> type:
    module_path = config.get("module_path")
    try:
        if isinstance(module_path, str):
            return load_class(module_path, config["type"], "module_path")
        return SecondaryTierFactory.get_tier_class(config["type"])
    except (ImportError, AttributeError) as error:
        raise InputError(f"--tier {config['type']}: cannot be imported: {error}") from error
