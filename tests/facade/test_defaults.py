"""Defaults that are written down more than once, and values that have more than one form."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from kvoffload_async import ConfigError, OffloadConfig
from kvoffload_async.config import parse_directory
from kvoffload_async.facade.tiering import TieringOffloadingManager

CONFIG = {field.name: field.default for field in dataclasses.fields(OffloadConfig)}
MANAGER = inspect.signature(TieringOffloadingManager).parameters


@pytest.mark.parametrize("name", sorted(set(CONFIG) & set(MANAGER) - {"secondary_tiers"}))
def test_the_manager_has_the_defaults_of_the_configuration(name):
    assert CONFIG[name] in (MANAGER[name].default, None)  # None: it is decided later


def test_a_directory_is_given_as_text_or_as_a_path():
    assert parse_directory("/kv/../kv", "root_dir") == "/kv"
    assert parse_directory(Path("/kv"), "root_dir") == "/kv"


@pytest.mark.parametrize("root_dir", [7, b"/kv", None, "", "/k\0v", "/\ud800"])
def test_what_is_no_directory_is_refused(root_dir):
    with pytest.raises(ConfigError, match="must be an absolute path"):
        parse_directory(root_dir, "root_dir")
