"""Which tests guard which modules."""

GUARDS = {
    "kvoffload_async/core": ("tests/core",),
    "kvoffload_async/policies": ("tests/policies",),
    "kvoffload_async/tables": ("tests/tables",),
    "kvoffload_async/facade/connector": ("tests/connector",),
    "kvoffload_async/transport": ("tests/transport", "tests/connector/test_worker_schedules.py"),
    "kvoffload_async/facade": (
        "tests/facade",
        "tests/runtime/test_lifetime.py",
        "tests/files/test_modes.py",
    ),
    "kvoffload_async/tiers/fs": ("tests/fs",),
    "kvoffload_async/tiers/slab": ("tests/slab",),
    "kvoffload_async/tiers/files": ("tests/files", "tests/tiers", "tests/fs", "tests/slab"),
    "kvoffload_async/tiers": ("tests/tiers", "tests/files", "tests/fs", "tests/slab"),
}


def guards_of(path: str) -> tuple[str, ...]:
    """Return the folders of the tests that guard a module.

    Raises:
        ValueError: None do.
    """
    folders = [folder for folder in GUARDS if path.startswith(folder + "/")]
    if not folders:
        raise ValueError(f"{path}: no tests guard it; add its folder to {__name__}.GUARDS")
    return GUARDS[max(folders, key=len)]
