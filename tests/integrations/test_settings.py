"""Which of vLLM's settings are written into the fingerprint, and how; without vLLM."""

import enum
import hashlib
import json
import statistics
from collections import OrderedDict
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path, PurePosixPath

import pytest
import torch

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import settings

HELD_BY = {
    "block hash",
    "fingerprint",
    "identity",
    "layout",
    "neutral",
    "process",
    "refused",
    "resolved",
}


class Color(enum.Enum):
    RED = 1


class Named(enum.StrEnum):
    ONE = "one"


class HfConfig:
    def __init__(self, **entries):
        self._entries = entries

    def to_dict(self):
        return self._entries


class Hashing:
    def compute_hash(self):
        return "abc"


@dataclass
class Unheard:
    """A class that the table does not know."""

    value: object = None


@dataclass
class LoadConfig:
    """With fields of vLLM's, and one that the table does not know."""

    load_format: str = "auto"
    use_tqdm_on_load: bool = True
    brand_new: int = 0


@dataclass
class VllmConfig:
    load_config: LoadConfig = field(default_factory=LoadConfig)
    lora_config: object = None
    weight_transfer_config: object = None
    instance_id: str = "x"


def function():
    """Something that has a name."""


def test_every_row_says_what_holds_the_field_and_why():
    for fields in settings.classified_settings().values():
        for where, why in fields.values():
            assert where in HELD_BY
            assert bool(why) == (where != "neutral")


@pytest.mark.parametrize("changed", [{"load_format": "pt"}, {"brand_new": 1}])
def test_fields_that_matter_and_unknown_ones_are_written(changed):
    before = settings.folded(VllmConfig())
    assert settings.folded(VllmConfig(LoadConfig(**changed))) != before


def test_neutral_fields_are_not_written():
    before = settings.folded(VllmConfig())
    assert (
        settings.folded(VllmConfig(LoadConfig(use_tqdm_on_load=False), instance_id="y")) == before
    )


def test_what_cannot_be_known_is_named():
    assert list(settings.unknowable(VllmConfig())) == []
    (reason,) = settings.unknowable(VllmConfig(lora_config=object()))
    assert reason.startswith("VllmConfig.lora_config is set: adapters")


def test_what_may_change_while_the_server_runs_is_named():
    assert list(settings.refused(VllmConfig())) == []
    (reason,) = settings.refused(VllmConfig(weight_transfer_config=object()))
    assert (
        reason
        == "VllmConfig.weight_transfer_config is set: the weights change while the server runs"
    )


def written(value):
    return settings.folded(Unheard(value))["value"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        ("text", "text"),
        (Color.RED, "RED"),
        (Named.ONE, "ONE"),
        (torch.bfloat16, "torch.bfloat16"),
        (Path("/a"), "/a"),
        (b"\x01", "01"),
        (Fraction(1, 3), "1/3"),
        ({"b": 1, "a": (1, 2)}, {"a": [1, 2], "b": 1}),
        ({3, 1, 2}, [1, 2, 3]),
        (function, f"{__name__}.function"),
        (Hashing.compute_hash, f"{__name__}.Hashing.compute_hash"),
        (OrderedDict, "collections.OrderedDict"),
        (Unheard(1), {"value": 1}),
        (Hashing(), "abc"),
        (
            HfConfig(rope_theta=1.0, _name_or_path="/here", transformers_version="5"),
            {"rope_theta": 1.0},
        ),
    ],
)
def test_values_are_written_as_json(value, expected):
    assert written(value) == expected


def test_a_configuration_has_the_identity_that_it_has_always_had():
    """On every version of Python: otherwise the blocks of a store would be found by one alone."""
    known = {
        "class": OrderedDict,
        "function": statistics.mean,
        "path": PurePosixPath("/models/m"),
        "kind": torch.bfloat16,
        "member": Named.ONE,
        "parts": [Fraction(1, 3), b"\x01", {"b", "a"}],
        "nested": LoadConfig(brand_new=7),
    }
    text = json.dumps(settings.folded(Unheard(known)), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "7092b1357116968232fcaeceb947564d4002b5f39f301d315c282639e86e8dd6"


def test_a_value_that_cannot_be_written_is_named():
    with pytest.raises(ConfigError, match=r"Unheard.value\['a'\]: a object cannot be serialised"):
        written({"a": object()})
