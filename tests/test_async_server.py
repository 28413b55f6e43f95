"""The example of an asynchronous server, as a process of its own, over real sockets."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
from pathlib import Path

import preloaded
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "async_server.py"
TIMEOUT_S = 60
ROOMS = 6
PROMPT = "You are a helpful assistant that knows about caches. And what is a block?"


class Serving:
    """A server that is running."""

    def __init__(self, process, port):
        self.process, self.port = process, port

    def connect(self, method="GET", path="/metrics", body=None):
        """Send a request; return its connection and the answer, of which the body is to come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request(method, path, body)
        return connection, connection.getresponse()

    def generate(self, prompt, max_tokens=3):
        return self.connect(
            "POST", "/generate", json.dumps({"prompt": prompt, "max_tokens": max_tokens})
        )

    def answer(self, prompt, max_tokens=3):
        connection, response = self.generate(prompt, max_tokens)
        with contextlib.closing(connection):
            assert response.status == 200
            return [json.loads(line) for line in response.read().splitlines()]

    def metrics(self):
        connection, response = self.connect()
        with contextlib.closing(connection):
            families = list(text_string_to_metric_families(response.read().decode()))
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    def metrics_when(self, condition):
        """Read the metrics until they are so; the test's own deadline ends it."""
        while not condition(metrics := self.metrics()):
            pass
        return metrics

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def end(self):
        """Return the exit status, and what was printed after the first line."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert errors == ""
        return self.process.returncode, output


@pytest.fixture(scope="module")
def start():
    """Start servers; those that still run in the end are killed."""
    with contextlib.ExitStack() as killed:

        def start(*arguments):
            process = killed.enter_context(
                subprocess.Popen(
                    [preloaded.python(), str(EXAMPLE), "--port", "0", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={"PYTHONPATH": str(ROOT)},
                )
            )
            killed.callback(process.kill)
            line = process.stdout.readline()
            found = re.fullmatch(r"serving on http://127.0.0.1:(\d+)\n", line)
            assert found, line + process.communicate(timeout=TIMEOUT_S)[1]
            return Serving(process, int(found[1]))

        yield start


@pytest.fixture(scope="module")
def serving(start):
    """One server for all that leave it as it was."""
    serving = start("--token-seconds", "0.01")
    yield serving
    serving.terminate()
    assert serving.end()[0] == 0


def test_a_server_streams_ends_what_runs_at_sigterm_and_is_warm_after_a_restart(start, tmp_path):
    config = tmp_path / "config.json"
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv")}
    config.write_text(
        json.dumps({"cpu_bytes_to_use": "1MiB", "model": "org/m", "secondary_tiers": [tier]})
    )
    server = start("--config", str(config), "--drain-seconds", "30")
    first, *tokens = server.answer(PROMPT)
    assert first == {"loaded_blocks": 0, "computed_blocks": 4}
    assert tokens == [{"text": "la "}] * 3
    assert server.answer(PROMPT[:40] + "?")[0] == {"loaded_blocks": 2, "computed_blocks": 0}
    connection, response = server.generate(PROMPT, max_tokens=20)
    with contextlib.closing(connection):
        assert json.loads(response.readline()) == {"loaded_blocks": 4, "computed_blocks": 0}
        server.terminate()
        assert len(response.read().splitlines()) == 20
    assert server.end() == (0, "closing after 3 requests\n")

    again = start("--config", str(config), "--token-seconds", "1")
    connection, response = again.generate(PROMPT, max_tokens=10_000)
    with contextlib.closing(connection):
        assert json.loads(response.readline()) == {"loaded_blocks": 4, "computed_blocks": 0}


def test_at_the_drain_deadline_a_stream_is_cut_off_and_the_server_ends_well(start):
    server = start("--token-seconds", "0.01", "--drain-seconds", "0.2")
    connection, response = server.generate(PROMPT, max_tokens=10_000)
    with contextlib.closing(connection):
        response.readline()
        server.terminate()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    assert server.end() == (0, "closing after 1 requests\n")


def test_clients_that_go_away_mid_stream_are_cancelled_and_their_rooms_given_back(serving):
    before = serving.metrics()
    for number in range(2 * ROOMS):
        connection, response = serving.generate(f"{number}: {PROMPT}", max_tokens=10_000)
        response.readline()
        connection.close()
        response.close()
    pinned, requests = ("kvoffload_primary_slots", "0", "pinned"), ("kvoffload_requests", "0")
    cancelled = ("server_cancelled_total",)
    serving.metrics_when(lambda now: now[cancelled] - before[cancelled] == 2 * ROOMS)
    serving.metrics_when(
        lambda now: now["server_free_rooms",] == ROOMS and now[pinned] == now[requests] == 0
    )
    assert len(serving.answer(PROMPT)) == 4


def test_metrics_are_those_of_engine_and_server(serving):
    before = serving.metrics()
    serving.answer("A prompt of its own: " + PROMPT)
    now = serving.metrics()
    stored = "kvoffload_primary_stored_blocks_total", "0"
    assert now[stored] - before[stored] == 5
    assert now["server_cancelled_total",] == before["server_cancelled_total",]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"\x00\xff\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400),
        (b'POST /generate HTTP/1.1\r\nContent-Length: 20\r\n\r\n{"prompt": "\\ud800"}', 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 20000\r\n\r\n" + b"[" * 20000, 400),
        (
            b'POST /generate HTTP/1.1\r\nContent-Length: 314\r\n\r\n{"prompt": "'
            + b"x" * 300
            + b'"}',
            413,
        ),
    ],
)
def test_what_is_no_request_gets_an_answer_and_disturbs_nobody(serving, request_, status):
    with socket.create_connection(("127.0.0.1", serving.port), timeout=TIMEOUT_S) as client:
        client.sendall(request_)
        if status == 400:
            client.shutdown(socket.SHUT_WR)
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 %d " % status)
    assert len(serving.answer(PROMPT)) == 4


def test_a_configuration_that_is_wrong_is_one_line(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"cpu_bytes_to_use": "soon"}')
    done = subprocess.run(
        [preloaded.python(), str(EXAMPLE), "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("async_server: cpu_bytes_to_use: 'soon'")
    assert done.stderr.count("\n") == 1
