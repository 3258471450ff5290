"""What a policy's run names is tried before anything starts: simulator and options, policy, directories, sizes."""

from __future__ import annotations

import json

import pytest
import torch

from rlinf.cli.main import describe, main
from rlinf.config.load import ConfigError
from rlinf.data.demonstrations import Demonstration, write_demonstrations
from rlinf.envs.base import SerialSimulator
from rlinf.models.policy.build import build_policy_model, save_policy
from rlinf.runs.rules import load_embodied
from tests.launching import ROOT

TOY, PENDULUM, DAGGER, IMITATION, PULL_CUBE = (
    f"configs/embodied/{name}.yaml"
    for name in ("toy", "pendulum_sac", "pendulum_dagger", "toy_imitation", "maniskill_pullcube_ppo")
)
GYMNASIUM = "env.simulator=rlinf.envs.gymnasium.Gymnasium"


class Leaving(SerialSimulator):
    """A simulator with annotations that cannot be read, and options of its own."""

    def __init__(self, num_envs: int, speed: NoSuchType, **more):  # type: ignore[name-defined]  # noqa: F821
        raise SystemExit("made")

    def _begin(self, env, seed):
        raise NotImplementedError

    def _move(self, env, action):
        raise NotImplementedError

    @classmethod
    def check_options(cls, options):
        super().check_options(options)
        if options["speed"] == "leave":
            raise SystemExit("no such speed")


def refused(*keys: str, path: str = TOY) -> str:
    """What is said of keys that cannot be, one problem."""
    with pytest.raises(ConfigError) as caught:
        describe(load_embodied(ROOT / path, keys), 1)
    told = str(caught.value).splitlines()
    assert len(told) == 2, told
    return told[1]


class Blind(Leaving):
    """It draws nothing, and says of no option that it cannot be."""

    @classmethod
    def check_options(cls, options):
        """All are good."""


