"""Versions and feature flags of store formats, in the manner of ext4.

A release reads all versions up to its newest. A feature changes the format of individual stores
within a version, and defines what releases without it may do. So version and features are checked
before anything else in a store is trusted, including its checksum. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

VERSION_FIELD = "version"
FEATURES_FIELD = "features"


class NewerFormatError(Exception):
    """A store needs a newer release; the message names the missing version or features."""


class MalformedFormatError(ValueError):
    """The version or the features of a store are malformed."""


@dataclass(frozen=True, slots=True)
class Features:
    """Feature names, grouped by what a release without the feature may do.

    Attributes:
        compatible: Read and write the store.
        read_only_compatible: Only read the store.
        incompatible: Neither.
    """

    compatible: frozenset[str] = frozenset()
    read_only_compatible: frozenset[str] = frozenset()
    incompatible: frozenset[str] = frozenset()

    def encode(self) -> dict[str, list[str]]:
        """Encode the features as a JSON object."""
        return {each.name: sorted(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def decode(cls, value: object) -> Self:
        """Decode features from a JSON value.

        Raises:
            MalformedFormatError: The value is malformed.
        """
        if not isinstance(value, Mapping) or value.keys() - {each.name for each in fields(cls)}:
            raise MalformedFormatError("its features are not an object of three lists")
        for names in value.values():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise MalformedFormatError("its features are not lists of names")
        return cls(**{kind: frozenset(names) for kind, names in value.items()})


def check_format(
    body: Mapping[str, Any], newest: int, known: Features, *, for_writing: bool
) -> Features:
    """Check that this release supports a store's version and features; return the features.

    Args:
        body: The store's manifest, from JSON, not yet verified.
        newest: The newest version that this release supports.
        known: The features that this release supports.
        for_writing: Whether the store will be changed, not only read.

    Raises:
        NewerFormatError: This release does not support the store, or not for writing.
        MalformedFormatError: The version is missing, or the features are malformed.
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
    return features


def _named(names: frozenset[str]) -> str:
    listed = ", ".join(map(repr, sorted(names)))
    return f"feature {listed}" if len(names) == 1 else f"features {listed}"
