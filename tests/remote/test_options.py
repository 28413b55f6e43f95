"""The options of remote tiers: clear errors that name key and remedy, and never a secret."""

import json
import logging

import numpy as np
import pytest
from typer.testing import CliRunner

from kvoffload_async import (
    ConfigError,
    OffloadConfig,
    SecondaryTierFactory,
)
from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.cli.app import app
from kvoffload_async.cli.inputs import parse_tier
from kvoffload_async.config import without_secrets
from kvoffload_async.errors import InputError, TierUnavailableError, UnknownNameError
from kvoffload_async.tiers.mooncake.process import MooncakeSettings
from kvoffload_async.tiers.object.tier import ObjectOptions
from kvoffload_async.tiers.valkey.address import Address, ValkeySettings

SECRET = "s3cret/p@ss"  # noqa: S105 - made up

VALKEY = {"type": "valkey", "url": "valkey://host", "model": "org/model"}
OBJECT = {"type": "object", "url": "s3://bucket/prefix", "model": "org/model"}


def refusal(config):
    with pytest.raises(ConfigError) as raised:
        SecondaryTierFactory.check_config(config)
    assert SECRET not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("config", [VALKEY, OBJECT])
def test_a_configuration_is_checked_without_a_server(config):
    (location,) = SecondaryTierFactory.check_config(config)
    assert location.key == "url"
    assert not location.is_exclusive


@pytest.mark.parametrize(
    ("block_bytes", "url", "is_warned"),
    [
        ("64KiB", "s3://bucket", True),
        ("252KiB", "s3://bucket", True),
        ("256KiB", "s3://bucket", False),
        ("64KiB", "file:///srv/kv", False),
        ("64KiB", "valkey://host", False),
    ],
)
def test_blocks_below_256_kib_in_an_object_store_are_warned_of(
    block_bytes, url, is_warned, tmp_path, caplog
):
    tier = {"type": "valkey" if url.startswith("valkey") else "object", "url": url}
    config = {"cpu_bytes_to_use": "1MiB", "block_bytes": block_bytes, "secondary_tiers": [tier]}
    path = tmp_path / "kv.json"
    path.write_text(json.dumps(config | {"model": "org/model"}))
    result = CliRunner().invoke(app, ["check-config", str(path)])
    assert result.exit_code == 0, result.output
    assert ("raise blocks_per_chunk" in caplog.text) is is_warned


@pytest.mark.parametrize("base", [VALKEY, OBJECT])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ttl_s", 0),
        ("connections", 0),
        ("call_timeout_s", -1),
        ("max_retries", 99),
        ("positive_cache_ttl_s", -1),
        ("negative_cache_ttl_s", "1"),
        ("integrity_key_file", "relative"),
        ("io_timeout_s", "soon"),
        ("url", 5),
        ("url", "nothing"),
        ("url", f"ftp://user:{SECRET}@host"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(base, key, value):
    assert refusal(base | {key: value}).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": f"valkey://u:{SECRET}@ho st\n"}, "url: "),
        ({"url": "valkey://host:port"}, "url: it is not valid"),
        ({"url": "valkey://"}, "url: "),
        ({"url": "valkey://host/zero"}, "database 'zero' is not a number"),
        ({"url": f"valkey://u:12/{SECRET}@host"}, "database after the first / is not a number"),
        ({"url": f"http://u:{SECRET}@host"}, "url: it is not valid"),
        ({"url": "http://host"}, "scheme is not one of"),
        ({"url": f"valkey://u:{SECRET}@host?x=1"}, "url: "),
        ({"cluster": "yes"}, "cluster: "),
        ({"cluster": True, "url": "valkey://host/2"}, "does not go with cluster"),
        ({"tls_ca_file": "/ca.pem"}, "tls_ca_file: goes with a URL of valkeys://"),
        ({"tls_ca_file": "ca.pem"}, "tls_ca_file: it must be the absolute path"),
        ({"password_file": "/not/there"}, "password_file: '/not/there' cannot be read"),
    ],
)
def test_options_of_valkey_are_checked(options, said):
    assert said in refusal(VALKEY | options)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xff", b"x" * 5000])