VIDEOS = ("trials.videos=1", "trials.episodes=4")
CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "no such policy": (TOY, ("policy.type=nosuch",), "policy.type = nosuch: "),
    "videos of a simulator that draws nothing": (
        TOY, (f"env.simulator={__name__}.Blind", *VIDEOS), "trials.videos = 1: Blind renders no pictures",
    ),
    "videos of gymnasium that was made without pictures": (
        PENDULUM, VIDEOS, "trials.videos = 1: made without pictures: set trials.options={pictures: true}",
    ),
    "a policy that is a function": (TOY, ("policy.type=os.path.join",), "policy.type = os.path.join: "),
    "a start of noise for a policy that denoises nothing": (
        TOY, ("trials.greedy=from_noise",), "trials.greedy = from_noise: ",
    ),
    "a policy without critics for sac": (PENDULUM, ("policy.type=mlp",), "policy.type = mlp: it has no critics of"),
    "a key that the algorithm does not read": (
        PENDULUM, ("off_policy.expectile=0.9",), "sac does not read it, but iql: remove it",
    ),
    "targets where there are none": (PENDULUM, ("algorithm=crossq", "off_policy.tau=0.1"), "crossq does not read it"),
    "steps on demonstrations that are not named": (PENDULUM, ("off_policy.offline_steps=3",), "name off_policy"),
    "episodes that would be cut": (PENDULUM, ("off_policy.solved_only=true",), "set env.fresh=true"),
    "shifts of no pictures": (PENDULUM, ("off_policy.shift=2",), "policy.type=soft looks at no pictures"),
    "iql from pictures": (PENDULUM, ("algorithm=iql", "policy.type=soft_pixels"), "iql learns from states"),
    "batch normalisation beside targets": (
        PENDULUM, ("policy.settings.batch_norm=true",), "it is for crossq, which has no target critics",
    ),
    "crossq without it": (PENDULUM, ("algorithm=crossq", "policy.settings.batch_norm=false"), "crossq stands on it"),
    "an expert that nobody asks": (PENDULUM, ("dagger.beta=0.5",), "sac asks no expert"),
    "no expert": (DAGGER, ("dagger.expert=null",), "dagger learns from an expert: name a function"),
    "an expert that is not there": (DAGGER, ("dagger.expert=rlinf.envs.toy.strait",), "as a function:"),
    "a bound that dagger has not": (DAGGER, ("algorithm.kl_stop=0.1",), "kl_stop = 0.1: dagger does not read it: rem"),
    "a step size that imitation has not": (
        IMITATION, ("optimizer.critic_lr=0.1",), "imitation does not read it, but sac, crossq, iql: remove it",
    ),
    "epochs of imitation": (IMITATION, ("algorithm.epochs=2",), "imitation does not read it: remove it"),
    "a replay buffer that nobody fills": (TOY, ("off_policy.batch=3",), "ppo does not read it, but sac, crossq"),
    "demonstrations to a memory": (
        IMITATION, ("policy.settings={memory: 4, sequence: 1}",), "leave policy.settings.memory out",
    ),
    "nobody to steer": (PENDULUM, ("policy.type=steered",), "None is no directory: name that of the policy"),
    "a misspelt setting": (TOY, ("policy.settings.hiden=[3]",), "no key 'hiden'; did you mean hidden?"),
    "a setting of no width": (TOY, ("policy.settings.hidden=[0]",), "policy.settings = {'hidden': [0]}: "),
    "a setting too large": (TOY, ("policy.settings.hidden=[1000000000000]",), "would take at least 96,000 GB"),
    "layers without end": (
        TOY, ("policy.type=vla", "policy.settings.decoder.num_hidden_layers=1000000000"),
        "policy.settings.decoder.num_hidden_layers = 1000000000: no model has more than 640",
    ),
    "a simulator that is a function": (TOY, ("env.simulator=os.path.join",), "env.simulator = os.path.join: it is no "),
    "a simulator that is not whole": (TOY, ("env.simulator=rlinf.envs.base.SerialSimulator",), "leaves out _begin, _m"),
    "a misspelt option": (TOY, ("env.options.dimz=1",), "env.options.dimz = 1: Reach has no such option; did you mean"),
    "an option of another type": (TOY, ("env.options.dims=x",), "env.options.dims = x: it must be int"),
    "a flag in place of a number": (TOY, ("env.options.dims=true",), "env.options.dims = True: it must be int"),
    "an option that the simulator refuses": (TOY, ("env.options.dims=3",), "env.options.dims = 3: dims=3 must be 1 or"),
    "an option that is another key's": (TOY, ("env.options.num_envs=3",), "env.options.num_envs = 3: Reach has no suc"),
    "an option that is missing": (TOY, (GYMNASIUM,), "env.options = {}: Gymnasium needs id"),
    "no such environment": (TOY, (GYMNASIUM, "env.options.id=No-v9"), "env.options.id = No-v9: Environment `No` doesn"),
    "no such module": (TOY, (GYMNASIUM, "env.options.id=nosuch:No-v9"), "env.options.id = nosuch:No-v9: No module nam"),
    "neither name nor maker": (TOY, (f"{GYMNASIUM}Vector",), "env.options = {}: name either the `id`"),
    "a misspelt option of a task": (PULL_CUBE, ("env.options.obs=3",), "env.options.obs = 3: ManiSkill has no such op"),
    "a value that a task has not": (PULL_CUBE, ("env.options.observe=x",), "observe='x' is none of state, rgb"),
    "a misspelt option of trials": (TOY, ("trials.options.word=true",), "trials.options.word = True: Reach has no suc"),
    "code that leaves": (
        TOY, (f"env.simulator={__name__}.Leaving", "env.options={speed: leave}"), "SystemExit: no such speed",
    ),
    "episodes that never end": (
        TOY, ("env.ignore_terminations=true", "env.max_steps=21"),
        "policy.horizon = 20: a step of the flow does 20 steps in each environment, all episodes last 21",
    ),
    "environments without end": (TOY, ("env.num_envs=1000000000000",), "env.num_envs = 1000000000000: what environ"),
    "decisions without end": (TOY, ("policy.horizon=1000000000000000",), "policy.horizon = 1000000000000000: what"),
    "workers without end": (TOY, ("env.workers=100000", "env.num_envs=200000"), "env.workers = 100000: no machine"),
    "memories without end": (PENDULUM, ("off_policy.capacity=1000000000000000",), "off_policy.capacity = 100000000000"),
    "a batch without end": (PENDULUM, ("off_policy.batch=1000000000000000",), "off_policy.batch = 1000000000000000: "),
}  # fmt: skip


