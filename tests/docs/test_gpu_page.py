"""docs/gpu.md: its table is what `--dry-run` says, and every check and measure that it lists is there."""

from pathlib import Path

import pytest

from benchmarks.gpu.checks.__main__ import CHECKS
from benchmarks.gpu.measures.__main__ import MEASURES
from benchmarks.gpu.settings import CASES, line, setting_of

SMALL = (("1.5B", 1, "80 GB"), ("7B", 8, "141 GB"))
PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=[pytest.mark.repeated] * (one not in SMALL), id=" ".join(map(str, one))) for one in CASES],
)
def test_a_row_of_the_table_of_settings_is_what_a_dry_run_says(case, tmp_path):
    assert line(setting_of(*case, tmp_path)) in PAGE, "put what `python -m benchmarks.gpu.settings` prints there"


@pytest.mark.parametrize("each", [*CHECKS, *MEASURES], ids=lambda each: each.name)
def test_every_check_and_measure_is_listed_with_what_it_is_to_reach(each):
    assert f"| `{each.name}` | {each.criterion} | {each.limit:.0f} s |" in PAGE