def test_a_file_without_a_usable_password_is_named(tmp_path, content):
    path = tmp_path / "password"
    path.write_bytes(content)
    assert "password_file" in refusal(VALKEY | {"password_file": str(path)})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": f"s3://key:{SECRET}@bucket/x"}, "neither user nor query"),
        ({"url": "s3://"}, "write s3://bucket/prefix"),
        ({"url": "s3://[bucket"}, "write s3://bucket/prefix"),
        ({"url": "file://"}, "write s3://bucket/prefix"),
        ({"url": "http://host/x"}, "scheme must be one of"),
        ({"endpoint": ""}, "endpoint: it is not valid"),
        ({"store_options": {"region": ""}}, "store_options: region: it is not valid"),
        (
            {"store_options": {"secret_access_key": 5}},
            "store_options: secret_access_key: it is not",
        ),
        ({"store_options": {"session_token": None}}, "store_options: session_token: it is not"),
        ({"store_options": {"allow_http": "yes"}}, "store_options: allow_http: 'yes' is not valid"),
        (
            {"url": "file:///not/there", "store_options": {"allow_http": "yes"}},
            "store_options: allow_http: 'yes' is not valid",
        ),
        (
            {
                "url": "file:///not/there",
                "endpoint": "https://h",
                "store_options": {"endpoint": "https://h"},
            },
            "is given twice",
        ),
        ({"tls_ca_file": "/not/there"}, "tls_ca_file: '/not/there' cannot be read"),
        (
            {"tls_ca_file": "/dev/null"},
            "tls_ca_file: '/dev/null' cannot be read (not a",
        ),
        ({"store_options": [SECRET]}, "store_options: "),
        ({"endpoint": "https://h", "store_options": {"endpoint": "https://h"}}, "is given twice"),
        ({"store_options_file": "relative"}, "store_options_file: it must be the absolute path"),
        ({"store_options_file": "/a\0b"}, "store_options_file: it must be the absolute path"),
        ({"tls_ca_file": "/\ud800"}, "tls_ca_file: it must be the absolute path"),
        ({"store_options_file": "/not/there"}, "'/not/there' cannot be read"),
        ({"store_options": {"colour": SECRET}}, "does not support all of the given options"),
        ({"url": "gs://bucket", "store_options": {"region": "eu"}}, "(region)"),
        ({"endpoint": "http://minio:9000"}, "endpoint: begins with http://"),
        ({"endpoint": "HTTP://minio:9000"}, "or set allow_http to true"),
        ({"store_options": {"aws_endpoint": "http://h"}}, "aws_endpoint: begins with http://"),
        ({"store_options": {"AWS_ALLOW_HTTP": "true"}}, "AWS_ALLOW_HTTP: give it as allow_http"),
    ],
)
def test_options_of_object_are_checked(options, said):
    assert said in refusal(OBJECT | options)


@pytest.mark.parametrize(
    ("variables", "options", "is_refused"),
    [
        ({"AWS_ENDPOINT_URL": "http://h"}, {}, True),
        ({"AWS_ENDPOINT_URL": "http://h"}, {"store_options": {"allow_http": True}}, False),
        ({"AWS_ENDPOINT_URL": "http://h"}, {"endpoint": "https://h"}, False),
        ({"AWS_ENDPOINT_URL": "https://h"}, {}, False),
        ({"AZURE_ENDPOINT": "http://h"}, {}, False),
    ],
)
def test_an_endpoint_of_the_environment_must_be_encrypted_too(
    variables, options, is_refused, monkeypatch
):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    if is_refused:
        assert refusal(OBJECT | options).startswith("AWS_ENDPOINT_URL: begins with http://")
    else:
        SecondaryTierFactory.check_config(OBJECT | options)


def test_an_unknown_option_is_named_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'ttl_s'"):
        SecondaryTierFactory.check_config(VALKEY | {"ttl": 5})


@pytest.mark.parametrize("config", [VALKEY, OBJECT])
def test_a_model_is_required(config):
    assert refusal({key: config[key] for key in config if key != "model"}).startswith("model: ")


def test_a_library_that_is_not_installed_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "install kvoffload-async[valkey]" in refusal(VALKEY)
    assert "install kvoffload-async[object]" in refusal(OBJECT)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("valkey://host", Address("host")),
        ("redis://host:7/2", Address("host", 7, 2)),
        ("rediss://[::1]", Address("::1", has_tls=True)),
        (
            "valkeys://u%40x:p%2Fw@host",
            Address("host", has_tls=True, username="u@x", password="p/w"),  # noqa: S106 - made up
        ),
    ],
)
def test_urls_name_servers(url, address):
    assert Address.parse(url) == address
    assert "p/w" not in repr(address) + address.shown


def test_an_address_is_shown_as_a_url_without_user():
    assert Address.parse("rediss://u:p@[::1]:9/3").shown == "valkeys://[::1]:9/3"


@pytest.mark.parametrize(
    "config",
    [
        VALKEY | {"url": "valkey://u:s3cret%2Fp%40ss@127.0.0.1:1"},
        OBJECT
        | {
            "endpoint": "http://127.0.0.1:1",
            "store_options": {
                "allow_http": True,
                "access_key_id": "AK",
                "secret_access_key": SECRET,
            },
        },
    ],
)
def test_a_server_that_is_not_there_is_unavailable_and_no_secret_is_said(config, caplog):
    caplog.set_level(logging.DEBUG)
    view = memoryview(np.zeros((4, 4096), dtype=np.uint8))
    options = {"max_retries": 0, "open_timeout_s": 20.0}
    with pytest.raises(TierUnavailableError) as raised:
        SecondaryTierFactory.create_secondary_tier(config | options, view, None)
    said = json.dumps([repr(raised.value), repr(raised.value.__cause__), caplog.text])
    for secret in (SECRET, "s3cret%2Fp%40ss", "s3cret"):
        assert secret not in said


