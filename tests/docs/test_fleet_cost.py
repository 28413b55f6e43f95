"""The tool that computes what a fleet needs of a shared store."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "docs/_tools/fleet_cost.py"))
FLEET = TOOL["Fleet"]()
cost_of = TOOL["cost_of"]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def test_the_page_has_the_table_of_the_default_fleet():
    text = (ROOT / "docs/howto/choosing.md").read_text()
    assert TOOL["page"](text, FLEET) == text


def test_a_hundred_hosts_that_read_152_gib_a_second_need_14_valkey_nodes():
    cost = cost_of("valkey", FLEET)
    assert cost.read_bytes / GIB == pytest.approx(152.3, abs=0.1)
    assert cost.servers == 14
    assert cost.usd is None
    assert cost_of("valkey", replace(FLEET, usd_server=2.0)).usd == 14 * 2 * 730


def test_memory_that_keeps_more_takes_more_nodes():
    assert cost_of("valkey", replace(FLEET, kept_bytes=64 * 512 * GIB)).servers == 64


def test_a_bucket_costs_its_requests_and_what_it_keeps():
    fleet = replace(FLEET, hosts=1, loads=312, stores=100, kept_bytes=GIB)
    month_s = 730 * 3600
    requests = month_s * ((312 + 2) * 0.0004 + 100 * 0.005) / 1000
    assert cost_of("object", fleet).usd == pytest.approx(requests + 0.023)


@pytest.mark.parametrize(
    ("store", "changed", "wall"),
    [
        ("valkey", {"nic_gbit": 10}, "a host's network"),
        ("object", {}, "a host's CPU"),
        ("object", {"block_bytes": 64 * KIB, "latency_s": 0.155, "cores": 64}, "calls in flight"),
        ("object", {"latency_s": 0.155, "window_bytes": 8 * MIB}, "bytes in flight"),
    ],
)
def test_the_first_wall_is_the_resource_that_ends_first(store, changed, wall):
    cost = cost_of(store, replace(FLEET, **changed))
    assert cost.first_wall == wall
    assert cost.walls[wall] == min(cost.walls.values())


@given(
    store=st.sampled_from(["valkey", "object"]),
    block_bytes=st.integers(KIB, 64 * MIB),
    factor=st.floats(1.0, 8.0),
)
def test_a_larger_load_never_needs_less(store, block_bytes, factor):
    fleet = replace(FLEET, block_bytes=block_bytes)
    less = cost_of(store, fleet)
    more = cost_of(store, replace(fleet, loads=factor * fleet.loads, stores=factor * fleet.stores))
    assert more.servers >= less.servers
    assert sum(more.requests.values()) >= sum(less.requests.values())
    assert more.walls["a host's CPU"] <= less.walls["a host's CPU"]


def test_the_table_is_printed_for_options_and_a_value_of_nothing_is_refused(capsys):
    TOOL["main"](["--hosts", "8", "--nic-gbit", "10"])
    assert "a host's network, at 238 blocks per second" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        TOOL["main"](["--hosts", "0"])
    assert "--hosts: give a number above 0" in capsys.readouterr().err
