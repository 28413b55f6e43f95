"""A program that is forked from the server is to its caller what the interpreter's would be."""

import os
import signal
import subprocess

import pytest
from preloaded import DEADLINE_S, python


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": DEADLINE_S} | options
    return subprocess.run([python(), *arguments], check=False, **options)


def test_it_has_the_callers_folder_environment_arguments_and_standard_streams(tmp_path):
    (tmp_path / "helper.py").write_text("name = 'beside it'\n")
    (tmp_path / "program.py").write_text(
        "import helper, os, sys\n"
        "print(helper.name, os.getcwd(), os.environ['GIVEN'], sys.argv[1:], input())\n"
        "print('an error', file=sys.stderr)\n"
    )
    environment = os.environ | {"GIVEN": "a variable"}
    done = run(tmp_path / "program.py", "a b", input="héllo", cwd=tmp_path, env=environment)
    printed = f"beside it {tmp_path} a variable ['a b'] héllo\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "an error\n")


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('refused')", 1, "refused\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import warnings; warnings.warn('old')", 1, "UserWarning: old"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import sys; sys.stdout.close()", 0, ""),
    ],
)
def test_it_ends_as_the_interpreter_does(code, status, error):
    done = run("-c", code)
    assert done.returncode == status
    assert error in done.stderr
    assert bool(done.stderr) is bool(error)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_program_reaches_the_process(number):
    # A signal just before `signal.pause` would not wake it: the interpreter handles it afterwards.
    code = "import time; print('runs', flush=True)\nwhile True: time.sleep(0.01)"
    with subprocess.Popen(
        [python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout.readline() == b"runs\n"
        program.send_signal(number)
        assert program.wait(DEADLINE_S) == -number
        assert program.stdout.read() == b"", "the process has ended too, and closed its end"