def test_a_secret_is_hidden_however_the_name_of_its_option_is_written():
    store_options = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": SECRET}
    options = OBJECT | {"store_options": store_options}
    settings = ObjectOptions.of(options, KVIdentity(model="org/model"))
    assert settings.redact(f"said {SECRET}") == "said ***"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (SECRET, "is not JSON"),
        (json.dumps([SECRET]), "it must be an object of obstore's options"),
        (json.dumps({"secret_access_key": [SECRET]}), "secret_access_key: it is not valid"),
        (json.dumps({"access_key_id": SECRET}), "access_key_id: is given twice"),
        (json.dumps({"allow_http": True}), "allow_http: give it as allow_http, and in"),
        (json.dumps({"colour": SECRET}), "does not support all of the given options"),
        (json.dumps({"endpoint": "http://h"}), "endpoint: begins with http://"),
    ],
)
def test_a_file_of_store_options_is_checked_as_they_are(tmp_path, content, said):
    path = tmp_path / "options.json"
    path.write_text(content)
    given = {"store_options": {"access_key_id": "AK"}, "store_options_file": str(path)}
    assert said in refusal(OBJECT | given)


def test_the_secrets_of_a_file_of_store_options_are_hidden_when_it_was_replaced_too(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"secret_access_key": SECRET}))
    given = {"store_options": {"access_key_id": "AK"}, "store_options_file": str(path)}
    settings = ObjectOptions.of(OBJECT | given, KVIdentity(model="org/model"))
    settings.open()
    path.write_text(json.dumps({"secret_access_key": "the new one"}))
    settings.open()
    assert settings.redact(f"said {SECRET} and the new one") == "said *** and ***"
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        (ObjectOptions, OBJECT | {"endpoint": f"https://user:{SECRET}@host"}),
        (MooncakeSettings, {"master": "h:1", "metadata_url": f"redis://:{SECRET}@host"}),
        (ValkeySettings, VALKEY | {"url": "valkey://user:s3cret%2Fp%40ss@host"}),
    ],
)
def test_a_url_with_a_user_is_not_in_the_repr_of_its_options(declared, given):
    settings = declared.of(given, KVIdentity(model="org/model", block_bytes=4096))
    assert "s3cret" not in repr(settings)


def test_what_the_command_line_shows_of_tiers_has_no_secret(tmp_path):
    path = tmp_path / "config.json"
    tiers = [
        VALKEY | {"url": f"valkey://u:{SECRET.replace('/', '%2F')}@host"},
        OBJECT | {"store_options": {"a_secret": SECRET, "signature": SECRET}},
        OBJECT | {"store_options": {"AWS_SECRET_ACCESS_KEY": SECRET, "access_key": SECRET}},
    ]
    config = {"cpu_bytes_to_use": "1MiB", "block_bytes": "16KiB", "secondary_tiers": tiers[:1]}
    path.write_text(json.dumps(config))
    shown = CliRunner().invoke(app, ["check-config", str(path)]).output
    assert "valkey://***@host" in shown
    text = f"{shown}{OffloadConfig.parse(config | {'secondary_tiers': tiers})!r}"
    text += json.dumps([without_secrets(tier) for tier in tiers])
    assert SECRET not in text
    assert "s3cret%2F" not in text


@pytest.mark.parametrize("wrap", [lambda tier: tier, lambda tier: [[tier]], lambda tier: [(tier,)]])
def test_tiers_that_are_no_list_of_objects_are_shown_without_secrets(wrap):
    tier = OBJECT | {"store_options": {"region": "eu", "secret_access_key": SECRET}}
    with pytest.raises(ConfigError, match=r"secondary_tiers.* is not valid") as raised:
        OffloadConfig.parse({"cpu_bytes_to_use": "1MiB", "secondary_tiers": wrap(tier)})
    assert SECRET not in str(raised.value)
    assert "'region': 'eu', 'secret_access_key': '***'" in str(raised.value)


def test_secrets_in_lists_of_a_tiers_options_are_masked():
    given = {
        "servers": ["redis://u:p@h", {"password": SECRET}],
        "passwords": [SECRET],
        "ports": [1],
    }
    assert without_secrets(given) == {
        "servers": ["redis://***@h", {"password": "***"}],
        "passwords": ["***"],
        "ports": [1],
    }


@pytest.mark.parametrize(
    "text",
    [
        f"valkey:url=redis://u:{SECRET}@h,x",
        f"theirs:depth=3,api_key={SECRET},x",
        f"theirs,api_key={SECRET}:depth=3,x",
        f"theirs,api_key={SECRET}:depth=3,depth=4",
        f'object:store_options={{"region":"eu","secret":"{SECRET}"}}',
        ":",
    ],
)
def test_a_tier_on_the_command_line_that_is_not_understood_is_shown_without_secrets(text):
    with pytest.raises(InputError) as raised:
        parse_tier(text)
    assert SECRET not in str(raised.value)
