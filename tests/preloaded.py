"""Python programs in processes that have imported torch and the package before they start.

`python()` names a program that is called like the interpreter, with a script, `-m` or `-c`. It
hands its arguments, its environment and what it reads and writes to a server, which forks a process
for them: that takes milliseconds, where imports take seconds. Warnings are errors there. Signals
reach the process, and whoever kills the program kills the process too.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEADLINE_S = 100
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_MAX_REQUEST = 1 << 20


@functools.cache
def python() -> Path:
    """Start the server of this process, which ends with it; return the program."""
    folder = Path(tempfile.mkdtemp(prefix="kvoffload-python-"))
    path = folder / "server"
    server = subprocess.Popen(
        [sys.executable, "-W", "error", __file__, "serve", str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for those who asked, who pass it on
    )
    atexit.register(_end, server, folder)
    if not select.select([server.stdout], [], [], DEADLINE_S)[0] or not server.stdout.read(1):
        raise RuntimeError("the server has not started")
    program = folder / "python"
    words = shlex.join([sys.executable, "-I", "-S", __file__, "call", str(path)])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    return program


def _end(server: subprocess.Popen, folder: Path) -> None:
    server.stdin.close()
    server.stdout.close()
    try:
        server.wait(DEADLINE_S)
    finally:
        server.kill()
        for path in (folder / "python", folder / "server"):
            path.unlink(missing_ok=True)
        folder.rmdir()


# -- the program --------------------------------------------------------------------------------


def call(path: str, arguments: list[str]) -> int:
    """Have a program run; return its exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = {"arguments": arguments, "cwd": str(Path.cwd()), "environ": dict(os.environ)}
        socket.send_fds(server, [b"f"], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        for number in _FORWARDED:
            signal.signal(number, lambda number, _frame: server.send(bytes([number])))
        for standard in (0, 1, 2):  # whoever reads the other end of one sees it end
            os.close(standard)
        status = int(server.makefile("rb").readline() or b"-9")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    return status


# -- the server ---------------------------------------------------------------------------------


def serve(path: str) -> list[str] | None:
    """Fork for every request; return a program's arguments in its process, and None in the end."""
    _import_everything()
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, _reap)
        os.write(1, b"r")
        while True:
            readable, _, _ = select.select([listener, 0], [], [])
            if 0 in readable:
                return None
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with client:
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        request = json.loads(client.makefile("rb").readline(_MAX_REQUEST))
        program = os.fork()
        if program:
            _watch(program, client, files)
    return _become(request, files)


def _import_everything() -> None:
    import torch  # noqa: F401

    import kvoffload_async.cli.app
    import kvoffload_async.facade.tier_factory  # noqa: F401


def _reap(_number: int, _frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _watch(program: int, client: socket.socket, files: list[int]) -> None:
    """Pass signals on to a program until it ends, and its status back; ends this process."""
    try:
        for file in (*files, 0, 1, 2):
            os.close(file)
        ended = os.pidfd_open(program)
        while ended not in (readable := select.select([ended, client], [], [])[0]):
            if readable:
                number = client.recv(1)
                os.kill(program, number[0] if number else signal.SIGKILL)
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(OSError):
            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    finally:
        os._exit(0)


def _become(request: dict, files: list[int]) -> list[str]:
    """Take over what a process inherits when it is started; return the arguments."""
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    encoding = {"encoding": "utf-8", "closefd": False}
    sys.stdin = os.fdopen(0, **encoding)
    sys.stdout = os.fdopen(1, "w", 1 if os.isatty(1) else -1, **encoding)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", **encoding)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    arguments = request["arguments"]
    return arguments[2:] if arguments[:2] == ["-W", "error"] else arguments


def run(arguments: list[str]) -> None:
    """Run a program, and end this process as the interpreter does, but for what it tears down."""
    status = 0
    try:
        _execute(arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            status = ended.code or 0
        else:
            sys.stderr.write(f"{ended.code}\n")
            status = 1
    except BaseException as error:  # noqa: BLE001 - the process ends here, whatever it was
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    gc.collect()
    if not sys.stdout.closed:
        sys.stdout.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


def _execute(arguments: list[str]) -> None:
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(code, {"__name__": "__main__"})  # noqa: S102 - as the interpreter does
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _, role, address, *words = sys.argv
    del sys.path[0]
    if role == "call":
        sys.exit(call(address, words))
    given = serve(address)
    if given is not None:
        run(given)
