"""The table of vLLM's settings knows every field of every configuration class."""

import dataclasses
import inspect
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest
import vllm.config

from kvoffload_async.integrations.vllm.settings import classified_settings

PATH = vllm.config.__path__
DOCUMENT = Path(__file__).parents[2] / "docs" / "kv-identity.md"
NOT_SETTINGS = {
    # Shapes of inputs for profiling, derived descriptions, and what a model says of itself.
    *("AudioDummyOptions", "BaseDummyOptions", "ImageDummyOptions", "VideoDummyOptions"),
    *("ModelArchitectureConfig", "SpeechToTextConfig", "SpeechToTextParams", "Range"),
}


def configuration_classes():
    modules = [import_module(f"vllm.config.{one.name}") for one in pkgutil.iter_modules(PATH)]
    return {
        name: member
        for module in modules
        for name, member in vars(module).items()
        if inspect.isclass(member)
        and member.__module__ == module.__name__
        and dataclasses.is_dataclass(member)
        and name not in NOT_SETTINGS
    }


CLASSES = configuration_classes()


def test_the_classes_are_found():
    assert {"VllmConfig", "ModelConfig", "CacheConfig", "ParallelConfig"} <= CLASSES.keys()
    assert len(CLASSES) > 30


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_field_is_in_the_table(name):
    known = classified_settings().get(name, {})
    unknown = {one.name for one in dataclasses.fields(CLASSES[name])} - known.keys()
    assert not unknown, "say in settings.toml what holds them"


def test_every_field_that_matters_is_in_the_documentation_with_what_holds_it():
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and "." in cells[0]:
            rows[cells[0].strip("`")] = (cells[1], cells[2])
    expected = {
        f"{name}.{field}": held
        for name, fields in classified_settings().items()
        for field, held in fields.items()
        if held[0] != "neutral"
    }
    assert rows == expected
