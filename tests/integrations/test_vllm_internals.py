"""How a spec finds the configuration of the connector that makes it; without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm.internals import (
    ConnectorArguments,
    connector_arguments,
    require_one_host,
)


def config_of(extra_config):
    transfer = SimpleNamespace(kv_connector_extra_config=extra_config)
    return SimpleNamespace(kv_transfer_config=transfer)


def connector(vllm_config, kv_cache_config, make_spec):
    """As vLLM's: the spec is made somewhere below it, and has the summary alone."""
    return make_spec(vllm_config.kv_transfer_config.kv_connector_extra_config)


def test_the_connector_that_makes_the_spec_is_found():
    config = config_of({"a": 1})

    def create_spec(extra_config):
        return connector_arguments(extra_config)

    found = connector(config, "caches", create_spec)
    assert found == ConnectorArguments(config, "caches")


def test_an_equal_configuration_of_another_connector_is_not_mistaken_for_it():
    assert (
        connector(config_of({"a": 1}), None, lambda _extra: connector_arguments({"a": 1})) is None
    )


def test_the_inner_one_of_two_connectors_is_found():
    inner = config_of({"a": 1})

    def make_inner(_extra):
        return connector(inner, "inner", connector_arguments)

    assert connector(config_of({"a": 1}), "outer", make_inner) == ConnectorArguments(inner, "inner")


def test_without_a_connector_nothing_is_found():
    def unrelated(vllm_config):
        return connector_arguments({}), vllm_config

    assert connector_arguments({}) is None
    assert unrelated(SimpleNamespace(kv_transfer_config=None))[0] is None


def test_registered_layers_are_those_with_a_cache_in_this_process():
    backend = SimpleNamespace(get_name=lambda: "FLASH")
    cache = torch.zeros(4, 2)
    layers = {
        "attention": SimpleNamespace(kv_cache=cache, attn_backend=backend),
        "mamba": SimpleNamespace(kv_cache=[cache, cache]),
        "unbound": SimpleNamespace(kv_cache=torch.tensor([])),
        "none": SimpleNamespace(),
    }
    compilation = SimpleNamespace(static_forward_context=layers)
    found = ConnectorArguments(
        SimpleNamespace(compilation_config=compilation), None
    ).registered_layers()
    assert set(found) == {"attention", "mamba"}
    assert found["attention"].kind == "FLASH"
    assert found["mamba"].kind == "SimpleNamespace"
    assert len(found["mamba"].tensors) == 2


def on_hosts(count):
    parallel = SimpleNamespace(nnodes_within_dp=count)
    return ConnectorArguments(SimpleNamespace(parallel_config=parallel), None)


def test_a_replica_on_several_hosts_is_refused():
    with pytest.raises(ConfigError, match=r"nnodes: each replica has workers on 2 hosts"):
        require_one_host(on_hosts(2))


@pytest.mark.parametrize(
    "arguments", [None, on_hosts(1), ConnectorArguments(SimpleNamespace(), None)]
)
def test_a_replica_on_one_host_is_accepted(arguments):
    require_one_host(arguments)
