"""YAML that somebody wrote by hand: what JSON can say, and as strictly."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from kvoffload_async.cli.json_input import JsonInputError, check_depth, check_value


def parse_yaml(text: str) -> Any:  # noqa: ANN401 - what JSON can be
    """Return the value of a YAML text, of the types that JSON has.

    Raises:
        JsonInputError: It is no YAML, it has an alias or a tag, a mapping has a key twice or one
            that is no text, a value is none that JSON has, it is nested too deeply, or PyYAML is
            not installed.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise JsonInputError(
            f"YAML needs PyYAML ({error}); pip install 'kvoffload-async[yaml]', or write JSON"
        ) from error
    try:
        check_depth(_steps(text, yaml))
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), yaml)
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, JsonInputError):
            raise
        raise JsonInputError(f"not YAML: {' '.join(str(error).split())}") from error
    check_value(value)
    return value


def _steps(text: str, yaml: Any) -> Iterator[int]:  # noqa: ANN401 - PyYAML's own
    """Yield 1 where a mapping or list begins and -1 where it ends; refuse an alias.

    PyYAML's parser keeps a list of its states, and its composer calls itself.
    """
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):  # a few lines of them can blow up
            raise JsonInputError("an alias (*name) is not allowed; write the value again")
        if isinstance(event, yaml.CollectionStartEvent):
            yield 1
        elif isinstance(event, yaml.CollectionEndEvent):
            yield -1


def _check_keys(node: Any, yaml: Any) -> None:  # noqa: ANN401 - PyYAML's own
    """Refuse keys that hide one another, and those that are no text."""
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _check_keys(one, yaml)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, one in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise JsonInputError(f"the key {key.value!r} is no text; quote it")
            if key.value in keys:
                raise JsonInputError(f"the key {key.value!r} is given twice; keep one of them")
            keys.add(key.value)
            _check_keys(one, yaml)
