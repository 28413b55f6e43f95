"""What a model's files say of their content."""

import os
import shutil
import time

import pytest

from kvoffload_async import ConfigError, fingerprint_files

LARGE = 3 << 20
HASH = "ab" * 32


@pytest.fixture
def model(tmp_path):
    """A folder with large weights, an index, configuration, code, and a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_weights(folder / "model.safetensors", seed=1)
    for name in ("config.json", "model.safetensors.index.json", "modeling.py", "tokenizer.json"):
        (folder / name).write_text(f"{name}: 1")
    return folder


def save_weights(path, seed, size=LARGE):
    header = b'{"x":{}}'
    body = bytes([seed]) * (size - 8 - len(header))
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    os.utime(path, ns=(10**18, 10**18))


def test_equal_files_have_one_fingerprint_wherever_they_are(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint_files(model) == fingerprint_files(tmp_path / "copy")
    assert fingerprint_files(model) == fingerprint_files(str(model))
    assert len(bytes.fromhex(fingerprint_files(model))) == 32


def test_weights_of_the_same_size_and_time_but_other_content_differ(model):
    before = fingerprint_files(model)
    save_weights(model / "model.safetensors", seed=2)
    assert fingerprint_files(model) != before


def test_a_header_that_differs_is_seen_though_it_is_longer_than_a_sample(tmp_path):
    fingerprints = set()
    for letter in (b"a", b"b"):
        header = b'{"' + b"x" * 20_000 + letter + b'":{}}'
        file = tmp_path / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(LARGE))
        os.utime(file, ns=(10**18, 10**18))
        fingerprints.add(fingerprint_files(file))
    assert len(fingerprints) == 2


def test_a_modification_between_two_samples_is_seen_by_its_time(model):
    before = fingerprint_files(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(LARGE // 2 + 100_000)
        file.write(b"another")
    assert fingerprint_files(model) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "modeling.py"])
def test_configuration_index_and_code_count_by_their_content(model, name):
    before = fingerprint_files(model)
    os.utime(model / name)
    assert fingerprint_files(model) == before
    (model / name).write_text(f"{name}: 2")
    assert fingerprint_files(model) != before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "README.md", ".hidden.py", "preprocessor_config.json", "log.json"]
)
def test_what_does_not_change_the_computation_does_not_count(model, name):
    before = fingerprint_files(model)
    (model / name).write_text("something else")
    assert fingerprint_files(model) == before


def test_files_that_the_caller_names_count(model):
    also = ["preprocessor_config.json"]
    before = fingerprint_files(model, also=also)
    assert before == fingerprint_files(model)
    (model / also[0]).write_text("{}")
    assert fingerprint_files(model, also=also) != before


def test_other_formats_beside_safetensors_count_only_where_they_are_read(model):
    before = fingerprint_files(model), fingerprint_files(model, all_formats=True)
    save_weights(model / "pytorch_model.bin", seed=3)
    assert fingerprint_files(model) == before[0]
    assert fingerprint_files(model, all_formats=True) != before[1]
    (model / "model.safetensors").unlink()
    assert fingerprint_files(model) == fingerprint_files(model, all_formats=True)


def test_another_name_for_the_same_weights_counts(model):
    before = fingerprint_files(model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert fingerprint_files(model) != before


def test_folders_below_do_not_count(model):
    before = fingerprint_files(model)
    (model / "original").mkdir()
    save_weights(model / "original" / "more.safetensors", seed=3)
    assert fingerprint_files(model) == before


def hub_snapshot(folder, *, published, time_ns):
    """Lay files out as the hub's cache does."""
    blob = folder / "blobs" / published
    blob.parent.mkdir(parents=True, exist_ok=True)
    save_weights(blob, seed=1)
    os.utime(blob, ns=(time_ns, time_ns))
    snapshot = folder / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    return snapshot


def test_a_hash_in_the_hubs_cache_counts_in_place_of_the_time(tmp_path):
    one = hub_snapshot(tmp_path / "one", published=HASH, time_ns=10**18)
    two = hub_snapshot(tmp_path / "two", published=HASH, time_ns=2 * 10**18)
    other = hub_snapshot(tmp_path / "three", published="cd" * 32, time_ns=10**18)
    assert fingerprint_files(one) == fingerprint_files(two)
    assert fingerprint_files(one) != fingerprint_files(other)


def downloaded(folder, *, time_ns, downloaded_s=None, published=HASH):
    """Lay files out as `hf download --local-dir` does, now or at another time."""
    folder.mkdir()
    save_weights(folder / "model.safetensors", seed=1)
    os.utime(folder / "model.safetensors", ns=(time_ns, time_ns))
    metadata = folder / ".cache/huggingface/download/model.safetensors.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"c0ffee\n{published}\n{downloaded_s or time.time()}\n")
    return folder


def test_a_hash_that_a_download_left_counts_in_place_of_the_time(tmp_path):
    one = downloaded(tmp_path / "one", time_ns=10**18)
    two = downloaded(tmp_path / "two", time_ns=5 * 10**17)
    assert fingerprint_files(one) == fingerprint_files(two)


def test_a_hash_does_not_count_once_another_file_is_in_place_however_old_it_is(tmp_path):
    before = time.time() - 10
    one = downloaded(tmp_path / "one", time_ns=10**18, downloaded_s=before)
    two = downloaded(tmp_path / "two", time_ns=9 * 10**17, downloaded_s=before)
    assert fingerprint_files(one) != fingerprint_files(two)


@pytest.mark.parametrize("published", ["short", "../../etc/passwd", ""])
def test_a_hash_that_is_none_does_not_count(tmp_path, published):
    one = downloaded(tmp_path / "one", time_ns=10**18, published=published)
    two = downloaded(tmp_path / "two", time_ns=9 * 10**17, published=published)
    assert fingerprint_files(one) != fingerprint_files(two)


def test_one_file_can_be_a_model(tmp_path):
    save_weights(tmp_path / "model.gguf", seed=1)
    before = fingerprint_files(tmp_path / "model.gguf")
    save_weights(tmp_path / "model.gguf", seed=2)
    assert fingerprint_files(tmp_path / "model.gguf") != before


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no files with weights"):
        fingerprint_files(tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        fingerprint_files(tmp_path / "gone.safetensors")


def test_a_pipe_among_the_weights_is_refused_and_not_waited_for(model):
    os.mkfifo(model / "pipe.safetensors")
    with pytest.raises(ConfigError, match="not a regular file"):
        fingerprint_files(model)


def test_too_many_files_are_refused(model):
    for number in range(10_000):
        (model / f"{number}.json").touch()
    with pytest.raises(ConfigError, match="more than 10000 files"):
        fingerprint_files(model)


def test_a_file_that_cannot_be_read_is_refused(model):
    (model / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        fingerprint_files(model)
