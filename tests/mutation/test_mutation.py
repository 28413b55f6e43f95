"""The driver of the mutation tests: what it changes, and what it says of it."""

import textwrap

import pytest
from mutation import driver
from mutation.guards import GUARDS, guards_of
from mutation.mutants import mutants_of

pytestmark = pytest.mark.slow


def changes(source):
    source = textwrap.dedent(source)
    return {(m.kind, m.apply(source.encode()).decode()) for m in mutants_of(source, "m.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "x = a < b",
            {("comparison turned", "x = (a >= b)"), ("comparison moved", "x = (a <= b)")},
        ),
        ("x = a is b", {("comparison turned", "x = (a is not b)")}),
        ("x = a and b", {("and for or", "x = (a or b)")}),
        ("call(a)", {("call removed", "pass")}),
        ("x = True", {("constant changed", "x = False")}),
        ("def f():\n    return False", {("constant changed", "def f():\n    return True")}),
        ("x = 7", {("constant changed", "x = 8")}),
        ("x = 'ä', 7", {("constant changed", "x = 'ä', 8")}),
        ("y if f(x) else z", {("condition negated", "y if (not (f(x))) else z")}),
    ],
)
def test_each_kind_of_change(source, expected):
    assert changes(source) == expected


def test_statements_are_changed_in_their_place():
    source = """
        async def f(x):
            if x:
                await g(
                    x,
                )
            return x
    """
    kinds = {kind for kind, _ in changes(source)}
    assert kinds == {"condition negated", "call removed", "result dropped"}
    removed = next(text for kind, text in changes(source) if kind == "call removed")
    assert "    if x:\n        pass\n    return x\n" in removed


@pytest.mark.parametrize(
    "source",
    [
        "x: Literal[1]",
        "@d(slots=True)\ndef f() -> Literal[1]: ...",
        "raise E(f'{x < 1}')",
        "logger.warning('x', 1)",
        "if TYPE_CHECKING:\n    import y",
        "x = 1  # pragma: no cover",
        "class P(Protocol):\n    def f(self):\n        return 1",
        "assert isinstance(x, Y)",
        "x = zip(a, b, strict=True)",
    ],
)
def test_what_no_test_is_to_hold_stays_as_it_is(source):
    assert not changes(source)


def test_every_change_can_be_compiled():
    for path in sorted((driver.ROOT / "kvoffload_async/core").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for mutant in mutants_of(source, path.name)[::5]:
            compile(mutant.apply(source.encode()), path.name, "exec")


def test_every_module_that_is_changed_has_tests_that_guard_it():
    assert guards_of("kvoffload_async/facade/connector/requests.py") == ("tests/connector",)
    assert "tests/facade" in guards_of("kvoffload_async/facade/spec.py")
    assert guards_of("kvoffload_async/tiers/files/ops.py")[0] == "tests/files"
    for tests in GUARDS.values():
        assert all((driver.ROOT / test).exists() for test in tests)
    with pytest.raises(ValueError, match="no tests guard it"):
        guards_of("kvoffload_async/errors.py")


PROJECT = {
    "kvoffload_async/__init__.py": "",
    "kvoffload_async/core/__init__.py": "",
    "kvoffload_async/core/rule.py": "def larger(a, b):\n    return a if a > b else b\n",
    "tests/core/test_rule.py": (
        "from kvoffload_async.core.rule import larger\n\n"
        "def test_it():\n    assert larger(2, 1) == larger(1, 2) == 2\n"
    ),
    "pyproject.toml": (
        "[tool.pytest.ini_options]\nmarkers = ['slow', 'stateful']\n"
        "addopts = ['--disable-plugin-autoload', '-p', 'timeout']\n"
    ),
    "equivalents.toml": "",
}
MOVED = """
    [[equivalent]]
    path = "kvoffload_async/core/rule.py"
    kind = "comparison moved"
    original = "a > b"
    replacement = "(a >= b)"
    reason = "whichever of two equals is returned"
"""


def run(root, capsys, *options):
    files = ("--root", str(root), "--equivalents", str(root / "equivalents.toml"))
    code = driver.main(["--jobs", "1", *files, *options, "kvoffload_async/core"])
    return code, capsys.readouterr().out


@pytest.fixture
def project(tmp_path):
    for name, text in PROJECT.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_survivors_are_printed_and_fail_the_run(project, capsys):
    code, output = run(project, capsys, "--seed", "1")
    assert code == 1
    where = "kvoffload_async/core/rule.py:2: comparison moved: a > b -> (a >= b)"
    assert f"SURVIVED {where}" in output
    assert "66.7% of 3 died" in output


def test_what_is_listed_as_equivalent_is_not_tried_but_must_have_a_reason(project, capsys):
    listed = project / "equivalents.toml"
    listed.write_text(textwrap.dedent(MOVED))
    code, output = run(project, capsys, "--seed", "1")
    assert (code, "100.0% of 2 died" in output) == (0, True)
    listed.write_text(textwrap.dedent(MOVED).replace("whichever of two equals is returned", ""))
    with pytest.raises(ValueError, match="no reason"):
        run(project, capsys)


def test_a_folder_has_hundreds_of_places_to_change():
    found = driver.collect(driver.ROOT, ["kvoffload_async/core"], driver.EQUIVALENTS)
    assert len(found) > 300
    assert len({mutant.start for mutant in found}) > 1


def test_tests_that_fail_anyway_prove_nothing(project, capsys):
    (project / "tests/core/test_rule.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(RuntimeError, match="without any change"):
        run(project, capsys, "--seed", "1")
