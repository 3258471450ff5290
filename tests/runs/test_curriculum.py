"""Weights of tasks follow how often they are solved."""

from __future__ import annotations

import json

import pytest

from rlinf.config.embodied import CurriculumConfig, EnvConfig
from rlinf.config.load import ConfigError, InputError
from rlinf.runs.embodied import Curriculum
from rlinf.runs.rules import load_embodied
from rlinf.runs.start import train
from tests.launching import ROOT, metrics_of

TOY = ROOT / "configs/embodied/toy.yaml"
TASKS = "env.tasks=[{name: still, weight: 3}, {name: short, options: {max_steps: 1}}]"
TWO = [{"name": "easy", "weight": 2.0}, {"name": "hard"}]


def told(**shares):
    return {f"tasks/{name}/success_once": share for name, share in shares.items()}


def test_a_task_that_is_too_hard_or_learned_keeps_its_floor_alone():
    curriculum = Curriculum(EnvConfig(tasks=TWO, curriculum=CurriculumConfig(0.25, 0.2, 0.8, 0.5)))
    assert curriculum.weights == [2.0, 1.0], "nobody knows yet"
    curriculum.heard(told(easy=0.9))
    assert curriculum.weights == [0.5, 1.0]
    curriculum.heard(told(easy=0.5, hard=0.1))
    assert curriculum.rates == {"easy": pytest.approx(0.7), "hard": 0.1}
    assert curriculum.weights == [2.0, 0.25]
    assert curriculum.told() == {"tasks/easy/weight": pytest.approx(8 / 9), "tasks/hard/weight": pytest.approx(1 / 9)}


def test_its_rates_outlast_a_checkpoint():
    env = EnvConfig(tasks=TWO, curriculum=CurriculumConfig(0.25))
    curriculum, again = Curriculum(env), Curriculum(env)
    curriculum.heard(told(easy=1.0, hard=0.5))
    again.resume(json.loads(json.dumps({**curriculum.rates, "gone": 0.3})))
    assert (again.rates, again.weights) == (curriculum.rates, curriculum.weights)
    again.resume(None)  # of a checkpoint of before
    assert again.rates == curriculum.rates


def test_a_run_goes_on_with_its_curriculum_bit_for_bit(tmp_path):
    keys = [TASKS, "env.curriculum={floor: 0.2, low: 0.25}", "trials.episodes=0", "trace=false", "checkpoint.every=2"]
    for name, steps, resume in (("whole", 4, "never"), ("half", 2, "never"), ("half", 4, "auto")):
        given = [*keys, f"steps={steps}", f"name={name}", f"output_dir={tmp_path}"]
        train(load_embodied(TOY, given), resume=resume)
    whole, half = (metrics_of(tmp_path / name) for name in ("whole", "half"))
    assert len(half) == 4
    for one, other in zip(whole, half, strict=True):
        for name in ("tasks/still/weight", "tasks/short/weight", "tasks/still/success_once", "reward/mean", "loss"):
            assert one.get(name) == other.get(name)
    assert min(line["tasks/short/weight"] for line in whole) < 0.25, "a single action hardly solves it"


WRONG = {
    "env.tasks=[{x: 3}]": "env.tasks[0].x",
    "env.tasks=[3]": "write {options: {...}}",
    "env.tasks=[{weight: 0}]": "env.tasks[0].weight: 0",
    "env.tasks=[{name: a}, {name: a}]": "two of them are called 'a'",
    "env.tasks=[{options: {wnd: 3}}]": "env.tasks[0].options.wnd = 3: Reach has no such option; did you mean wind?",
    "env.curriculum.floor=0.5": "there is nothing to choose from: name several env.tasks",
    "env.reward=tests.envs.test_scored.nothing": "env.reward",
    "env.reward=rlinf.envs.toy.draw": "env.reward = rlinf.envs.toy.draw: it takes point, side, target; there is",
    "env.reward_args={a: 1}": "env.reward_args",
}


@pytest.mark.parametrize(("key", "said"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_names_its_key(key, said, tmp_path):
    with pytest.raises((ConfigError, InputError)) as found:
        train(load_embodied(TOY, [key, f"output_dir={tmp_path}"]))
    assert said in str(found.value)


def test_a_curriculum_and_acting_ahead_are_not_for_each_other(tmp_path):
    keys = [TASKS, "env.curriculum.floor=0.5", "flow=rlinf.flows.embodied_async", f"output_dir={tmp_path}"]
    with pytest.raises(InputError, match=r"env.curriculum.floor: episodes.*begun"):
        train(load_embodied(TOY, keys))
