"""Benchmarks, which nobody runs for months, still begin, and set keys that there are."""

import re

import pytest

from tests.docs.test_keys import is_key
from tests.launching import ROOT, launch

SET = re.compile(r"[\"' ]([a-z_]+(?:\.[a-z_0-9]+)+)=")
OTHERS = {"policy.gripper"}
"""What looks like a key, and is an option of one benchmark."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_benchmark_that_takes_arguments_says_how_it_is_used():
    said = launch(program=ROOT / "tests" / "benchmarks" / "helps.py", timeout=380).stdout
    count, _, wrong = said.strip().partition(" ")
    assert int(count) > 50
    assert wrong == "{}"


def test_benchmarks_set_keys_that_there_are():
    named = {key for path in (ROOT / "benchmarks").rglob("*.py") for key in SET.findall(path.read_text("utf-8"))}
    assert len(named) > 50
    assert sorted(key for key in named - OTHERS if not is_key(key)) == []
