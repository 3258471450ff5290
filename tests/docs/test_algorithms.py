"""docs/algorithms.md says what is true: its code runs, and its table lists every recipe."""

import re
from pathlib import Path

from rlinf.algos.recipes import NAMES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_the_code_on_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), "docs/algorithms.md", "exec"), {"__name__": "page"})


def test_the_table_lists_every_recipe():
    table = PAGE.partition("## Recipes")[2].partition("Any field")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(NAMES)
