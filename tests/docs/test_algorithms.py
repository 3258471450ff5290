"""docs/algorithms.md says what is true: its table lists every recipe."""

import re
from pathlib import Path

from rlinf.algos.recipes import NAMES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_the_table_lists_every_recipe():
    table = PAGE.partition("## Recipes")[2].partition("Any field")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(NAMES)
