"""What a scrape of the collector gives."""

import json
import re
from pathlib import Path

import pytest
from facade.worlds import EXCLUSIVE, World, filled
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvoffload_async import CPUPrimaryTierOffloadingManager
from kvoffload_async.errors import ClosedError, TierUnavailableError
from kvoffload_async.observe.prometheus import METRICS, MetricKind, OffloadCollector

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
    world.settle(error=TierUnavailableError("down"))
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


def test_dashboard_and_rules_name_metrics_that_exist():
    series = {metric.name for metric in METRICS}
    series |= {f"{m.name}_bucket" for m in METRICS if m.kind is MetricKind.HISTOGRAM}
    dashboard = json.loads((DOCS / "dashboard.json").read_text(encoding="utf-8"))
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    texts.append(re.sub("(?m)^ *(summary|description|#).*$", "", (DOCS / "alerts.yml").read_text()))
    named = set(re.findall(r"\bkvoffload_\w+", " ".join(texts)))
    assert named
    assert named <= series
