"""docs/placement.md is true: its plan loads, its message is the one that is printed."""

import re
from pathlib import Path

import pytest

from rlinf.placement.grammar import PlacementError, parse
from rlinf.placement.plan import from_yaml

PAGE = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_its_plan_loads_and_is_what_its_comment_says():
    (text,) = (block for block in blocks("yaml") if "\nedges:" in block)
    plan = from_yaml(text)
    assert text.startswith(f"# {plan.mode}: {len(plan.roles)} roles on {len(plan.devices)} devices.")


def test_its_message_is_the_one_that_is_printed():
    with pytest.raises(PlacementError) as caught:
        parse("0-3,3-5", 16, key="placement.rollout")
    assert str(caught.value) in PAGE


@pytest.mark.parametrize(
    ("text", "first", "count"), [("all", (0,), 16), ("0-3:0-7", (0,), 8), ("0-7:0-1", (0, 1, 2, 3), 2)]
)
def test_its_table_of_strings_is_right(text, first, count):
    assert f"| `{text}` |" in PAGE
    placed = parse(text, 16)
    assert (placed[0], len(placed)) == (first, count)
