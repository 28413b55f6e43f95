"""A newer release of a host: compared with the recorded signatures, then admitted or refused."""

import copy
import enum
import json
import logging
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import pytest

from kvoffload_async.integrations import host_contract
from kvoffload_async.integrations.host_contract import HostContract, describe, record
from kvoffload_async.integrations.sglang import CONTRACT as SGLANG
from kvoffload_async.integrations.vllm.version import CONTRACT as VLLM

TIER = "vllm.v1.kv_offload.tiering.base:SecondaryTierManager"
RESULT = "vllm.v1.kv_offload.tiering.base:JobResult"
WHAT = "kvoffload_async.integrations.vllm.FsTier"


def newer(change):
    """Return what a newer release has: the recording, changed."""
    found = copy.deepcopy(VLLM.recorded())
    change(found)
    return lambda: found


def unchanged(_found):
    pass


@pytest.fixture(autouse=True)
def no_earlier_warning():
    host_contract._warn.cache_clear()


@pytest.mark.parametrize("contract", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_a_recording_has_every_class_of_its_contract(contract):
    recorded = contract.recorded()
    named = contract.derived.keys() | contract.used.keys() | contract.private.keys()
    assert recorded.keys() == named
    assert all(recorded.values())
    assert list(contract.differences(recorded)) == []


def test_a_newer_release_with_the_same_signatures_is_admitted_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            VLLM.check("0.34.0", WHAT, newer(unchanged))
    (warned,) = caplog.records
    assert "vLLM 0.34.0 is newer than the tested releases (>=0.32,<0.34)" in warned.message


def test_a_tested_release_is_not_compared():
    VLLM.check("0.33.5", WHAT, lambda: pytest.fail("it was compared"))


@pytest.mark.parametrize("version", ["0.31.9", "unknown"])
def test_an_older_release_is_refused(version):
    with pytest.raises(ImportError, match=rf">=0\.32,<0\.34, and {version} is installed$"):
        VLLM.check(version, WHAT)


def another_parameter(found):
    found[TIER]["methods"]["lookup"] = "(self, key, req_context, hints=...)"


def no_method(found):
    del found[TIER]["methods"]["drain_jobs"]


def new_abstract_method(found):
    found[TIER]["abstract"].append("prefetch")


def no_class(found):
    found[TIER] = {}


def new_field(found):
    methods = found[RESULT]["methods"]
    methods["__init__"] = methods["__init__"].replace("job_id", "job_id, tier")


def no_field(found):
    methods = found[RESULT]["methods"]
    methods["__init__"] = methods["__init__"].replace("success, ", "")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (another_parameter, r"SecondaryTierManager\.lookup takes \(self, key, req_context, hints="),
        (no_method, r"SecondaryTierManager\.drain_jobs does not exist"),
        (new_abstract_method, r"SecondaryTierManager\.prefetch is a new abstract method"),
        (no_class, r"tiering\.base:SecondaryTierManager does not exist"),
        (new_field, r"JobResult\.__init__ takes \(self, job_id, tier, success"),
        (no_field, r"JobResult\.__init__ takes"),
    ],
)
def test_a_newer_release_that_differs_is_refused_and_the_difference_named(change, named):
    with pytest.raises(ImportError, match=rf"0\.40 is installed, which differs: .*{named}"):
        VLLM.check("0.40", WHAT, newer(change))


SCHEDULER = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler"
)


def no_private_method(found):
    del found[SCHEDULER]["methods"]["_maximal_prefix_lookup"]


def another_private_parameter(found):
    found[SCHEDULER]["methods"]["_sliding_window_lookup"] = "(self, keys, req_context)"


def no_private_attribute(found):
    found[SCHEDULER]["attributes"].remove("_req_status")


def no_private_class(found):
    found[SCHEDULER] = {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (no_private_method, "OffloadingConnectorScheduler._maximal_prefix_lookup does not exist"),
        (another_private_parameter, "_sliding_window_lookup takes (self, keys, req_context), not"),
        (no_private_attribute, "OffloadingConnectorScheduler._req_status does not exist"),
        (no_private_class, f"{SCHEDULER} does not exist"),
    ],
)
def test_without_a_private_name_a_release_is_admitted_and_one_warning_says_what_is_left_out(
    change, named, caplog
):
    found = newer(change)()
    VLLM.check("0.40", WHAT, lambda: found)
    caplog.clear()
    for _ in range(2):
        assert not VLLM.has_private_names("the feature", found)
    (warned,) = caplog.records
    assert warned.message.startswith("the feature is left out: ")
    assert named in warned.message
    assert VLLM.has_private_names("the feature", newer(unchanged)())


def test_fields_and_what_a_constructor_sets_are_attributes():
    @dataclass
    class Value:
        kept: int

    class Holder:
        def __init__(self):
            self._held = 1

        def method(self):
            return self._held

    assert describe(Value, ["kept", "gone"])["attributes"] == ["kept"]
    described = describe(Holder, ["_held", "_gone", "method"])
    assert described == {"methods": {"method": "(self)"}, "abstract": [], "attributes": ["_held"]}


def test_the_first_of_many_differences_is_named():
    with pytest.raises(ImportError, match=r"differs: [^;]+ does not exist\. Install a tested"):
        VLLM.check("0.40", WHAT, dict)


def test_a_value_may_have_further_fields_with_defaults():
    def change(found):
        methods = found[RESULT]["methods"]
        methods["__init__"] = methods["__init__"].replace(")", ", tier=...)")

    assert list(VLLM.differences(newer(change)())) == []


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    one: int
    other: int = 0


@dataclass
class Value:
    one: int
    other: str = ""


class Base(ABC):
    @abstractmethod
    def must(self, keys, *rest, flag=True): ...

    @classmethod
    def make(cls, size: int = 3) -> "Base":
        return cls()

    def _private(self):
        return 1


def test_a_class_is_described_by_its_parameters_without_types_and_values():
    assert describe(Value)["methods"]["__init__"] == "(self, one, other=...)"
    assert describe(Pair)["methods"]["__init__"] == "(_cls, one, other=...)"
    assert describe(Base)["methods"] == {
        "must": "(self, keys, *rest, flag=...)",
        "make": "(cls, size=...)",
    }
    assert describe(Base)["abstract"] == ["must"]
    assert describe(Base, ["make"])["methods"] == {"make": "(cls, size=...)"}
    assert describe(Colour, ["RED"])["members"] == ["RED"]


@pytest.fixture
def contract_of(tmp_path, monkeypatch):
    """Return what makes the contract with a host of the classes above."""
    host = ModuleType("host")
    vars(host).update(Base=Base, Colour=Colour, Value=Value)
    monkeypatch.setitem(sys.modules, "host", host)

    def make(**used):
        return HostContract(
            module="host",
            title="host",
            remedy="install it",
            first=(1,),
            beyond=(2,),
            derived={"host:Base": ()},
            used={f"host:{name}": tuple(members) for name, members in used.items()},
            recording=tmp_path / "contract.json",
        )

    return make


def test_a_recorded_release_equals_its_recording(contract_of):
    contract = contract_of(Colour=["RED"], Value=[])
    record(contract)
    assert list(contract.differences(contract.read())) == []
    recorded = json.loads(contract.recording.read_text())
    recorded["host:Colour"]["members"] = ["GREEN"]
    contract.recording.write_text(json.dumps(recorded))
    assert list(contract.differences(contract.read())) == ["Colour.GREEN does not exist"]


def test_a_class_that_does_not_exist_is_not_recorded(contract_of):
    with pytest.raises(ImportError, match="host: there is no host:Missing"):
        record(contract_of(Missing=[]))
