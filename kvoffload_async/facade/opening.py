"""What an error says that comes while a tier is checked or opened: which tier of several it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvoffload_async.errors import (
    ConfigError,
    OffloadError,
    TierTimeoutError,
    TierUnavailableError,
    text_of,
)


@contextmanager
def naming_tier(index: int, tier_config: Mapping[str, Any]) -> Iterator[None]:
    """Begin the message of what is raised with the tier's place in the configuration.

    Raises:
        ConfigError: Its own kind of it, or the tier's module cannot be imported.
        TierUnavailableError: As it was raised, or the tier has raised what it must not.
        TierTimeoutError: It did not open in time.
    """
    prefix = f"secondary_tiers[{index}]: "
    try:
        yield
    except TimeoutError as error:
        text = str(error) or "did not open in time; give it more as open_timeout_s"
        raise TierTimeoutError(prefix + text) from error
    except OffloadError as error:
        raise _like(error, prefix + text_of(error)) from error
    except (ImportError, AttributeError) as error:
        key = "module_path" if "module_path" in tier_config else "type"
        raise ConfigError(
            f"{prefix}{key}: {tier_config.get(key)!r} cannot be used ({error}); module_path must "
            "name a module that can be imported, and type a class in it"
        ) from error
    except Exception as error:
        raise TierUnavailableError(prefix + text_of(error)) from error


def _like(error: OffloadError, text: str) -> OffloadError:
    """Return an error of the same class, or of the nearest that takes a text."""
    for cls in type(error).__mro__:
        try:
            made = cls(text)
        except TypeError:  # somebody else's class, with arguments of its own
            continue
        if isinstance(made, OffloadError):
            return made
    return OffloadError(text)  # pragma: no cover - it is in every order of resolution
