"""Whether pictures can be drawn, found out before anything starts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

from kvoffload_async.cli.output import check_writable
from kvoffload_async.errors import InputError

_PAGES: Final = (".html", ".htm")


def drawing_module(option: str, name: str) -> Any:  # noqa: ANN401 - a module
    """Import a module that draws.

    Raises:
        InputError: There is no matplotlib.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{option} needs matplotlib ({error}); pip install 'kvoffload-async[plot]'"
        ) from error


def check_picture(option: str, path: Path | None, module: str) -> None:
    """Check that a picture can be drawn and written there, if there is to be one.

    Raises:
        InputError: It cannot.
    """
    if path is None:
        return
    check_writable(option, str(path))
    known = drawing_module(option, module).check_suffix(path)
    if known is not None:
        raise InputError(
            f"{option} {path}: {path.suffix!r} is no kind of picture; use one of {known}"
        )


def check_page(option: str, path: Path | None, module: str) -> None:
    """Check that a page with pictures can be written there, if there is to be one.

    Raises:
        InputError: It cannot.
    """
    if path is None:
        return
    check_writable(option, str(path))
    if path.suffix.lower() not in _PAGES:
        raise InputError(f"{option} {path}: {path.suffix!r} is no kind of page; use .html")
    drawing_module(option, module)
