"""Small changes to a source file that some test must notice.

Each is one expression or statement replaced by another. What nobody could notice, or what no test
is to hold, is left out: annotations, decorators, what is logged or said in an error, and what is
not counted for coverage either.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

TURNED = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
MOVED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_NOTHING_TO_DROP = ("return None", "return False")
LOGGERS = ("logger", "logging", "warnings")


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: The file, relative to the root.
        line: Where the change begins, from 1.
        kind: What sort of change it is.
        original: The source that is replaced, on one line.
        replacement: What stands there instead.
        start: Offset of the original in the file's bytes.
        end: Offset behind it.
    """

    path: str
    line: int
    kind: str
    original: str
    replacement: str
    start: int
    end: int

    def __str__(self):
        return f"{self.path}:{self.line}: {self.kind}: {self.original} -> {self.replacement}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement.encode() + source[self.end :]


def mutants_of(source: str, path: str) -> list[Mutant]:
    """Return all changes to a file, in their order in it."""
    lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    found = []
    for node, kind, replacement in _changes(ast.parse(source)):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        if "pragma: no cover" in lines[node.lineno - 1]:
            continue
        original = " ".join(source.encode()[start:end].decode().split())
        found.append(Mutant(path, node.lineno, kind, original, replacement, start, end))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.kind))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield what is to be replaced, what sort of change that is, and by what."""
    for node in _walk(tree):
        match node:
            case ast.Compare(ops=[_]):
                yield from _comparisons(node)
            case ast.BoolOp(op=op):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield node, "and for or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
                yield node, "call removed", "pass"
            # `return False` becomes `return True`; to whoever asks, None is the same as False.
            case ast.Return(value=ast.expr()) if ast.unparse(node) not in _NOTHING_TO_DROP:
                yield node, "result dropped", "return None"
            case ast.Constant(value=bool() | int() | float() as value):
                yield node, "constant changed", repr(_other(value))
        test = getattr(node, "test", None)
        if test is not None and not isinstance(test, ast.Compare):  # that is turned already
            yield test, "condition negated", f"(not ({ast.unparse(test)}))"


def _comparisons(node: ast.Compare) -> Iterator[tuple[ast.AST, str, str]]:
    (op,) = node.ops
    for kind, table in (("comparison turned", TURNED), ("comparison moved", MOVED)):
        if type(op) in table:
            changed = ast.Compare(node.left, [table[type(op)]()], node.comparators)
            yield node, kind, f"({ast.unparse(changed)})"


def _other(value: float) -> float:
    return (not value) if isinstance(value, bool) else value + 1


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in which a change says something."""
    yield node
    for name, field in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params", "op", "ops", "ctx"}:
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not _says_nothing(child):
                yield from _walk(child)


def _says_nothing(node: ast.AST) -> bool:
    match node:
        # Asserts are for the type checker, and `strict` is one of `zip`.
        case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.keyword(arg="strict"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in LOGGERS
        case ast.FunctionDef(decorator_list=names) | ast.AsyncFunctionDef(decorator_list=names):
            return any("abstractmethod" in ast.unparse(each) for each in names)
        case ast.ClassDef():
            return any("Protocol" in ast.unparse(base) for base in node.bases)
    return False
