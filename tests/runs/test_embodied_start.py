"""What only a started simulator shows to be wrong ends the run before its first step, and names the key."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlinf.cli.commands import main
from rlinf.config.load import ConfigError, InputError
from rlinf.data.demonstrations import read_demonstrations
from rlinf.data.safetensors_io import write_tensors
from rlinf.models.language.lora import adapter_config, fold_saved, saved_names
from rlinf.models.policy.build import build_policy_model, load_policy, save_policy
from rlinf.runs.embodied import saved_policy
from rlinf.runs.rules import load_embodied
from rlinf.runs.start import train
from rlinf.training.embodied.ppo import Preparation, choose
from tests.launching import ROOT
from tests.models.policy.authored import publish_as_authors

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


class Toys(gymnasium.Env):
    """Shows two numbers, and does nothing."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Unbounded(Toys):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Pairs(Toys):
    action_space = spaces.MultiDiscrete([3, 2])


class Alone(Toys):
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)


for kind in (Unbounded, Pairs, Alone):
    gymnasium.register(f"{kind.__name__}-v0", kind, max_episode_steps=9)


@pytest.mark.parametrize(
    ("space", "said"),
    [("Unbounded", "goes from -inf to inf"), ("Pairs", "one of 2 choices"), ("Alone", "action_size=1")],
)
def test_a_gripper_that_cannot_close_stay_and_open_is_refused(space, said, tmp_path):
    keys = [f"env.options={{id: {__name__}:{space}-v0}}", "policy.settings={gripper: true}"]
    run = ["env.simulator=rlinf.envs.gymnasium.Gymnasium", f"output_dir={tmp_path}"]
    config = load_embodied(ROOT / "configs/embodied/toy_sac.yaml", [*run, *keys, "trials.episodes=0"])
    with pytest.raises((ConfigError, InputError), match=f"gripper.*{said}"):
        train(config)


def with_three_numbers(observation, instructions=None):
    """An expert of other actions."""
    return torch.zeros(len(observation["state"]), 1, 3)


@pytest.mark.parametrize(
    ("expert", "said"),
    [
        (
            "rlinf.envs.experts.pull_cube",
            "PullCube-v1 looks at 35 numbers",
        ),
        (f"{__name__}.with_three_numbers", r"it answered \[4, 1, 3\], .* wanted are actions \[4, 1, 1\]"),
    ],
)
def test_an_expert_that_does_not_fit_is_refused_before_the_first_step(expert, said, tmp_path):
    toy = ("env.simulator=rlinf.envs.toy.Reach", "env.options={}", "trials.episodes=0", f"output_dir={tmp_path}")
    config = load_embodied(ROOT / "configs/embodied/pendulum_dagger.yaml", [*toy, f"dagger.expert={expert}"])
    with pytest.raises(InputError, match=f"^dagger.expert: .*{said}"):
        train(config)


def test_episodes_that_outlast_a_step_are_warned_of(tmp_path, caplog):
    keys = ["steps=1", "policy.horizon=5", "trials.episodes=0", f"output_dir={tmp_path}", "trace=false"]
    train(load_embodied(ROOT / "configs/embodied/toy.yaml", keys))
    (record,) = caplog.records
    assert "up to 20 steps" in record.getMessage()
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


POLICY = {"type": "tests.models.policy.authored.AuthoredPolicy", "state_size": 2, "action_size": 1}


@pytest.fixture
def adapters(tmp_path):
    """A directory with adapters that somebody trained for the policy above."""
    model = build_policy_model(POLICY)
    choose(model, Preparation(lora={"r": 2, "alpha": 8.0, "target_modules": ("up", "down")}))
    torch.manual_seed(0)
    directory = tmp_path / "adapters"
    directory.mkdir()
    write_tensors(directory / "adapter_model.safetensors", {n: torch.randn(p.shape) for n, p in saved_names(model)})
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config(model, None)))
    return directory


def test_adapters_that_a_run_begins_with_act_from_the_first_step_on(adapters, tmp_path):
    keys = [
        "steps=1", f"policy.type={POLICY['type']}", "trials.episodes=0", "trace=false", f"output_dir={tmp_path}",
        f"policy.lora.path={adapters}", "algorithm.epochs=1", "algorithm.minibatch=10000",
    ]  # fmt: skip
    config = load_embodied(ROOT / "configs/embodied/toy.yaml", keys)
    train(config)
    (path,) = tmp_path.glob("**/metrics.jsonl")
    first = json.loads(path.read_text().splitlines()[0])
    assert first["ratio/max"] == pytest.approx(1.0, abs=1e-2)  # what acted is what learns


def test_a_published_policy_is_tried_and_recorded_with_the_adapters_that_are_named(adapters, tmp_path, capfd):
    publish_as_authors(tmp_path / "published", width=32, state_size=2, numbers=1)
    model = load_policy(tmp_path / "published", POLICY)
    fold_saved(model, str(adapters))
    assert {name for name, _ in model.named_modules()} == {
        name for name, _ in build_policy_model(POLICY).named_modules()
    }
    save_policy(model, tmp_path / "whole")
    same = ("--config", str(ROOT / "configs/embodied/toy.yaml"), f"policy.type={POLICY['type']}", "env.workers=0",
            "imitation.path=/not/yet/there", "imitation.statistics=toy")  # fmt: skip

    def told(name, *more):
        out = tmp_path / f"{name}{len(more)}.jsonl"
        assert main(["evaluate", "--model", str(tmp_path / name), "--output", str(out), *same, *more]) == 0
        return [(row["total"], row["length"]) for row in map(json.loads, out.read_text().splitlines())]

    lora = f"policy.lora.path={adapters}"
    alone, adapted, whole = told("published"), told("published", lora), told("whole")
    assert adapted == whole != alone
    shown = {}
    for name, more in (("published", (lora,)), ("whole", ())):
        out = tmp_path / f"recorded {name}"
        given = ["--model", str(tmp_path / name), "--episodes", "2", "--all", "--out", str(out)]
        assert main(["record", *given, *same, *more]) == 0
        shown[name] = torch.cat([each.actions for each in read_demonstrations(out, solved=False)])
    torch.testing.assert_close(shown["published"], shown["whole"])
