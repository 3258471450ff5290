"""Wrong configurations are refused for the same keys and places as ever, with the same nearest keys."""

import json
from dataclasses import asdict

import pytest

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.text import RunConfig
from tests.config.wrong_configs import CORPUS, Case, answer, changed

RECORDED = json.loads(CORPUS.read_text(encoding="utf-8"))


def case_of(written) -> Case:
    return Case(**written | {"overrides": tuple(written.get("overrides", ()))})


def is_answered(recorded, told) -> bool:
    """The same key, or a more exact one within it, at the same place, with the same nearest key."""
    (key, *rest), (now, *rest_now) = recorded, told
    return rest == rest_now and (now == key or now.startswith(f"{key}."))


PARTS = [0, *(pytest.param(first, marks=pytest.mark.repeated) for first in range(1, 4))]
"""Every fourth case, from one of the first four on: they are drawn alike."""


@pytest.mark.parametrize("first", PARTS)
def test_every_mistake_of_wrong_configurations_is_told_at_its_key_and_place_and_nothing_else(tmp_path, first):
    for written, recorded in RECORDED["wrong"][first::4]:
        config, told = answer(case_of(written), tmp_path)
        assert config is None, written
        assert [each for each in recorded if not any(is_answered(each, one) for one in told)] == [], (written, told)
        assert [one for one in told if not any(is_answered(each, one) for each in recorded)] == [], (written, recorded)


@pytest.mark.parametrize("first", PARTS)
def test_odd_values_that_are_right_are_read_as_ever(tmp_path, first):
    usual = {False: asdict(RunConfig()), True: asdict(EmbodiedConfig())}
    for written, recorded in RECORDED["right"][first::4]:
        case = case_of(written)
        config, told = answer(case, tmp_path)
        assert told == [], written
        assert changed(config, usual[case.embodied]) == recorded, written
