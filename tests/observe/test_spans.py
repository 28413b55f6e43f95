"""The spans of requests, as an exporter of OpenTelemetry's own SDK gets them."""

import asyncio

import pytest
import torch
from facade.worlds import EXCLUSIVE, World, filled
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvoffload_async import OffloadEngine
from kvoffload_async.errors import BlockMissingError, StateError
from kvoffload_async.observe.spans import trace_requests

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


@pytest.fixture
def world(provider):
    here = World(EXCLUSIVE, explain_requests=8)
    trace_requests(here.manager, provider, clock=here.runner.now_s, wall_clock=lambda: 1000.0)
    yield here
    here.end()


def finished(world, *req_ids):
    for req_id in req_ids:
        world.finish(req_id)
    world.rest()


def named(exporter, name):
    return [span for span in exporter.get_finished_spans() if span.name == name]


def test_a_request_is_a_span_with_what_happened_and_its_copies_are_spans_in_it(world, exporter):
    world.begin("r")
    filled(world, 1, 2)
    world.lookup(1)
    world.step()
    finished(world, "r")
    filler, request = named(exporter, "kvoffload.request")
    assert filler.parent is request.parent is None
    assert request.attributes["kvoffload.request.id"] == "r"
    assert request.attributes["kvoffload.request.has_ended"] is True
    assert "kvoffload.lookup" in {event.name for event in request.events}
    (load,) = named(exporter, "kvoffload.load tier0")
    assert load.parent.span_id == request.context.span_id
    assert load.attributes["kvoffload.blocks"] == load.attributes["kvoffload.landed_blocks"] == 1
    assert request.start_time <= load.start_time <= load.end_time <= request.end_time


def test_times_are_those_of_the_wall_clock(world, exporter):
    world.begin("r")
    began_s = world.manager.explain("r").began_s
    ended_s = world.runner.now_s()
    finished(world, "r")
    (request,) = named(exporter, "kvoffload.request")
    assert request.start_time == round((began_s + 1000.0 - ended_s) * 1e9)


def test_a_copy_that_fails_is_an_error(world, exporter):
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_job(error=BlockMissingError("the disk is gone"))
    finished(world, "r")
    store = named(exporter, "kvoffload.store tier0")[0]
    assert store.status.status_code is trace.StatusCode.ERROR
    assert store.status.description == "the disk is gone"


def test_the_span_that_is_current_where_a_request_begins_is_its_parent(world, provider, exporter):
    tracer = provider.get_tracer("server")
    with tracer.start_as_current_span("generate") as server:
        world.begin("r")
    finished(world, "r")
    (request,) = named(exporter, "kvoffload.request")
    assert request.parent.span_id == server.get_span_context().span_id
    assert request.context.trace_id == server.get_span_context().trace_id


def test_an_explicit_context_and_headers_come_before_the_current_span(world, provider, exporter):
    tracer = provider.get_tracer("server")
    other = trace.set_span_in_context(tracer.start_span("other"))
    with tracer.start_as_current_span("generate"):
        world.begin("by context", trace_context=other)
        world.begin("by headers", trace_context=HEADERS)
        world.begin("by params", kv_transfer_params=HEADERS)
    world.begin("by params alone", kv_transfer_params={**HEADERS, "more": 1})
    finished(world, "by context", "by headers", "by params", "by params alone")
    parents = {
        span.attributes["kvoffload.request.id"]: span.parent.span_id
        for span in named(exporter, "kvoffload.request")
    }
    assert parents["by context"] == trace.get_current_span(other).get_span_context().span_id
    assert parents["by headers"] == parents["by params alone"] == int(SPAN, 16)
    (generate,) = named(exporter, "generate")
    assert parents["by params"] == generate.context.span_id


def test_a_manager_that_keeps_no_requests_makes_no_spans(provider):
    world = World(EXCLUSIVE)
    try:
        with pytest.raises(StateError, match="explain_requests"):
            trace_requests(world.manager, provider)
    finally:
        world.end()


def test_what_is_in_flight_at_the_shutdown_has_spans_that_say_so(provider, exporter):
    world = World(EXCLUSIVE, explain_requests=8)
    world.begin("early", trace_context=HEADERS)
    trace_requests(world.manager, provider, clock=world.runner.now_s)
    world.begin("r")
    world.store(1)
    world.step()
    world.manager.recorder.give_up()
    world.finish("early")
    world.step()
    has_ended = {
        span.attributes["kvoffload.request.id"]: span.attributes["kvoffload.request.has_ended"]
        for span in named(exporter, "kvoffload.request")
    }
    assert has_ended["r"] is False
    (store,) = named(exporter, "kvoffload.store tier0")
    assert store.status.description == "has not ended"
    world.end()


async def serve(config, device, provider):
    async with OffloadEngine(config, kv_caches=device) as engine:
        trace_requests(engine.driver, provider)
        with provider.get_tracer("server").start_as_current_span("generate"):
            async with engine.request("1", [bytes(32)]) as request:
                await engine.store(request, [0])
        async with engine.request("2", [bytes(32)], trace_context=HEADERS) as request:
            await engine.load(request, range(await engine.lookup(request)))


def test_a_server_sees_the_cache_in_its_trace(provider, exporter):
    device = {"layer": torch.zeros(4, 64, dtype=torch.uint8)}
    tier = {"type": "example"}
    config = {"cpu_bytes_to_use": 4096, "model": "m", "explain_requests": 4}
    asyncio.run(serve({**config, "secondary_tiers": [tier]}, device, provider))
    spans = {
        span.attributes["kvoffload.request.id"]: span
        for span in named(exporter, "kvoffload.request")  # in the order in which they ended
    }
    first, second = spans["1"], spans["2"]
    (generate,) = named(exporter, "generate")
    assert first.parent.span_id == generate.context.span_id
    assert second.parent.span_id == int(SPAN, 16)
    copies = {span.name for span in exporter.get_finished_spans() if span.name != "generate"}
    assert {"kvoffload.store device", "kvoffload.store example", "kvoffload.load device"} <= copies
