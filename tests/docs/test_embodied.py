"""docs/embodied.md is true: its Python blocks run, in order, and the pages that it names are there."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "embodied.md"


def test_python_blocks_of_the_page_run_in_order():
    names = {"__name__": "__docs__"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_what_the_page_refers_to_is_there():
    text = PAGE.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    files = re.findall(r"(?:configs|rlinf)/[\w/]+\.(?:py|yaml)", text)
    modules = [f"rlinf/{name}" for name in re.findall(r"`((?:actors|envs)/[\w/]+\.py)`", text)]
    assert links
    assert modules
    missing = [name for name in links if not (PAGE.parent / name).is_file()]
    missing += [name for name in {*files, *modules} if not (PAGE.parent.parent / name).is_file()]
    assert not missing
