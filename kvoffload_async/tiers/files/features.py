"""What a store needs of a release: a version of the format, and features as ext4 has them.

A release reads every version up to its newest one. A feature changes the format of single stores
within a version; what a release that does not know it may do is the feature's own business. So
both are looked at before anything else of a store is believed, its checksum included. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

VERSION_FIELD = "version"
FEATURES_FIELD = "features"


class NewerFormatError(Exception):
    """A store of a newer release; the message says what a release must know."""


class MalformedFormatError(ValueError):
    """What should be a version or features is neither."""


@dataclass(frozen=True, slots=True)
class Features:
    """Names of features, by what a release may do with a store that has one it does not know.

    Attributes:
        compatible: Everything.
        read_only_compatible: Read it, and write nothing.
        incompatible: Nothing.
    """

    compatible: frozenset[str] = frozenset()
    read_only_compatible: frozenset[str] = frozenset()
    incompatible: frozenset[str] = frozenset()

    def __or__(self, other: Features) -> Features:
        return Features(
            self.compatible | other.compatible,
            self.read_only_compatible | other.read_only_compatible,
            self.incompatible | other.incompatible,
        )

    def encode(self) -> dict[str, list[str]]:
        """Return them as JSON has them."""
        return {each.name: sorted(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def decode(cls, value: object) -> Self:
        """Return the features that JSON has; raises MalformedFormatError."""
        if not isinstance(value, Mapping) or value.keys() - {each.name for each in fields(cls)}:
            raise MalformedFormatError("its features are no object of three lists")
        for names in value.values():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise MalformedFormatError("its features are no lists of names")
        return cls(**{kind: frozenset(names) for kind, names in value.items()})


def check_format(
    body: Mapping[str, Any], newest: int, known: Features, *, for_writing: bool
) -> tuple[int, Features]:
    """Return the version and features that a store has.

    Args:
        body: What it says of itself, from JSON, not verified yet.
        newest: The newest version that this release knows.
        known: The features that it knows.
        for_writing: Whether the store may be changed, and not only be read.

    Raises:
        NewerFormatError: It is not for this release, at least not for this purpose.
        MalformedFormatError: It has no version, or its features are no names.
    """
    version = body.get(VERSION_FIELD)
    if type(version) is not int or version < 1:
        raise MalformedFormatError("it has no version")
    if version > newest:
        raise NewerFormatError(
            f"it needs a release that knows format {version}; this one knows those up to {newest}"
        )
    features = Features.decode(body.get(FEATURES_FIELD, {}))
    if unknown := features.incompatible - known.incompatible:
        raise NewerFormatError(f"it needs a release that knows {_named(unknown)}")
    if for_writing and (unknown := features.read_only_compatible - known.read_only_compatible):
        raise NewerFormatError(
            f"it needs a release that knows {_named(unknown)}; this one may only read it"
        )
    return version, features


def _named(names: frozenset[str]) -> str:
    listed = ", ".join(map(repr, sorted(names)))
    return f"feature {listed}" if len(names) == 1 else f"features {listed}"
