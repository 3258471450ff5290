"""What the benchmark of off-policy learning runs can be run, and the page shows what was measured."""

import xml.etree.ElementTree as ET

import pytest

from benchmarks.off_policy_cases import CASES
from benchmarks.off_policy_learning import table
from benchmarks.off_policy_plot import picture
from rlinf.runs.rules import load_embodied
from tests.launching import ROOT

MEASURED = sorted((ROOT / "benchmarks/results").glob("*-off-policy.json"))[-1]


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_a_configuration_that_is_shipped_with_keys_that_it_reads(name, tmp_path):
    (tmp_path / "saved/policy").mkdir(parents=True)
    overrides = [each.format(made=tmp_path) for each in CASES[name].overrides]
    assert load_embodied(ROOT / f"configs/embodied/{CASES[name].config}.yaml", overrides).trials.episodes


def test_the_page_shows_what_was_measured():
    page = (ROOT / "docs/off-policy.md").read_text()
    rows = table(MEASURED)
    assert all(row in page for row in rows)
    assert {row.split("|")[2].strip() for row in rows} <= {case.label for case in CASES.values()}


def test_curves_are_drawn_within_their_panels():
    root = ET.fromstring(picture({"iql": [[(0, 0.0), (2, 0.5), (4, 1.0)]], "sac": [[(0, -1200.0), (80, -150.0)]]}))
    lines = [each.attrib["points"] for each in root.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2
    places = [tuple(map(float, place.split(","))) for line in lines for place in line.split()]
    assert all(0 <= x <= 300 and 0 <= y <= 170 for x, y in places)
