"""The pages are true: their Python runs, in order, as one program a page; their commands are what the programs take.

Each page runs in a directory of its own that has what a checkout has at the top. Blocks with a title are saved there
first, so that later ones import them and commands name them. `snippets.py` has what a page can say about a block.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs import commands
from tests.docs.snippets import COMMAND, PAGES, ROOT, Block, blocks_of, without_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
AT_THE_TOP = ("configs", "examples", "benchmarks", "launch.py", "docs")
WITH_CODE = [  # the code of README.zh.md is that of README.md: test_readmes.py
    page
    for page in PAGES
    if page.name != "README.zh.md" and re.search(r"^ *```(python|bash|yaml)", page.read_text(encoding="utf-8"), re.M)
]
SHORTER = {
    "docs/agents.md": {
        "steps=1, max": "**{'evaluation.problems': 4, 'algorithm.prompts_per_step': 4}, steps=1, max",
    },
    "docs/train.md": {"steps=60": "steps=3", "steps=30": "steps=4", '"evaluation.every": 10': '"evaluation.every": 2'},
    "docs/tutorials/library-user.md": {"learn(40)": "learn(2)", '["accuracy"] > 2': '["accuracy"] >= 0'},
}
"""What makes runs of a page end sooner; `make drills` runs them whole, with what they say comes of it."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty working directory beside the repository's own folders; modules imported from it are forgotten."""
    for each in AT_THE_TOP:
        (tmp_path / each).symlink_to(ROOT / each)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[module]


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_what_a_page_shows_runs_in_order(page: Path, desk: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for shown, shorter in SHORTER.get(name(page), {}).items():
        assert shown in text
        text = text.replace(shown, shorter)
    run_in_order(page, text, desk)


@pytest.mark.repeated
@pytest.mark.parametrize("page", SHORTER)
def test_long_runs_of_a_page_come_to_what_it_says(page: str, desk: Path) -> None:
    run_in_order(ROOT / page, (ROOT / page).read_text(encoding="utf-8"), desk)


def run_in_order(page: Path, text: str, desk: Path) -> None:
    names: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks_of(text):
        try:
            _do(block, f"{name(page)}:{block.line}", names, desk)
        except Exception as error:
            error.add_note(f"in the block of {block.language} in line {block.line} of {name(page)}")
            raise


def _do(block: Block, where: str, names: dict[str, object], desk: Path) -> None:
    if block.file is not None:
        (desk / block.file).parent.mkdir(parents=True, exist_ok=True)
        (desk / block.file).write_text(block.text, encoding="utf-8")
    if block.language == "python":
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if block.not_run else 0
        code = compile("\n" * block.line + block.text, where, "exec", flags=flags, dont_inherit=True)
        if block.not_run is None and block.file is None:
            exec(code, names)
    elif block.language == "bash":
        commands.check(block.text, run=block.not_run is None)
    elif block.language == "yaml":
        list(yaml.safe_load_all(block.text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_stand_in_blocks_that_are_checked(page: Path) -> None:
    assert not COMMAND.findall(without_blocks(page.read_text(encoding="utf-8"))), "write ```bash around them"
