"""What a scrape of the collector gives."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from facade.worlds import EXCLUSIVE, World, filled
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvoffload_async import CPUPrimaryTierOffloadingManager
from kvoffload_async.errors import ClosedError, TierUnavailableError
from kvoffload_async.observe.prometheus import METRICS, MetricKind, OffloadCollector
from kvoffload_async.statistics import UnopenedStatistics

DOCS = Path(__file__).parents[2] / "docs" / "metrics"


@pytest.fixture
def world():
    here = World(EXCLUSIVE)
    here.begin("r")
    yield here
    here.end()


def scraped(engines):
    registry = CollectorRegistry()
    registry.register(OffloadCollector(engines))
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples[name, frozenset({"engine": "0", **labels}.items())]


def test_what_was_counted_is_scraped_by_engine_tier_and_direction(world):
    world.store(1, 2)
    world.rest()
    world.lookup(1)
    samples = scraped({"0": world.manager.stats})
    assert value(samples, "kvoffload_blocks_total", result="hit") == 1
    assert value(samples, "kvoffload_tier_stored_blocks_total", tier="tier0") == 2
    assert value(samples, "kvoffload_tier_jobs_total", tier="tier0", direction="store") == 1
    closed = {"tier": "tier0", "direction": "load", "state": "closed"}
    assert value(samples, "kvoffload_tier_breaker_state", **closed) == 1
    assert value(samples, "kvoffload_tier_breaker_state", **{**closed, "state": "open"}) == 0


def test_loads_and_stores_are_counted_apart(world):
    filled(world, 1, 2)
    world.lookup(1)
    world.rest()
    world.lookup(2)
    world.step()
    world.finish_job(error=TierUnavailableError("down"))
    world.poll()
    samples = scraped({"0": world.manager.stats})

    def jobs(name, direction):
        return value(samples, f"kvoffload_tier_{name}", tier="tier0", direction=direction)

    assert (jobs("jobs_total", "load"), jobs("jobs_total", "store")) == (2, 1)
    assert (jobs("failed_jobs_total", "load"), jobs("failed_jobs_total", "store")) == (1, 0)
    world.lookup(1)
    world.store(3)
    assert jobs("jobs_in_flight", "store") == 0
    samples = scraped({"0": world.manager.stats})
    assert (jobs("jobs_in_flight", "load"), jobs("jobs_in_flight", "store")) == (0, 1)
    world.rest()


def test_a_histogram_ends_with_the_count_of_all(world):
    world.store(1)
    world.rest()
    samples = scraped({"0": world.manager.stats})
    store = {"tier": "tier0", "direction": "store"}
    name = "kvoffload_tier_job_seconds"
    assert value(samples, f"{name}_bucket", **store, le="+Inf") == 1
    assert value(samples, f"{name}_bucket", **store, le="0.0001") == 1
    assert value(samples, f"{name}_count", **store) == 1
    assert value(samples, f"{name}_sum", **store) == 0.0


def test_engines_are_told_apart_and_one_that_is_not_open_says_nothing(world):
    def closed():
        raise ClosedError("the engine is not open")

    alone = CPUPrimaryTierOffloadingManager(3)
    samples = scraped({"0": world.manager.stats, "1": alone.stats, "2": closed})
    engines = {dict(labels)["engine"] for _, labels in samples}
    assert engines == {"0", "1"}
    free = frozenset({"engine": "1", "state": "free"}.items())
    assert samples["kvoffload_primary_slots", free] == 3
    assert not [labels for name, labels in samples if "tier_" in name and ("engine", "1") in labels]


def test_registering_reads_nothing():
    CollectorRegistry().register(OffloadCollector({"0": lambda: pytest.fail("was read")}))


def test_names_follow_the_conventions():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch("kvoffload_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert metric.name.endswith("_seconds") or metric.kind is not MetricKind.HISTOGRAM
        assert metric.documentation.endswith(".")


def test_a_tier_that_is_not_open_is_0_with_the_time_of_its_first_failure(world):
    stats = world.manager.stats()
    failing = UnopenedStatistics(since_s=100.0, attempts=1, reason="refused", next_attempt_s=101.0)
    tier = replace(stats.tiers[0], is_open=False, unopened=failing)
    samples = scraped({"0": world.manager.stats, "1": lambda: replace(stats, tiers=(tier,))})
    assert value(samples, "kvoffload_tier_open", tier="tier0") == 1
    name = "kvoffload_tier_unopened_since_timestamp_seconds"
    of_dead = frozenset({"engine": "1", "tier": "tier0"}.items())
    assert samples["kvoffload_tier_open", of_dead] == 0
    assert {key: found for key, found in samples.items() if key[0] == name} == {
        (name, of_dead): 100.0
    }


def panels(name="dashboard.json"):
    return json.loads((DOCS / name).read_text(encoding="utf-8"))["panels"]


def rules(name):
    (group,) = yaml.safe_load((DOCS / name).read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def test_dashboard_and_rules_name_metrics_that_exist():
    series = {metric.name for metric in METRICS}
    series |= {f"{m.name}_bucket" for m in METRICS if m.kind is MetricKind.HISTOGRAM}
    texts = [target["expr"] for panel in panels() for target in panel["targets"]]
    texts.append(re.sub("(?m)^ *(summary|description|#).*$", "", (DOCS / "alerts.yml").read_text()))
    named = set(re.findall(r"\bkvoffload_\w+", " ".join(texts)))
    assert named
    assert named <= series


@pytest.mark.parametrize("name", ["alerts.yml", "vllm-alerts.yml"])
def test_every_rule_keeps_the_host_and_every_summary_names_it(name):
    for rule in rules(name):
        assert not re.search(r"\bby \(", rule["expr"]), "use `without`, which keeps the host"
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert "{{ $labels.engine }}" in rule["annotations"]["summary"]


@pytest.mark.parametrize("name", ["dashboard.json", "vllm-dashboard.json"])
def test_every_panel_explains_itself_selects_hosts_and_names_them(name):
    for panel in panels(name):
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            selected = target["expr"].count('{instance=~"$instance",engine=~"$engine"}') + target[
                "expr"
            ].count(',instance=~"$instance",engine=~"$engine"}')
            metrics = re.findall(r"(?<![:\w])(?:kvoffload_|vllm:)", target["expr"])
            assert selected == len(metrics), panel["title"]
            assert panel["type"] == "stat" or target["legendFormat"].startswith("{{instance}} ")
            assert all("instance" in by for by in re.findall(r"\bby \((.*?)\)", target["expr"]))


def test_the_dashboard_begins_with_tiles_that_show_what_is_wrong():
    shown = " ".join(p["targets"][0]["expr"] for p in panels() if p["type"] == "stat")
    assert [panel["type"] for panel in panels()[:8]] == ["stat"] * 8
    for metric in ("tier_open", "tier_breaker_state", "tier_overdue_jobs", "corrupt_blocks_total"):
        assert metric in shown
