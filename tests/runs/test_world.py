"""Runs with a world model: what cannot work is said before anything starts; they learn, and go on bit for bit."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from rlinf.config.load import ConfigError, InputError
from rlinf.placement.seats import INSIDE
from rlinf.runs.rules import load_embodied
from rlinf.runs.start import prepare, train
from tests.launching import ROOT, metrics_of

TOY = ROOT / "configs/embodied/toy_world.yaml"
SMALL = ("world.updates=10", "world.steps=2", "world.num_envs=8", "world.horizon=5", "policy.horizon=5")
SHORT = (*SMALL, "env.max_steps=5", "log_every=1", "trials.episodes=0", "trace=false", "checkpoint.every=2")
WRONG = {
    "world.model=ensembel": r"world\.model",
    "world.model=null": r"world\.horizon",
    "world.settings={memberz: 3}": r"world\.settings.*memberz",
    "world.settings={members: 0}": r"world\.settings.*members=0",
    "world.demonstrations=nowhere": r"world\.demonstrations",
    "policy.settings={chunk: 2}": r"policy\.settings\.chunk",
    "env.frame_stack=2": r"env\.frame_stack",
    "flow=rlinf.flows.embodied": r"flow.*world_trainer",
}


@pytest.mark.parametrize("key", WRONG)
def test_what_cannot_work_is_said_before_anything_starts(key):
    with pytest.raises(ConfigError, match=WRONG[key]):
        prepare(load_embodied(TOY, [key]))


def test_other_runs_have_no_place_for_a_world():
    with pytest.raises(ConfigError, match=r"placement\.world_trainer"):
        load_embodied(ROOT / "configs/embodied/toy.yaml", ["placement.world_trainer=0"])
    flow = "flow=rlinf.flows.embodied.model_based"
    with pytest.raises(ConfigError, match="world"):
        prepare(load_embodied(ROOT / "configs/embodied/toy.yaml", [flow]))


def test_its_roles_sit_where_those_of_the_policy_do_or_where_they_are_told_to():
    plan = prepare(load_embodied(TOY, ["placement.policy=0", "placement.trainer=1"], 2), 2)
    assert plan.roles == tuple(kind.name for kind in INSIDE)
    seats = plan.placed.seats
    assert (seats["world"].hosts, seats["world_trainer"].hosts) == ((0,), (1,))
    seats = prepare(load_embodied(TOY, ["placement.world=1"], 2), 2).placed.seats
    assert (seats["world"].hosts, seats["policy"].hosts) == ((1,), (0,))


def test_a_run_goes_on_with_its_world_bit_for_bit(tmp_path):
    for name, steps, resume in (("whole", 3, "never"), ("half", 2, "never"), ("half", 3, "auto")):
        given = [*SHORT, f"steps={steps}", f"name={name}", f"output_dir={tmp_path}"]
        train(load_embodied(TOY, given), resume=resume)
    whole, half = (metrics_of(tmp_path / name) for name in ("whole", "half"))
    for one, other in zip(whole, half, strict=True):
        for name in ("world/state_error", "world/transitions", "inside/reward/step", "loss", "env_steps/total"):
            assert one.get(name) == other.get(name)
    assert whole[-1]["env_steps/total"] == 3 * 8 * 5  # the true ones alone
    for part in ("policy/policy", "world_trainer/world/world"):
        mine, theirs = (
            load_file(tmp_path / name / "checkpoints" / "latest" / f"{part}.safetensors") for name in ("whole", "half")
        )
        assert all(mine[name].equal(theirs[name]) for name in mine)


def test_an_ensemble_says_that_it_predicts_states_alone(tmp_path):
    with pytest.raises(InputError, match=r"world\.model.*state alone.*rgb"):
        train(load_embodied(TOY, [*SHORT, "env.options={pixels: 8}", f"output_dir={tmp_path}"]))
