"""YAML that somebody wrote by hand: what JSON can say, and as strictly."""

from __future__ import annotations

import importlib
from typing import Any

from kvoffload_async.cli.json_input import JsonInputError, check_value


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
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_node(node, yaml, set())
        value = yaml.safe_load(text)
    except RecursionError as error:
        raise JsonInputError("mappings and lists are nested too deep; flatten them") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, JsonInputError):
            raise
        raise JsonInputError(f"not YAML: {' '.join(str(error).split())}") from error
    check_value(value)
    return value


def _check_node(node: Any, yaml: Any, seen: set[int]) -> None:  # noqa: ANN401 - PyYAML's own
    """Refuse what a few lines can blow up (aliases), and keys that hide one another."""
    if node is None:
        return
    if id(node) in seen:
        raise JsonInputError("an alias (*name) is not allowed; write the value again")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _check_node(one, yaml, seen)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, one in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise JsonInputError(f"the key {key.value!r} is no text; quote it")
            if key.value in keys:
                raise JsonInputError(f"the key {key.value!r} is given twice; keep one of them")
            keys.add(key.value)
            _check_node(one, yaml, seen)
