"""The table of docs/recipes.md is what dry runs of the configurations say."""

import re

import pytest

from benchmarks.recipes import BEGIN, END, HEADS, PAGE, ROOT, recipes, row, tried

SHAPES, RECIPES = recipes()
LINES = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
AGAIN = {
    "math/deepseek-r1-distill-qwen-1.5b": 8,
    "large/qwen2.5-7b-ppo": 32,
    "large/qwen3-30b-a3b": 32,
}
"""A few: `python -m benchmarks.recipes` tries them all, and `tests/runs/dry_run/test_embodied.py` those that act."""


def test_each_recipe_has_its_line():
    assert len(LINES) == len(RECIPES)
    for recipe, line in zip(RECIPES, LINES, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        config, ours = recipe["config"], "yes" if recipe["ours"] else "no"
        assert cells[:3] == [recipe["name"], f"[{config}](../configs/{config}.yaml)", f"{recipe['devices']} H100"]
        assert len(cells) == len(HEADS)
        assert cells[7:] == [recipe["expected"], recipe["source"], ours]
        assert re.fullmatch(r"\w+ [\d.]+(, \w+ [\d.]+)+( at least)?", cells[3])
        assert (ROOT / "configs" / f"{config}.yaml").is_file()


def test_every_published_rate_is_within_what_the_page_says_predictions_may_be_off():
    held = [(line, re.search(r"\| [\d,]+ \(([\d.]+)\) \|", line)) for line in LINES if "a second" in line]
    assert len(held) == 6
    for line, ratio in held:
        assert ratio is not None, line
        assert 0.5 < float(ratio[1]) < 2, line
    acting = [re.search(r"\| - \| [\d,]+ \(([\d.]+)\) \|", line) for line in LINES]
    ratios = [float(ratio[1]) for ratio in acting if ratio is not None]
    assert len(ratios) == 2
    assert all(0.2 < ratio < 5 for ratio in ratios)


@pytest.mark.parametrize("config", AGAIN)
def test_a_dry_run_says_what_the_line_says(config, tmp_path):
    ((recipe, line),) = [
        (recipe, line)
        for recipe, line in zip(RECIPES, LINES, strict=True)
        if (recipe["config"], recipe["devices"]) == (config, AGAIN[config])
    ]
    assert line == row(recipe, tried(recipe, SHAPES, tmp_path))
