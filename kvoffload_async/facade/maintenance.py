"""Discovery of stores in a directory, for all kinds of tiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory


async def find_stores(directory: str | Path) -> list[StoreMaintenance]:
    """Return the stores in a directory or below a URL, sorted by kind and name.

    The directory may also be a store itself.

    Raises:
        InputError: The directory cannot be read or contains no store.
    """
    if not str(directory):
        raise InputError("the directory or URL is empty; give . for the current folder")
    # Imported on demand, because it is slow. The loop's default executor belongs to the caller.
    import anyio.to_thread  # noqa: PLC0415

    kinds, unusable = await anyio.to_thread.run_sync(_kinds, limiter=anyio.CapacityLimiter(1))
    is_url = "://" in str(directory)
    kinds = [kind for kind in kinds if kind.takes_urls is is_url]
    root = str(directory) if is_url else _absolute(directory)
    found = [store for kind in kinds for store in await kind.find(root)]
    certain = {store.folder for store in found if not store.has_generic_name}
    stores = [s for s in found if not s.has_generic_name or s.folder not in certain]
    if stores:
        return stores
    wanted = " and ".join(f"no {kind.tier_type} store ({kind.appearance})" for kind in kinds)
    unknown = "".join(f"; {name} cannot be asked: {why}" for name, why in unusable.items())
    raise InputError(
        f"{root}: {wanted} in it; give the tier's {'url' if is_url else 'root_dir'}{unknown}"
    )


def _absolute(directory: str | Path) -> str:
    return str(Path(directory).absolute())


def maintenance_kinds() -> list[type[StoreMaintenance]]:
    """Return the maintenance class of each kind of store. Imports all registered tiers."""
    return _kinds()[0]


def _kinds() -> tuple[list[type[StoreMaintenance]], Mapping[str, str]]:
    """Return the maintenance classes, and the import error of each unusable tier by name."""
    kinds: list[type[StoreMaintenance]] = []
    unusable: dict[str, str] = {}
    for name in SecondaryTierFactory.names():
        try:
            kind = SecondaryTierFactory.get_tier_class(name).maintenance()
        except (ImportError, AttributeError, ConfigError) as error:
            unusable[name] = str(error)
            continue
        if kind is not None and kind not in kinds:
            kinds.append(kind)
    return kinds, unusable