@pytest.mark.parametrize(("path", "keys", "said"), CASES.values(), ids=CASES)
def test_what_a_run_could_not_use_names_its_key(path, keys, said):
    assert said in refused(*keys, path=path)


@pytest.mark.parametrize(
    ("path", "key"), [(TOY, "policy.path"), (TOY, "imitation.path"), (PENDULUM, "off_policy.demonstrations")]
)
def test_a_directory_that_holds_something_else_names_its_key(path, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert f"{key} = mine: " in refused(f"{key}=mine", path=path)


def test_a_directory_of_demonstrations_is_taken_if_one_of_them_solved_its_task(tmp_path):
    def shown(success):
        numbers = torch.zeros(1, 1)
        return Demonstration(
            {"state": torch.zeros(2, 2)}, torch.zeros(1, 1, 1), numbers, numbers == 0, True, success, None
        )

    write_demonstrations(tmp_path, [shown(False)])
    assert "of its 1 episodes" in refused(f"imitation.path={tmp_path}")
    write_demonstrations(tmp_path, [shown(True)])
    describe(load_embodied(ROOT / TOY, [f"imitation.path={tmp_path}"]), 1)


def test_a_saved_policy_is_taken_if_its_weights_are_its_own(tmp_path):
    save_policy(build_policy_model({"type": "mlp", "action_size": 1, "state_size": 2, "hidden": [8]}), tmp_path)
    describe(load_embodied(ROOT / TOY, [f"policy.path={tmp_path}"]), 1)
    about = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps({**about, "hidden": [9]}))
    assert "policy.safetensors" in refused(f"policy.path={tmp_path}")


def test_a_simulator_of_ones_own_is_not_made():
    describe(load_embodied(ROOT / TOY, [f"env.simulator={__name__}.Leaving", "env.options={speed: 3, other: 4}"]), 1)


@pytest.mark.parametrize("name", ["openvla_maniskill_ppo", "gr00t_libero_ppo"])
def test_a_published_policy_without_its_directory_is_checked_but_not_started(name, tmp_path, capsys, monkeypatch):
    path = ROOT / f"configs/embodied/{name}.yaml"
    one = [f"placement.{role}={host}" for role, host in (("env", 0), ("policy", 0), ("trainer", 0))]
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = describe(load_embodied(path, ["placement.devices={gpu: h100}"], 8), 8)
    assert ": policy.path: " in said
    assert ", deciding " in said or "gr00t" in name
    assert main(["--config", str(path), *one, "env.slices=1", f"output_dir={tmp_path}/none"]) == 2
    told = capsys.readouterr().err
    assert "configuration: policy.path = None: " in told
    assert "a directory" in told
    assert not (tmp_path / "none").exists()


SHIPPED = sorted({*(ROOT / "configs/embodied").glob("*.yaml")} - {ROOT / "configs/embodied/openvla_maniskill_ppo.yaml"})
"""All but the one that is looked at above."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_configuration_that_is_shipped_passes(path):
    describe(load_embodied(path), 1)


@pytest.mark.parametrize("path", ["imitation.path=null", "imitation.held_out=0.1"])
def test_what_imitated_goes_on_by_acting_with_its_share_held_out(path, monkeypatch):
    """A warm-up leaves the share out, and without demonstrations there is nothing to leave out."""
    monkeypatch.chdir(ROOT)
    config = load_embodied(ROOT / "configs/embodied/toy_imitation.yaml", ["algorithm=ppo", path])
    assert (config.algorithm.name, config.imitation.held_out) == ("ppo", 0.1)


@pytest.mark.parametrize(
    "drawing", ["trials.options={pictures: true}", "trials.options={make: {render_mode: rgb_array}}"]
)
def test_videos_are_let_through_where_pictures_were_asked_for(drawing):
    describe(load_embodied(ROOT / PENDULUM, [*VIDEOS, drawing]), 1)
