"""The site builds strictly, its links lead somewhere, and its reference is that of the code."""

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import doc_blocks
import pytest

import kvoffload_async
from kvoffload_async import SecondaryTierFactory, testing

ROOT = doc_blocks.ROOT
BESIDE = [page for page in doc_blocks.PAGES if ROOT / "docs" not in page.parents]
BUILD_TIMEOUT_S = 100
BUILT = "KVOFFLOAD_SITE"


class Page(HTMLParser):
    """The ids of a page, where its links go, and what a browser loads for it."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values.get("id"), values.get("name")} - {None}
        if tag == "a":
            self.links |= {values.get("href")} - {None}
        self.loaded |= {values.get("src")} - {None}
        if tag == "link" and values.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loaded.add(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by path: of the one that KVOFFLOAD_SITE names, or of one built here."""
    folder = Path(os.environ.get(BUILT) or built_in(tmp_path_factory.mktemp("site"))).resolve()
    pages = {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 30
    return pages


def built_in(folder):
    """Build the site strictly; return its folder."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def leads_somewhere(link, path, site):
    """Tell whether a link of a page stays within the site and its target is there."""
    parts = urlsplit(link)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    ids = site[target].ids if target in site else set()
    return target.exists() and unquote(parts.fragment) in ids | {"", "__search"}


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_a_place_on_it(site):
    inside = [
        (link, path)
        for path, page in site.items()
        for link in page.links | page.loaded
        if not urlsplit(link).scheme and not urlsplit(link).netloc
    ]
    broken = [
        f"{path.name}: {link}" for link, path in inside if not leads_somewhere(link, path, site)
    ]
    assert len(inside) > 1000
    assert broken == []


@pytest.mark.slow
def test_a_page_loads_nothing_from_elsewhere(site):
    loaded = set().union(*(page.loaded for page in site.values()))
    assert {load for load in loaded if urlsplit(load).netloc} == set()


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    described = {name for path, page in site.items() if "api" in path.parts for name in page.ids}
    public = {
        f"{module.__name__}.{name}"
        for module in (kvoffload_async, testing)
        for name in module.__all__
    }
    assert public - described == set()


def test_the_generated_pages_say_what_the_code_says():
    pages = runpy.run_path(str(ROOT / "docs/_tools/reference.py"))["pages"]()
    stale = [path.name for path, text in pages.items() if path.read_text("utf-8") != text]
    assert stale == [], "run python docs/_tools/reference.py"


def test_every_variable_that_is_read_has_its_line():
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    read = {
        name
        for path in (ROOT / "kvoffload_async").rglob("*.py")
        for name in re.findall(r'"(KVOFFLOAD_\w+)"', path.read_text(encoding="utf-8"))
    }
    assert set(re.findall(r"^\| `(KVOFFLOAD_\w+)`", page, re.MULTILINE)) == read


@pytest.mark.parametrize("page", BESIDE, ids=lambda page: page.name)
def test_a_link_of_a_page_beside_the_site_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)\s]+)", page.read_text(encoding="utf-8"))
    for link in links:
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = page.parent / parts.path if parts.path else page
        assert target.exists(), link
        assert not parts.fragment or parts.fragment in anchors_of(target), link


def anchors_of(page):
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_every_module_that_the_architecture_page_names_exists():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:\w+/)+\w+\.(?:py|toml)\b", text))
    assert named
    package = ROOT / "kvoffload_async"
    assert [n for n in sorted(named) if not ((package / n).exists() or (ROOT / n).exists())] == []


def test_the_first_page_has_the_install_line_code_and_every_tier_in_text_and_picture():
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs/images/tiers.svg").read_text(encoding="utf-8")
    install, code, tiers = (text.index(mark) for mark in ("pip install", "```python", "| tier |"))
    assert install < code < tiers
    for name in [*SecondaryTierFactory.names(), "your own"]:
        if name != "example":
            assert name in text[tiers:]
            assert f">{name}</text>" in picture


def test_the_benchmarks_begin_with_the_picture():
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert re.match(r"# Benchmarks\n\n!\[.*\]\(bench.png\)\n", text)


def blocks_without_a_blank_line(text):
    """Yield the lines with a list, table or fence that Markdown reads as part of a paragraph."""
    before, is_code, is_item, is_row = "", False, False, False
    for line in text.splitlines():
        begins_fence = line.lstrip().startswith("```")
        begins_item = re.match(r" *(?:[-*]|\d+\.) ", line) is not None
        begins_row = line.lstrip().startswith("|")
        if not is_code and before.strip() and not before.startswith("<!--"):
            follows = (begins_item and is_item) or (begins_row and is_row)
            if (begins_fence or begins_item or begins_row) and not follows:
                yield line
        if not is_code:
            is_item = begins_item or (is_item and bool(line.strip()))
            is_row = begins_row
        is_code ^= begins_fence
        before = "" if begins_fence else line


@pytest.mark.parametrize("page", doc_blocks.PAGES, ids=lambda page: page.name)
def test_every_list_table_and_code_block_begins_after_a_blank_line(page):
    assert [*blocks_without_a_blank_line(page.read_text(encoding="utf-8"))] == []


def test_a_list_item_behind_an_indented_paragraph_is_found():
    text = "1. one\n   more\n2. two\n\n    A paragraph\n    of two.\n3. three\n"
    assert [*blocks_without_a_blank_line(text)] == ["3. three"]
