"""A system that gives no thread: a library, loaded before a program, that refuses `pthread_create`.

Python's threads, native ones and those of libraries all come from that call. In the program,
`refuse(n, only)` has the n-th start from now on fail with EAGAIN, counted from 0, and unless
`only` all later ones too; `seen()` returns the starts since.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest

from kvoffload_async.block_io import build

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

static atomic_long starts, first = -1, last = -1;

void kvo_refuse(long from, long to) { starts = 0; first = from; last = to; }
long kvo_seen(void) { return starts; }

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *argument)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        dlsym(RTLD_NEXT, "pthread_create");
    long number = starts++;
    if (first >= 0 && number >= first && (last < 0 || number <= last))
        return EAGAIN;
    return real(thread, attributes, run, argument);
}
"""
EVERY = -1


def library(folder: Path) -> Path:
    """Compile the library; skips where there is no compiler."""
    source, target = folder / "refuse_threads.c", folder / "refuse_threads.so"
    source.write_text(SOURCE)
    try:
        compiler = build.compiler()
    except build.UnavailableError as error:
        pytest.skip(str(error))
    subprocess.run([*compiler, "-shared", "-fPIC", source, "-o", target, "-ldl"], check=True)
    return target


def refuse(number: int, *, only: bool) -> None:
    ctypes.CDLL(None).kvo_refuse(ctypes.c_long(number), ctypes.c_long(number if only else EVERY))


def allow() -> None:
    ctypes.CDLL(None).kvo_refuse(ctypes.c_long(EVERY), ctypes.c_long(EVERY))


def seen() -> int:
    return int(ctypes.CDLL(None).kvo_seen())
