"""Contracts with host software: its tested releases, and the signatures of the classes used.

The adapters derive from a host's classes, and take and create its values. Their signatures are
recorded from the newest tested release. A newer release is admitted, with a warning, if its
signatures still match the recording, and refused otherwise. Private names may go with any release:
what needs them is left out, with a warning, where one of them has.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Signatures = dict[str, dict[str, Any]]
"""Class, as `module:name` -> description of its signatures, as JSON."""


@dataclass(frozen=True, slots=True)
class HostContract:
    """The releases and classes of a host that an integration needs.

    Attributes:
        module: The host's package.
        title: Its name in messages.
        remedy: How to install it, for messages.
        first: The oldest tested release.
        beyond: The first release after the newest tested one.
        derived: Classes that this package derives from, as `module:name`, with the methods that it
            overrides or calls; none: all methods of the class.
        used: Classes whose values it takes or creates, with the members that it needs besides the
            parameters of the constructor.
        recording: File with the recorded signatures.
        private: Classes whose private methods and attributes are used if all of them are there.
    """

    module: str
    title: str
    remedy: str
    first: tuple[int, ...]
    beyond: tuple[int, ...]
    derived: Mapping[str, Sequence[str]]
    used: Mapping[str, Sequence[str]]
    recording: Path
    private: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def supported(self) -> str:
        """The tested releases of the host, as a version specifier."""
        first, beyond = (".".join(map(str, bound)) for bound in (self.first, self.beyond))
        return f">={first},<{beyond}"

    def require(self, what: str) -> None:
        """Check that a suitable release of the host can be imported.

        Args:
            what: The feature that needs it, for the message.

        Raises:
            ImportError: The host is not installed, too old, or too different.
        """
        try:
            host = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name != self.module:
                raise
            host = None
        # The module is asked, because other distributions provide it too. A folder of the same
        # name can be imported, too, but has no version.
        version = getattr(host, "__version__", None)
        if version is None:
            raise ImportError(
                f"{what} needs {self.title} {self.supported}, which is not installed; {self.remedy}"
            )
        self.check(str(version), what)

    def check(self, version: str, what: str, read: Callable[[], Signatures] | None = None) -> None:
        """Check the host's release; if it is newer than the tested ones, compare its signatures.

        Args:
            version: The release.
            what: The feature that needs it, for the message.
            read: Returns its signatures; by default those of the installed release.

        Raises:
            ImportError: It is too old, or a signature differs.
        """
        match = re.match(r"\d+(?:\.\d+)+", version)
        number = tuple(map(int, match[0].split("."))) if match else ()
        if number < self.first:
            raise ImportError(
                f"{what} needs {self.title} {self.supported}, and {version} is installed"
            )
        if number < self.beyond:
            return
        found = self.read() if read is None else read()
        difference = next(self.differences(found), None)
        if difference is not None:
            raise ImportError(
                f"{what} needs {self.title} {self.supported}, and {version} is installed, which "
                f"differs: {difference}. Install a tested release, or a newer kvoffload-async"
            )
        _warn(
            f"{self.title} {version} is newer than the tested releases ({self.supported}); the "
            "signatures that this package depends on have not changed"
        )

    def read(self) -> Signatures:
        """Return the signatures in the host's installed release; {} for a missing class."""
        used = {symbol: ("__init__", *names) for symbol, names in self.used.items()}
        symbols = {**self.derived, **used, **self.private}
        return {symbol: _described(symbol, names) for symbol, names in symbols.items()}

    def recorded(self) -> Signatures:
        """Return the signatures in the recording of a tested release."""
        recording: Signatures = json.loads(self.recording.read_text(encoding="utf-8"))
        return recording

    def differences(self, found: Signatures, *, of_private: bool = False) -> Iterator[str]:
        """Yield the incompatible differences of signatures from the recorded ones.

        What the host calls must not have changed. What this package calls may have further
        parameters with defaults.

        Args:
            found: The signatures.
            of_private: Whether to compare the classes with private names instead of the others.
        """
        for symbol, recorded in self.recorded().items():
            if (symbol in self.private) is of_private:
                yield from self._differences(symbol, recorded, found.get(symbol) or {})

    def has_private_names(self, what: str, found: Signatures | None = None) -> bool:
        """Return whether the installed release has all needed private names; if not, warn once.

        Args:
            what: What is left out without them, for the warning.
            found: The signatures; by default those of the installed release.
        """
        found = self.read() if found is None else found
        difference = next(self.differences(found, of_private=True), None)
        if difference is not None:
            _warn(f"{what} is left out: {difference} in the installed {self.title}")
        return difference is None

    def _differences(
        self, symbol: str, recorded: Mapping[str, Any], now: Mapping[str, Any]
    ) -> Iterator[str]:
        name = symbol.partition(":")[2]
        if not now:
            yield f"{symbol} does not exist"
            return
        for kind in ("members", "attributes"):
            for member in recorded.get(kind, ()):
                if member not in now.get(kind, ()):
                    yield f"{name}.{member} does not exist"
        accepts = _still_accepts if symbol in self.used else str.__eq__
        for method, signature in recorded["methods"].items():
            current = now["methods"].get(method)
            if current is None:
                yield f"{name}.{method} does not exist"
            elif not accepts(signature, current):
                yield f"{name}.{method} takes {current}, not {signature}"
        for method in now["abstract"] if symbol in self.derived else ():
            if method not in recorded["abstract"]:
                yield f"{name}.{method} is a new abstract method"


