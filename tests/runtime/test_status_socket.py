"""A Unix socket that answers: whose path it is, and what clients can do to it."""

import contextlib
import os
import socket
import stat
import threading
from types import SimpleNamespace

import pytest
from runtime.sockets import DEADLINE_S, connected, received

from kvoffload_async.errors import ConfigError
from kvoffload_async.status import server as status_socket
from kvoffload_async.status.server import MAX_QUEUED, MAX_REQUEST_BYTES, StatusSocket


class Served:
    """A status socket that serves a client when the test says so."""

    def __init__(self, path, answer=lambda request: b"<" + request + b">"):
        self.socket = StatusSocket(str(path))
        self.answer = answer
        self.clients = []

    def connect(self, sends=b""):
        client = connected(self.socket.path)
        client.sendall(sends)
        self.clients.append(client)
        return client

    def serve(self, count=1):
        for _ in range(count):
            self.socket._serve_next(self.answer)

    def end(self):
        self.socket.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def path(tmp_path_factory):
    """A short one, as `sockaddr_un` demands."""
    return tmp_path_factory.mktemp("s") / "kv.sock"


@pytest.fixture
def served(path):
    made = Served(path)
    yield made
    made.end()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(status_socket, "CONNECTION_TIMEOUT_S", 0.01)


# -- answers ------------------------------------------------------------------------------------


def test_a_line_is_answered_with_a_line_and_the_connection_ends(served):
    client = served.connect(b"status\nmore")
    served.serve()
    assert received(client) == b"<status>\n"


def test_a_request_may_come_in_parts(served):
    client = served.connect(b"sta")
    timer = threading.Timer(0.01, client.sendall, [b"tus\n"])
    timer.start()
    served.serve()
    assert received(client) == b"<status>\n"
    timer.join(DEADLINE_S)


def test_a_client_is_answered_after_an_error_in_an_answer_to_another(path, caplog):
    def answer(request):
        if request == b"bad":
            raise SystemExit(1)
        return request

    made = Served(path)
    made.socket.serve(answer)
    assert received(made.connect(b"bad\n")) == b""
    assert received(made.connect(b"good\n")) == b"good\n"
    made.end()
    assert caplog.text.count("answering a client of the status socket failed") == 1


# -- hostile clients ----------------------------------------------------------------------------


def test_a_request_without_an_end_is_refused(served):
    client = served.connect(b"x" * (1 << 15))
    served.serve()
    with contextlib.suppress(ConnectionResetError):  # not all of it was read
        assert received(client) == b""
    client = served.connect(b"x" * MAX_REQUEST_BYTES + b"\n")
    served.serve()
    assert received(client) == b"<" + b"x" * MAX_REQUEST_BYTES + b">\n"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sends", [b"", b"slow"])
def test_one_that_asks_nothing_is_dropped_at_its_deadline(served, sends):
    client = served.connect(sends)
    served.serve()
    assert received(client) == b""


def test_one_that_sends_its_request_byte_by_byte_has_no_more_time_for_it(served, monkeypatch):
    client = served.connect(b"s")
    passed_s = iter([0.0, 0.0, status_socket.CONNECTION_TIMEOUT_S])
    clock = SimpleNamespace(monotonic=lambda: next(passed_s))
    monkeypatch.setattr(status_socket, "time", clock)
    served.serve()
    assert received(client) == b""


@pytest.mark.usefixtures("impatient")
def test_one_that_never_reads_is_dropped_and_others_are_answered(path):
    made = Served(path, lambda request: request * (1 << 20))
    deaf = made.connect(b"long\n")
    client = made.connect(b"\n")
    made.serve(2)
    assert received(client) == b"\n"
    assert 0 < len(received(deaf)) < 4 << 20
    made.end()


@pytest.mark.parametrize("sends", [b"", b"status\n", b"sta"])
def test_one_that_goes_away_is_forgotten(path, sends):
    made = Served(path, lambda request: request * (1 << 20))
    made.connect(sends).close()
    made.serve()
    made.end()


def test_a_thousand_connections_are_the_systems_to_refuse(served):
    refused, flood = 0, []
    for _ in range(1000):
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        flood.append(client)
        try:
            client.connect(served.socket.path)
        except BlockingIOError:
            refused += 1
    assert refused > 900
    for client in flood:
        client.close()
    served.serve(MAX_QUEUED + 1)
    client = served.connect(b"status\n")
    served.serve()
    assert received(client) == b"<status>\n"


def test_a_shortage_of_descriptors_ends_nothing(served):
    class Full:
        def accept(self):
            raise OSError(24, "Too many open files")

    client = served.connect(b"status\n")
    listener, served.socket._listener = served.socket._listener, Full()
    served.serve()
    served.socket._listener = listener
    served.serve()
    assert received(client) == b"<status>\n"


# -- the thread ---------------------------------------------------------------------------------


def test_the_thread_answers_until_the_socket_is_closed(path):
    made = StatusSocket(str(path))
    made.serve(lambda request: request)
    for _ in range(3):
        client = connected(str(path))
        client.sendall(b"status\n")
        assert received(client) == b"status\n"
        client.close()
    made.close()
    made.close()
    assert not path.exists()


