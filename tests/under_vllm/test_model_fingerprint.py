"""What the content of a model is known by, with vLLM's own configuration classes."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_model import CONFIG, save_tiny_model
from vllm.engine.arg_utils import EngineArgs

from kvoffload_async.integrations.vllm import identity
from kvoffload_async.integrations.vllm.identity import Fingerprint, fingerprint_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(folder, **options):
    given = {"max_model_len": 256, "skip_tokenizer_init": True, "dtype": "float32", **options}
    return EngineArgs(model=str(folder), **given).create_engine_config()


def fingerprint_of(folder, **options):
    found = fingerprint_model(config_of(folder, **options))
    assert found.unknown == ""
    return found.digest


@pytest.fixture(scope="module")
def baseline(folder):
    return fingerprint_of(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_memory_utilization": 0.5},
        {"max_num_seqs": 3},
        {"enforce_eager": True},
        {"seed": 7},
        {"served_model_name": "another"},
        {"block_size": 64},
        {"max_model_len": 255},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    ],
)
def test_what_does_not_change_keys_and_values_does_not_count(folder, baseline, options):
    assert fingerprint_of(folder, **options) == baseline


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": lambda config: config.update({"sliding_window": 64}) or config},
        {"dtype": "bfloat16"},
        {"max_model_len": 8193, "hf_overrides": {"max_position_embeddings": 16_384}},
        {"load_format": "safetensors"},
        {"model_impl": "transformers"},
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"code_revision": "c0ffee"},
        {"additional_config": {"x": 1}},
    ],
)
def test_what_changes_keys_and_values_counts(folder, baseline, options):
    assert fingerprint_of(folder, **options) != baseline


def test_quantised_weights_count(folder):
    plain = fingerprint_of(folder, dtype="bfloat16")
    assert fingerprint_of(folder, dtype="bfloat16", quantization="fp8_per_tensor") != plain


def test_replaced_weights_count(tmp_path):
    before = fingerprint_of(save_tiny_model(tmp_path, seed=1))
    weights = tmp_path / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    save_tiny_model(tmp_path, seed=2)
    os.utime(weights, ns=times)  # a copy that preserves times
    assert fingerprint_of(tmp_path) != before


def test_an_edited_configuration_counts(tmp_path, folder):
    save_tiny_model(tmp_path)
    before = fingerprint_of(tmp_path)
    changed = {**CONFIG, "rms_norm_eps": 1e-3}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert fingerprint_of(tmp_path) != before


def test_another_process_finds_the_same(folder, baseline):
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_model_fingerprint import fingerprint_of\n"
        "print('found', fingerprint_of(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(Path(__file__).parent), str(ROOT)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        text=True,
        timeout=100,
    )
    assert f"found {baseline}" in done.stdout, done.stderr[-3000:]


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 200,
        "long_factor": [1.0] * 16,
        "short_factor": [1.0] * 16,
    }
}


def test_a_length_at_which_factors_switch_counts(folder):
    lengths = {
        length: fingerprint_of(folder, max_model_len=length, hf_overrides=LONGROPE)
        for length in (100, 200, 201, 256)
    }
    assert lengths[100] == lengths[200] != lengths[201] == lengths[256]


def test_variables_that_choose_numbers_count_and_others_do_not(folder, baseline, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LLAMA_SERVICE_HOST", "10.96.0.7")
    assert fingerprint_of(folder) == baseline
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert fingerprint_of(folder) != baseline
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM")
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "{}")
    assert fingerprint_of(folder) != baseline
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(folder / "config.json"))
    assert "names a file" in fingerprint_model(config_of(folder)).unknown


def test_an_error_of_another_kind_makes_the_content_unknown(folder):
    config = config_of(folder)
    config.model_config = None
    assert fingerprint_model(config).unknown.startswith("AttributeError: ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"worker_extension_cls": "builtins.object"}, "worker_extension_cls is set"),
        ({"hf_overrides": {"quantization_config_file": "/x.json"}}, "quantization_config_file"),
        (
            {"hf_overrides": {"auto_map": {"AutoModel": "o/r--m.M"}}, "trust_remote_code": True},
            "another repository",
        ),
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"load_format": "tensorizer"}, "load_format='tensorizer'"),
        ({"enable_lora": True}, "VllmConfig.lora_config is set"),
    ],
)
def test_a_content_that_cannot_be_known_says_why(folder, options, reason):
    config = config_of(folder, **{key: options[key] for key in options if key != "load_format"})
    config.load_config.load_format = options.get("load_format", "auto")
    found = fingerprint_model(config)
    assert found.digest == ""
    assert reason in found.unknown


def test_weights_that_are_not_here_cannot_be_known(folder, monkeypatch):
    config = config_of(folder)
    config.model_config.model = "org/that-was-never-downloaded"
    assert (
        "'org/that-was-never-downloaded' are not local files" in fingerprint_model(config).unknown
    )
    config.model_config.model = "s3://bucket/model"
    assert "are not local files" in fingerprint_model(config).unknown
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert "VLLM_USE_MODELSCOPE" in fingerprint_model(config).unknown
    config.model_config.model = str(folder)
    config.model_config.model_weights = "s3://bucket/model"
    assert "are not local files" in fingerprint_model(config).unknown


def test_a_snapshot_of_the_hub_is_found(tmp_path):
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("c0ffee" * 7)[:40]
    save_tiny_model(snapshot)
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    config = config_of(snapshot)
    config.load_config.download_dir = str(tmp_path)
    config.model_config.model = "org/model"
    found = fingerprint_model(config)
    assert found.unknown == ""
    config.model_config.revision = "another"
    assert "are not local files" in fingerprint_model(config).unknown


def test_a_disk_that_hangs_makes_the_content_unknown(folder, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(identity, "fingerprint_files", lambda _path, **_: release.wait(20.0))
    found = fingerprint_model(config_of(folder), timeout_s=0.01)
    release.set()
    assert found == Fingerprint(unknown="the model's files could not be read within 0.01 s")
