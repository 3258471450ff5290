"""A thousand random configurations go through `--dry-run`: none gives a traceback, each refused one names a key."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from tests.cli.wild_configs import ROOT, failures, wild

COUNT, PARTS = 1_000, 2


def _failed(part: int) -> list[str]:
    os.chdir(ROOT)
    os.environ["HF_HUB_OFFLINE"] = "1"  # no network is asked for a model that there is not
    numbers = range(part, COUNT, PARTS)
    return [f"{n}: {answer.wrong}\n{one.overrides}\n{answer.told}" for n, one, answer in failures(numbers, seed=0)]


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 35 s on two idle cores
def test_no_configuration_gives_a_traceback():
    with multiprocessing.get_context("spawn").Pool(PARTS) as pool:
        found = [each for part in pool.map(_failed, range(PARTS)) for each in part]
    assert not found, "\n\n".join(found[:5])


def test_a_configuration_is_drawn_from_its_number_alone():
    assert [wild(3, number) for number in range(50)] == [wild(3, number) for number in range(50)]
    assert wild(3, 1) != wild(4, 1)
    assert {len(wild(0, number).overrides) for number in range(200)} == {0, 1, 2, 3}
