"""The README is short, its commands are the project's, and what it shows is the example."""

import os
import re
import subprocess
from pathlib import Path

import doc_blocks
import preloaded
import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.py"
MAX_WORDS, MAX_LINES = 700, 15


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def code(readme, marker):
    """Return the block behind a marker."""
    (found,) = re.findall(
        rf"^<!-- {marker} -->\n```\w+\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL
    )
    return found


def test_the_readme_is_read_in_a_few_minutes(readme):
    assert len(readme.split()) < MAX_WORDS


def test_the_readme_shows_the_example(readme):
    _, _, body = QUICKSTART.read_text(encoding="utf-8").partition('"""\n\n')
    assert code(readme, "quickstart") == body
    assert sum(1 for line in body.splitlines() if line) <= MAX_LINES


def test_the_readmes_example_finds_everything_when_it_is_started_again(tmp_path):
    for found in (0, 4):
        done = subprocess.run(
            [preloaded.python(), str(QUICKSTART)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        printed = f"{found} of 4 blocks loaded\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_the_readmes_commands_are_one_line_each_and_install_before_they_run(readme):
    commands = [b for b in doc_blocks.blocks_of(ROOT / "README.md") if b.language == "sh"]
    assert [block.text.count("\n") for block in commands] == [1, 1]
    assert all(doc_blocks.is_installation(block.text) for block in commands)
    assert commands[1].text == code(readme, "test-command")


@pytest.mark.slow
def test_the_readmes_first_command_ends_in_one_that_works(tmp_path):
    first = doc_blocks.blocks_of(ROOT / "README.md")[0].text
    command = first.strip().rpartition("&& .venv/bin/")[2]
    assert command.startswith("kvoffload ")
    done = f"$ {command}\n...\n│ corrupt blocks          │ 0 │ 0 │\n...\n"
    doc_blocks.PageRunner(tmp_path).run(doc_blocks.Block(1, "console", None, done))
