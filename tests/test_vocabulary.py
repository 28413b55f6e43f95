"""Names that were retired in favour of the field's own words do not come back."""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvoffload_async

PACKAGE = Path(kvoffload_async.__file__).parent
TESTS = Path(__file__).parent

EVERYWHERE = {
    "story storylaws restlaws statelaws": "history, invariants",
    "lane lanes": "transfer queue, stream",
    "passage passages": "transfer",
    "piece pieces": "extent",
    "rival rivals": "other direction",
    "shelf shelves": "data path, store",
    "wishes": "options",
    "unsealed": "without a digest",
    "stranger strangers": "unknown file",
    "bury buried": "sweep",
    "broom keeper doomed": "housekeeping",
    "roads wholes mending survey": "drivers, repair, scan",
    "aside": "to_thread",
    "held": "retained",
    "let_go": "release",
    "void": "stale",
    "outrun": "overrun",
    "take_out": "invalidate",
    "spared": "not written",
    "told": "reported",
    "tier_slot tier_port": "tier state",
    "owe owed owes backlog backlogs": "pending, write-back queue",
    "disown disowned": "orphan, orphaned",
    "foreign": "external",
    "payback": "break-even",
    "selective": "cost-gated",
    "own_context": "engine context",
    "guard_found": "pin_step_hits",
    "keys_decided": "on_resolved",
    "contained": "guarded",
    "grouped_call shared_thread": "coalescer, serial executor",
    "anchor": "directory identity",
    "sighting sightings": "bucket scan",
    "own_count": "unreported usage",
    "roomless": "unplaced",
    "next_journal tend": "compaction, compact_step",
    "suspect suspects": "needs verification",
    "nobodies": "placeholders",
    "answer_memory": "existence cache",
    "is_lead spacing": "is_chunk_boundary, mean_blocks",
    "floor floors": "baseline",
    "laws": "invariants",
    "doubtful": "undecided",
    "heed heeds heeding": "update_protection, includes_stores",
    "last_to_go": "protected slots",
    "litter": "leftover temporaries",
    "may_go": "is_evictable",
    "sorted_out": "classify",
}
"""Retired words, one or several, each as whole words of a name, and what to say instead."""

IN_SLAB = {
    "room": "allocator",
    "stay turn turns": "quantum",
    "generation": "sequence number",
    "snapshot": "checkpoint",
    "tail": "log",
}
"""What is retired in the slab tier alone; elsewhere these are plain English, or other things."""

ALLOWED = {
    "piece_bytes": "of `block_io`: bytes of one system call, which may cover several blocks",
    "piece": "an argument of `Catalog`",
    "make_room": "of `CachePolicy`",
    "_bury": "of ARC: keys of victims become ghosts",
    "nothing_is_set_aside_while_no_job_runs": "to set aside is plain English for to reserve",
}
"""Names that keep a retired word, and why."""


def words_of(name: str) -> list[str]:
    """Split snake_case and CamelCase into words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


@functools.cache
def names_in(path: Path) -> Sequence[tuple[str, int]]:
    """Return the module's name and those of its classes, functions and arguments, with lines."""
    names = [(path.stem, 1)]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test_"):
                pass  # a sentence, not a term
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.append((node.name, node.lineno))
            case ast.arg():
                names.append((node.arg, node.lineno))
    return names


def retired_in(name: str, terms: dict[str, str]) -> Iterator[str]:
    """Yield the retired terms in a name."""
    text = f"_{'_'.join(words_of(name))}_"
    for line in terms:
        yield from (term for term in line.split() if f"_{term}_" in text)


def findings(path: Path) -> Iterator[str]:
    terms = EVERYWHERE | (IN_SLAB if "slab" in path.parts else {})
    for name, line in names_in(path):
        for term in retired_in(name, terms) if name not in ALLOWED else ():
            yield f"{path}:{line}: {name} has the retired word {term!r}"


@pytest.mark.slow
def test_no_module_class_function_or_argument_has_a_retired_name():
    paths = sorted([*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")])
    assert paths
    assert [found for path in paths for found in findings(path)] == []


def test_a_retired_word_is_found_in_every_kind_of_name(tmp_path):
    path = tmp_path / "slab" / "lane.py"
    path.parent.mkdir()
    path.write_text("class UnsealedMemory:\n    def let_go(self, is_void, /, *told, room=0): ...\n")
    found = [text.rpartition(" ")[2] for text in findings(path)]
    assert sorted(found) == ["'lane'", "'let_go'", "'room'", "'told'", "'unsealed'", "'void'"]
    (tmp_path / "plane.py").write_text("def avoid(upheld, unsealable): ...\n")
    assert not list(findings(tmp_path / "plane.py"))


@pytest.mark.slow
def test_every_exception_is_needed():
    paths = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]
    used = {name for path in paths for name, _ in names_in(path)}
    assert sorted(ALLOWED) == sorted(used & set(ALLOWED))
