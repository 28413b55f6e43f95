"""The table of vLLM's settings knows every field of every configuration class."""

import dataclasses
import inspect
import pkgutil
from importlib import import_module

import pytest
import vllm.config

from kvoffload_async.integrations.vllm.settings import classified_settings

PATH = vllm.config.__path__
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
