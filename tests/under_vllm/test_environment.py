"""Every environment variable of vLLM, at both ends of the supported range, is in the table."""

from pathlib import Path

import pytest
import vllm
from vllm import envs

from kvoffload_async.integrations.vllm.settings import classified_environment, environment

NAMES = Path(__file__).with_name("environment_variables.txt")
ISSUED = {  # those that an earlier table of patterns had missed
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_DISABLED_KERNELS",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_GDN_DECODE_KERNEL",
}


def recorded(version):
    """Return the names of a version's variables."""
    rows = [line.split() for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    return {name for name, *only in rows if only in ([], [version])}


def counts(name, declared=()):
    return environment({name: "1"}, declared) == {name: "1"}


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_every_variable_is_in_one_of_the_lists(version):
    classified = classified_environment()
    counted, neutral = classified["fingerprint"], classified["neutral"]
    unknown = recorded(version) - counted - neutral
    assert not unknown, "say in environment.toml whether they affect a block's bytes"
    assert not counted & neutral
    for name in recorded(version):
        assert counts(name, recorded(version)) is (name in counted), name


def test_the_lists_have_no_variable_that_no_version_has():
    classified = classified_environment()
    stale = classified["fingerprint"] | classified["neutral"]
    assert not stale - recorded("0.32") - recorded("0.33")


def test_the_record_of_the_installed_version_is_complete():
    version = ".".join(vllm.__version__.split(".")[:2])
    assert recorded(version) == set(envs.environment_variables)


@pytest.mark.parametrize("name", sorted(ISSUED))
def test_variables_that_choose_kernels_or_precision_count(name):
    assert counts(name)


def test_a_variable_that_is_in_no_list_counts():
    assert counts("VLLM_ASCEND_ENABLE_SOMETHING")
    assert counts("A_NAME_WITHOUT_THE_PREFIX", ["A_NAME_WITHOUT_THE_PREFIX"])
    assert not counts("A_NAME_WITHOUT_THE_PREFIX")


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_DIST_IDENT",  # drawn anew by every worker on a CPU
        "VLLM_SERVICE_HOST",
        "VLLM_LLAMA_SERVICE_PORT",
        "VLLM_LLAMA_SERVICE_PORT_HTTP",
        "VLLM_LLAMA_PORT",
        "VLLM_LLAMA_PORT_8000_TCP_ADDR",
    ],
)
def test_what_is_drawn_at_every_start_and_what_kubernetes_sets_for_services_do_not_count(name):
    assert not counts(name)
