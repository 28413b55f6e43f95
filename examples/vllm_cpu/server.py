"""A vLLM server in a subprocess, which is always stopped.

Every wait has a deadline; the error at a deadline includes the server's output.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

MODULE = "kvoffload_async.integrations.vllm"
MODEL_NAME = "smollm2"
START_S = 180.0
REQUEST_S = 120.0
RESET_S = 30.0
STOP_S = 60.0
POLL_S = 0.25
EXCEPTION = re.compile(r"(?<![\w.`])[\w.]+(Error|Exception): .+")

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it there is no endpoint to reset the prefix cache
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class ServerError(Exception):
    """The server did not start, answer or stop correctly; includes its output."""


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt.

    Attributes:
        first_token_s: Seconds from asking to the first token.
        prompt_tokens: Tokens of the prompt, as the server counts them.
        tokens: The tokens generated.
    """

    first_token_s: float
    prompt_tokens: int
    tokens: tuple[int, ...]


def transfer_config(spec: str, tier: dict[str, Any], primary_bytes: int) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config` for a spec and its secondary tier."""
    connector = {"kv_connector": "OffloadingConnector"}
    if spec == "KVOffloadSpec":  # its own connector reports failed loads, which vLLM then computes
        connector = {"kv_connector": "KVOffloadConnector", "kv_connector_module_path": MODULE}
    return {
        **connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": spec,
            "spec_module_path": MODULE,
            "cpu_bytes_to_use": primary_bytes,
            "secondary_tiers": [tier],
        },
    }


class Server:
    """vLLM's OpenAI-compatible server on this machine.

        with Server(model, log, transfer_config(...)) as server:
            server.complete("Once upon a time")

    Args:
        model: The model folder.
        log: The file to which the server's output is appended.
        transfer: What `--kv-transfer-config` says; None to serve without offloading.
        options: More options of the server.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: dict[str, Any] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        # Not `vllm serve`: it requires a distribution called vllm, and this one is vllm-cpu.
        self._command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
        self._command += ["--model", str(model), "--served-model-name", MODEL_NAME]
        self._command += ["--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--max-model-len", "4096"]
        self._command += ["--enforce-eager"]  # compiling takes longer than everything else here
        if transfer is not None:
            self._command += ["--kv-transfer-config", json.dumps(transfer)]
        self._command += options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the command is made above
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,  # a process group, to kill the workers too
            )
        try:
            self._await_health()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop the server, or kill it if the caller failed or was stopped itself."""
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def group(self) -> int:
        """The process group of the server and its workers."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    # -- asking ---------------------------------------------------------------------------------

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 16) -> Answer:
        """Complete a prompt, a text or tokens, with greedy decoding."""
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0}
        body |= {
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"return_token_ids": True, "ignore_eos": True}
        tokens: list[int] = []
        first_token_s, prompt_tokens = 0.0, 0
        began_s = time.monotonic()
        with self._open("POST", "/v1/completions", body) as lines:
            for line in lines:
                if time.monotonic() - began_s > REQUEST_S:
                    raise ServerError(f"no whole answer within {REQUEST_S:.0f} s\n{self.said()}")
                event = line.decode().removeprefix("data:").strip()
                if not event or event == "[DONE]":
                    continue
                part = json.loads(event)
                if "error" in part:
                    raise ServerError(f"{part['error']}\n{self.said()}")
                for choice in part["choices"]:
                    first_token_s = first_token_s or time.monotonic() - began_s
                    tokens += choice.get("token_ids") or ()
                prompt_tokens = (part.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        return Answer(first_token_s, prompt_tokens, tuple(tokens))

    def reset(self) -> None:
        """Empty the prefix cache and the offloading spec's primary; tiers keep their blocks.

        The server refuses this while blocks are being stored in a tier, so it is retried.
        """
        deadline_s = time.monotonic() + RESET_S
        while True:
            with self._open("POST", "/reset_prefix_cache?reset_external=true") as answer:
                if json.load(answer)["success"]:
                    return
            if time.monotonic() > deadline_s:
                raise ServerError(f"no reset within {RESET_S:.0f} s\n{self.said()}")
            self._pause()

    def counters(self) -> defaultdict[str, float]:
        """Return /metrics, summed over labels; names without vLLM's prefix and `_total`."""
        sums: defaultdict[str, float] = defaultdict(float)
        with self._open("GET", "/metrics") as lines:
            for line in lines:
                series, _, value = line.decode().strip().rpartition(" ")
                name = series.partition("{")[0].removeprefix("vllm:")
                if series and not name.startswith("#") and not name.endswith("_created"):
                    sums[name.removesuffix("_total")] += float(value)
        return sums

    # -- ending ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the server like a service manager: SIGTERM, then SIGKILL after a deadline.

        Raises:
            ServerError: The server had to be killed.
        """
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"SIGTERM did not end it within {STOP_S:.0f} s\n{self.said()}"
            ) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the server and its workers with SIGKILL."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # server and workers have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        self._process = None

    def said(self) -> str:
        """Return every exception in the log, the first one first.

        vLLM's processes fail one after the other, so the end of the log rarely names the cause.
        """
        lines = self._log.read_text(errors="replace").splitlines()
        raised = dict.fromkeys(match[0] for line in lines if (match := EXCEPTION.search(line)))
        return "\n".join([*raised, f"The server's output is in {self._log}"])

    # -- inside ---------------------------------------------------------------------------------

    def _await_health(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), self._open("GET", "/health"):
                return
            if time.monotonic() > deadline_s:
                raise ServerError(f"not up within {START_S:.0f} s\n{self.said()}")
            self._pause()

    def _pause(self) -> None:
        """Wait briefly; raises ServerError if the server has ended."""
        if self._process is None:
            raise ServerError("the server is not running")
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(POLL_S)
            raise ServerError(f"the server has ended with code {code}\n{self.said()}")

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        """Send a request; the caller must close the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - this machine's own http
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            answer: http.client.HTTPResponse
            answer = urllib.request.urlopen(request, timeout=REQUEST_S)  # noqa: S310 - as above
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode(errors="replace")
            raise ServerError(f"{method} {path}: {error}: {detail}\n{self.said()}") from error
        return answer
