"""What `kvoffload store` shows to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from kvoffload_async.abc.maintenance import StoreMaintenance, Summary


def summary_tables(summaries: Sequence[tuple[StoreMaintenance, Summary]]) -> Iterator[Table]:
    """Yield a table for each kind of store, with a column for each store."""
    for kind in dict.fromkeys(type(store) for store, _ in summaries):
        columns = [(store.name, found) for store, found in summaries if type(store) is kind]
        table = Table(title=columns[0][1].title, title_justify="left")
        table.add_column("namespace", style="bold")
        for name, _ in columns:
            table.add_column(Text(shown(name)), justify="right", overflow="fold")
        for rows in zip(*(found.rows for _, found in columns), strict=True):
            table.add_row(rows[0][0], *(Text(shown(value)) for _, value in rows))
        yield table


def shown(name: str) -> str:
    """Return a file's name as text that every terminal takes."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)
