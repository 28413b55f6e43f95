"""What the documentation shows works: every code block of every page is run."""

import shutil
import sys
from contextlib import closing
from pathlib import Path

import doc_blocks
import pytest
from servers import mooncake

pytestmark = pytest.mark.slow

PAGES_WITH_CODE = {
    str(page.relative_to(doc_blocks.ROOT)): page
    for page in doc_blocks.PAGES
    if doc_blocks.blocks_of(page)
}


@pytest.mark.timeout(175)  # a page starts Python a dozen times
@pytest.mark.parametrize("name", PAGES_WITH_CODE)
def test_the_code_of_a_page_does_what_the_page_says(name, tmp_path):
    blocks = doc_blocks.blocks_of(PAGES_WITH_CODE[name])
    for program in doc_blocks.SERVERS:
        if any(f"$ {program} " in block.text for block in blocks):
            shutil.which(program, path=Path(sys.executable).parent) or pytest.skip(f"no {program}")
            if program.startswith("mooncake"):
                mooncake.binary()  # skips where its library cannot be loaded
    with closing(doc_blocks.PageRunner(tmp_path)) as runner:
        for block in blocks:
            try:
                runner.run(block)
            except AssertionError as error:
                pytest.fail(f"{name}, line {block.line}: {error}")


def blocks_in(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    return doc_blocks.blocks_of(page)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise SystemExit(3)\n```\n",
        "```python\nimport warnings; warnings.warn('old')\n```\n",
        "```console\n$ echo one\ntwo\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ true\nkvoffload: error: it fails\n```\n",
        "```console\nno command\n```\n",
        '```json\n{"block_bytes": 1}\n```\n',
        "```sh\nfalse\n```\n",
        "```sh\npip install '.[nothing-of-this-name]'\n```\n",
        "```sh\nnox -s nothing\n```\n",
        "```cobol\nSTOP RUN.\n```\n",
    ],
)
def test_a_block_that_does_not_work_is_found(tmp_path, text):
    (block,) = blocks_in(tmp_path, text)
    with pytest.raises(AssertionError):
        doc_blocks.PageRunner(tmp_path).run(block)


def test_blocks_of_a_page_share_a_folder_and_what_differs_is_elided(tmp_path):
    text = (
        '- indented\n\n  ```python title="a.py"\n  print("took", 1 + 1, "s")\n  ```\n\n'
        "```console\n$ python a.py\ntook ... s\n$ echo one \\\n>   two\none two\n```\n"
    )
    runner = doc_blocks.PageRunner(tmp_path)
    for block in blocks_in(tmp_path, text):
        runner.run(block)


def test_a_fence_that_is_not_understood_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="fence"):
        blocks_in(tmp_path, "```python linenums=1\npass\n```\n")
