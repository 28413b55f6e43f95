"""Keeps secrets out of every text: known ones by their value, those in a URL by their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, quote_plus

from kvoffload_async.config import HIDDEN, without_user_info

_LEAST_CHARS: Final = 3


class Redactor:
    """Hides known secrets in texts; its own `repr` has none. Thread: any."""

    __slots__ = ("_secrets",)

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Hide these, as they are and as a URL would quote them.

        Shorter ones than three characters hide nothing: they would be found in every other word.
        """
        forms: set[str] = set()
        for secret in secrets:
            forms |= {secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]}
        self._secrets = sorted(
            (form for form in forms if len(form) >= _LEAST_CHARS), key=len, reverse=True
        )

    def __repr__(self) -> str:
        return f"Redactor({len(self._secrets)} secrets)"

    def __call__(self, text: object) -> str:
        """Return a text, or what an error says, without the secrets."""
        shown = without_user_info(str(text))
        for secret in self._secrets:
            shown = shown.replace(secret, HIDDEN)
        return shown
