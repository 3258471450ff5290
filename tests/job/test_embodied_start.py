"""What only a started simulator shows to be wrong ends the run before its first step, and names the key."""

from __future__ import annotations

import pytest

from rlinf.config.loading import InputError
from rlinf.job.embodied.trials import saved_policy
from rlinf.job.start import train
from rlinf.job.validate import load_embodied
from tests.launching import ROOT

BREAKING = "env.simulator=tests.envs.breaking.NotFinite"
WRONG = {
    "a simulator whose first steps raise": (
        (BREAKING, "env.options={spoils: start, at: [0, 1, 2, 3, 4, 5, 6]}"),
        "env.simulator, env.options: env[0]: the simulator raised ValueError: NotFinite.reset(), 5 times in a row",
    ),
    "a policy that needs what is not shown": (("policy.type=cnn",), "policy: policy cnn needs "),
    "episodes that never end, by the simulator's own limit": (
        ("env.ignore_terminations=true", "env.max_steps=null", "env.options={max_steps: 30}"),
        "policy.horizon = 20: a step of the flow does 20 steps in each environment, all episodes last 30",
    ),
}


@pytest.mark.parametrize(("keys", "said"), WRONG.values(), ids=WRONG)
def test_it_names_its_key(keys, said, tmp_path):
    config = load_embodied(ROOT / "configs/embodied/toy.yaml", [*keys, f"output_dir={tmp_path}", "trials.episodes=0"])
    with pytest.raises(InputError) as told:
        train(config)
    assert said in str(told.value)


def test_episodes_that_outlast_a_step_are_warned_of(tmp_path, caplog):
    keys = ["steps=1", "policy.horizon=5", "trials.episodes=0", f"output_dir={tmp_path}", "trace=false"]
    train(load_embodied(ROOT / "configs/embodied/toy.yaml", keys))
    (record,) = caplog.records
    assert "does 5 steps in each environment, and episodes last up to 20 steps" in record.getMessage()
    caplog.clear()
    train(load_embodied(ROOT / "configs/embodied/toy.yaml", [*keys, "env.fresh=false"]))
    assert not caplog.records


def test_a_run_and_a_checkpoint_lead_to_their_policy(tmp_path):
    policy = tmp_path / "run" / "checkpoints" / "latest" / "policy"
    policy.mkdir(parents=True)
    (policy / "policy.json").touch()
    for path in (policy, policy.parent, tmp_path / "run"):
        assert saved_policy(path) == policy
    assert saved_policy(tmp_path) == tmp_path
