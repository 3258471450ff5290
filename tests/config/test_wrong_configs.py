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


@pytest.mark.parametrize("first", range(0, 1_000, 100))
def test_every_mistake_of_wrong_configurations_is_told_at_its_key_and_place_and_nothing_else(tmp_path, first):
    for written, recorded in RECORDED["wrong"][first : first + 100]:
        config, told = answer(case_of(written), tmp_path)
        assert config is None, written
        assert [each for each in recorded if not any(is_answered(each, one) for one in told)] == [], (written, told)
        assert [one for one in told if not any(is_answered(each, one) for each in recorded)] == [], (written, recorded)


def test_odd_values_that_are_right_are_read_as_ever(tmp_path):
    usual = {False: asdict(RunConfig()), True: asdict(EmbodiedConfig())}
    for written, recorded in RECORDED["right"]:
        case = case_of(written)
        config, told = answer(case, tmp_path)
        assert told == [], written
        assert changed(config, usual[case.embodied]) == recorded, written
