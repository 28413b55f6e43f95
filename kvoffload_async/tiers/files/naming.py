"""Names that people give, as names of files."""

from __future__ import annotations

_MAX_NAME_BYTES = 200


def safe_name(model_name: str) -> str:
    """Return a model's name as one path component, whatever characters it has."""
    flat = model_name.replace("/", "_").replace("\0", "_")
    return flat.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore")