@cache
def _warn(text: str) -> None:
    """Log a warning once."""
    logger.warning("%s", text)


def describe(cls: type, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the description of a class: methods with parameters, abstract methods, members.

    Args:
        cls: The class.
        names: Restricts methods and members to these names; empty: all public ones. Only named
            attributes are described.
    """
    if issubclass(cls, enum.Enum):
        members = [name for name in cls.__members__ if name in names]
        return {"members": members, "methods": {}, "abstract": []}
    methods = {
        name: text
        for name, member in inspect.getmembers_static(cls)
        if (name in names if names else name == "__init__" or not name.startswith("_"))
        and (text := _parameters(member)) is not None
    }
    if hasattr(cls, "_fields") and (not names or "__init__" in names):  # a named tuple
        methods["__init__"] = _parameters(cls.__new__) or "()"
    description: dict[str, Any] = {
        "methods": methods,
        "abstract": sorted(getattr(cls, "__abstractmethods__", ())),
    }
    if attributes := sorted(_attributes(cls).intersection(names) - methods.keys()):
        description["attributes"] = attributes
    return description


def _attributes(cls: type) -> set[str]:
    """Return the names of a class's fields, and the names that its constructor mentions."""
    constructor = getattr(getattr(cls, "__init__", None), "__code__", None)
    mentioned = () if constructor is None else constructor.co_names
    return {*getattr(cls, "__dataclass_fields__", ()), *getattr(cls, "_fields", ()), *mentioned}


def _described(symbol: str, names: Sequence[str]) -> dict[str, Any]:
    module, _, name = symbol.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return {}
    return describe(cls, names)


def _parameters(member: object) -> str | None:
    """Return the parameters of a function as text, without types and with `...` for defaults."""
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if not inspect.isfunction(member):
        return None
    signature = inspect.signature(member)
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else ...)
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=empty))
    return text.replace("=Ellipsis", "=...")


def _still_accepts(recorded: str, current: str) -> bool:
    """Return whether calls that fit the recorded signature also fit the current one."""
    old, new = (_split(text) for text in (recorded, current))
    added = [name for name in new if name not in old]
    return [name for name in new if name in old] == old and all(
        name.startswith("*") or name.endswith("=...") for name in added
    )


def _split(signature: str) -> list[str]:
    return [name for name in signature.strip("()").split(", ") if name]


def record(contract: HostContract) -> None:
    """Write the signatures of the installed release to the recording.

    Raises:
        ImportError: A class does not exist.
    """
    found = contract.read()
    missing = [symbol for symbol, description in found.items() if not description]
    if missing:
        raise ImportError(f"{contract.title}: there is no {', '.join(missing)}")
    text = json.dumps(found, indent=1, sort_keys=True)
    contract.recording.write_text(text + "\n", encoding="utf-8")
