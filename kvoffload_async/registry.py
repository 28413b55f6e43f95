"""Registries that map names to lazily imported classes, and the registry of cache policies."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.config import nearest
from kvoffload_async.errors import ConfigError, UnknownNameError


class Registry:
    """Lazily imported classes of one kind, by their configuration name.

    Third parties can add names through an entry point, without a registration call.
    """

    def __init__(self, kind: str, entry_point_group: str) -> None:
        self.kind = kind
        self._group = entry_point_group
        self._loaders: dict[str, Callable[[], type]] = {}

    def register(self, name: str, import_path: str, class_name: str) -> None:
        """Register a class by name without importing it.

        Raises:
            ConfigError: The name is already registered.
        """
        if name in self._loaders:
            raise ConfigError(f"{self.kind} {name!r} is already registered")
        self._loaders[name] = lambda: load_class(import_path, class_name)

    def __contains__(self, name: str) -> bool:
        return name in self._loaders or name in self._entry_points()

    def names(self) -> list[str]:
        """Return all names, including those of entry points."""
        return sorted({*self._loaders, *self._entry_points()})

    def load(self, name: str) -> type:
        """Import the class behind a name.

        Raises:
            UnknownNameError: The name is unknown; the message lists the known names.
            ImportError: The module cannot be imported.
            AttributeError: The module has no such class.
            ConfigError: Importing the module raised another error, or the object is no class.
        """
        loader = self._loaders.get(name)
        if loader is not None:
            return loader()
        point = self._entry_points().get(name)
        if point is None:
            names = self.names()
            raise UnknownNameError(
                f"Unknown {self.kind} type: {name!r}{nearest(name, names)}. "
                f"Supported types: {names}"
            )
        with _failing_import(f"{self.kind} {name!r}: {point.value!r}"):
            loaded = point.load()
        return _as_class(loaded, point.value)

    def _entry_points(self) -> dict[str, Any]:
        return {point.name: point for point in entry_points(group=self._group)}


def load_class(import_path: str, class_name: str, key: str = "import_path") -> type:
    """Import a class; `key` is the name of the option that gave the module, for messages.

    Raises:
        ImportError: The module is not found, or one of its own imports fails.
        AttributeError: The module has no such class.
        ConfigError: `import_path` is not a full module name, importing the module raised another
            error, or the object is not a class.
    """
    if not all(import_path.split(".")):
        raise ConfigError(
            f"{key}: {import_path!r} is not valid; it must be the full name of a module, such as "
            "'package.module'"
        )
    with _failing_import(f"{key}: {import_path!r}"):
        loaded = getattr(importlib.import_module(import_path), class_name)
    return _as_class(loaded, f"{import_path}.{class_name}")


@contextmanager
def _failing_import(what: str) -> Iterator[None]:
    """Convert errors raised during an import to ConfigError; import errors pass unchanged."""
    try:
        yield
    except (ImportError, AttributeError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what} cannot be imported, as it raises {type(error).__name__} ({error}); "
            "correct that module, or name another"
        ) from error


def _as_class(loaded: object, where: str) -> type:
    if isinstance(loaded, type):
        return loaded
    raise ConfigError(f"{where} is no class")


POLICIES = Registry("eviction_policy", "kvoffload_async.policies")
POLICIES.register("lru", "kvoffload_async.policies.lru", "LruPolicy")
POLICIES.register("arc", "kvoffload_async.policies.arc", "ArcPolicy")
POLICIES.register("hd", "kvoffload_async.policies.hd", "HdPolicy")


def check_policy(name: str) -> type[CachePolicy]:
    """Return the class of a cache policy by name.

    Raises:
        UnknownNameError: The policy is unknown; the message lists the known ones.
    """
    if name not in POLICIES:
        names = POLICIES.names()
        raise UnknownNameError(
            f"eviction_policy: {name!r} is unknown{nearest(name, names)}; allowed: {names}"
        )
    loaded = POLICIES.load(name)
    if not issubclass(loaded, CachePolicy):
        raise ConfigError(f"eviction_policy: {name!r} is no subclass of CachePolicy")
    return loaded


def check_tier_policy(name: str) -> None:
    """Raise ConfigError unless a secondary tier can have a cache policy; see `check_policy`."""
    if check_policy(name).follows_requests:
        raise ConfigError(
            f"eviction_policy: {name!r} ranks the blocks of requests, which a tier does not see; "
            'give a tier "lru" or "arc"'
        )


def create_policy(name: str, capacity_blocks: int) -> CachePolicy:
    """Return a new cache policy by name; raises the errors of `check_policy`."""
    return check_policy(name)(capacity_blocks)