@pytest.mark.parametrize("sends", [b"", b"sta"])
def test_closing_ends_a_connection_that_is_open(path, sends):
    made = StatusSocket(str(path))
    made.serve(lambda request: request)
    client = connected(str(path))
    client.sendall(sends)
    made.close()
    assert not made._thread.is_alive()
    with contextlib.suppress(ConnectionResetError):  # it may not have been accepted yet
        assert received(client) == b""
    client.close()


def test_closing_does_not_wait_for_ever_for_an_answer(path, monkeypatch, caplog):
    monkeypatch.setattr(status_socket, "_STOP_S", 0.01)
    asked, go_on = threading.Event(), threading.Event()

    def answer(request):
        asked.set()
        go_on.wait(DEADLINE_S)
        return request

    made = StatusSocket(str(path))
    made.serve(answer)
    client = connected(str(path))
    client.sendall(b"status\n")
    assert asked.wait(DEADLINE_S)
    made.close()
    assert "did not stop" in caplog.text
    assert not path.exists()
    go_on.set()
    made._thread.join(DEADLINE_S)
    assert made._listener.fileno() == -1
    received(client)  # its connection has ended as well
    client.close()


# -- the path -----------------------------------------------------------------------------------


def test_a_path_that_is_too_long_is_said_to_be(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot create a socket at .*: AF_UNIX path too long"):
        StatusSocket(str(tmp_path / ("x" * 108)))


def test_only_this_user_can_connect(path):
    before = os.umask(0)
    try:
        made = StatusSocket(str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.close()


def test_the_socket_of_a_dead_process_is_replaced(path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    made = StatusSocket(str(path))
    connected(str(path)).close()
    made.close()
    assert not path.exists()


@pytest.mark.parametrize("queued", [0, 2])
def test_the_socket_of_a_living_process_is_left_alone(path, queued):
    living = socket.socket(socket.AF_UNIX)
    living.bind(str(path))
    living.listen(1)
    clients = [connected(str(path)) for _ in range(queued)]  # more than that, and it is full
    who = "a busy process" if queued else f"process {os.getpid()}"
    with pytest.raises(ConfigError, match=rf"status_socket: .* in use by {who}; give"):
        StatusSocket(str(path))
    assert path.exists()
    for opened in (living, *clients):
        opened.close()


def test_what_is_no_socket_is_left_alone(path):
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a socket; give another"):
        StatusSocket(str(path))
    assert path.read_text() == "mine"


def test_a_link_is_not_followed(path):
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="is not a socket"):
        StatusSocket(str(path))


def test_a_directory_that_is_not_there_is_named(path):
    with pytest.raises(
        ConfigError, match=r"cannot create a socket at .* No such file or directory"
    ):
        StatusSocket(str(path.parent / "no" / "kv.sock"))


def test_a_directory_that_another_keeps_locked_is_waited_for_but_not_for_ever(path, monkeypatch):
    import fcntl

    monkeypatch.setattr(status_socket, "_LOCK_PAUSE_S", 0.0)
    fd = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match=r"is locked by another process"):
        StatusSocket(str(path))
    os.close(fd)
    StatusSocket(str(path)).close()


def test_closing_leaves_what_others_have_put_there(path):
    made = StatusSocket(str(path))
    path.unlink()
    path.write_text("theirs")
    made.close()
    assert path.read_text() == "theirs"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_takes_its_path_away_and_what_comes_there_stays(path):
    def fail(_request):
        raise KeyboardInterrupt

    made = StatusSocket(str(path))
    made.serve(fail)
    client = connected(str(path))
    client.sendall(b"status\n")
    made._thread.join(DEADLINE_S)
    assert received(client) == b""
    client.close()
    assert not path.exists(), "nobody listens there any more"
    other = StatusSocket(str(path))  # which may have got the same inode
    made.close()
    assert path.is_socket()
    other.close()


def test_a_file_is_told_from_another_one_that_has_its_inode(path):
    made = StatusSocket(str(path))
    os.utime(path, (0, 0))
    made.close()
    assert path.is_socket()


def test_closing_is_fine_with_a_path_that_is_gone_or_cannot_be_removed(path, caplog, monkeypatch):
    made = StatusSocket(str(path))
    path.unlink()
    made.close()
    assert not caplog.text
    made = StatusSocket(str(path))
    made.path = str(path / "below")
    made.close()
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize("closes", [True, False])
def test_a_forked_child_does_not_keep_the_socket_alive_or_remove_it(path, closes):
    made = StatusSocket(str(path))
    made.serve(lambda request: request)
    held, release = os.pipe()
    done, report = os.pipe()
    pid = os.fork()
    if not pid:  # pragma: no cover - in the child
        os.close(release)
        if closes:
            made.close()
        os.write(report, b"done")
        os.read(held, 1)
        os._exit(0)
    assert os.read(done, 4) == b"done"
    client = connected(str(path))
    client.sendall(b"status\n")
    assert received(client) == b"status\n"
    client.close()
    made._identity = None  # as if this process had died: nothing is removed
    made.close()
    StatusSocket(str(path)).close()
    for fd in (release, held, done, report):
        os.close(fd)
    os.waitpid(pid, 0)
