"""Credentials in files may be replaced while a tier is open; the library reads them only once."""

import asyncio
import base64
import json
import shutil
import subprocess
import threading

import pytest
from remote.object.tiers import tier_on
from servers.scripted_http import ScriptedServer

from kvoffload_async.errors import ConfigError
from kvoffload_async.testing import TierHarness
from kvoffload_async.tiers.object.client import ObjectClient
from kvoffload_async.tiers.object.tier import ObjectOptions, StoreOptionsFile
from kvoffload_async.tiers.remote.client import RefusedError

pytest.importorskip("obstore", reason="needs the extra object")


def new_account(number, port):
    """Return a service account's file, with a key of its own."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    command = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"]
    key = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    account = {"private_key": key, "private_key_id": str(number), "client_email": "kv@project"}
    return json.dumps(account | {"gcs_base_url": f"http://127.0.0.1:{port}"})


def account_of(request):
    """Return which key has signed a request."""
    token = request.headers["Authorization"].removeprefix("Bearer ")
    return json.loads(base64.urlsafe_b64decode(token.partition(".")[0] + "=="))["kid"]


def test_a_new_service_account_is_used_after_the_old_one_was_refused(tmp_path):
    valid = {"1"}
    file = tmp_path / "account.json"

    def answer(request):
        request.reply(200 if account_of(request) in valid else 401)

    async def run(connection):
        async def reopen():
            return connection.open()

        client = ObjectClient(connection.open(), "0" * 32, {}, reopen=reopen)

        async def is_refused():
            try:
                await client.check(None)
            except Exception as error:  # noqa: BLE001 - the library's, or of the file
                return isinstance(client.mapped(error), RefusedError)
            return False

        assert not await is_refused()
        file.write_text(new_account(2, server.port))
        assert not await is_refused()  # the file is not read while the old account is valid
        valid.clear()
        assert await is_refused()
        file.write_text("{}")
        with pytest.raises(ConfigError, match="cannot be used with the given options"):
            await client.check(None)
        file.write_text(new_account(2, server.port))
        assert await is_refused()
        valid.add("2")
        assert not await is_refused()

    with ScriptedServer(answer) as server:
        file.write_text(new_account(1, server.port))
        options = {"service_account": str(file), "allow_http": True}
        asyncio.run(run(ObjectOptions(url="gs://bucket", store_options=options)))


def test_no_file_is_read_on_the_loop_whose_other_tiers_would_hang_with_it(connection):
    names = []

    class Watched(StoreOptionsFile):
        def read(self, redact):
            names.append(threading.current_thread().name)
            return {}

    options_file = Watched("/", "store_options_file")
    with TierHarness(tier_on(connection, options_file=options_file), 64) as harness:

        async def loops_thread():
            return threading.current_thread().name

        assert harness.run(loops_thread()) not in names
    assert names
