"""Policies in their authors' form learn from somebody's demonstrations, and their checkpoints know those by then."""

import json

import pytest
import torch

from rlinf.config.load import ConfigError, InputError
from rlinf.data.demonstrations import Window, open_parts, read_demonstrations
from rlinf.data.demonstrations.load import save_demonstrations
from rlinf.models.policy.build import load_policy
from rlinf.runs.dry_run.embodied import shown_of
from rlinf.runs.embodied_roles import learners_of, prepare_embodied
from rlinf.runs.roles import spawn_roles
from rlinf.runs.rules import load_embodied
from rlinf.runs.start import train
from rlinf.runtime.system.system import ActorSystem
from tests.data.demonstrations.shown import episode
from tests.models.policy.contract import instance

ROBOT = "my_robot"
SCALES = {
    "openvla": ("q01_q99", "dataset_statistics.json"),
    "openvla-oft": ("q01_q99", "dataset_statistics.json"),
    "pi0": ("mean_std", f"{ROBOT}/norm_stats.json"),
    "pi0 relative": ("mean_std", f"{ROBOT}/norm_stats.json"),
    "pi05": ("q01_q99", f"{ROBOT}/norm_stats.json"),
    "pi0_fast": ("q01_q99", None),
    "gr00t": ("min_max", "experiment_cfg/metadata.json"),
    "act": ("mean_std", None),
    "smolvla": ("mean_std", None),
    "wall_x": ("mean_std", None),
    "diffusion": ("min_max", None),
}
"""What each policy brings numbers to, and where its authors keep what that needs."""
LOW, HIGH = -0.4, 1.2
"""What the robot can be told, in its own units."""


def record(path, given, episodes=4, rows=16):
    """Demonstrations in the robot's units, of which some reach its bounds; the gripper is open or closed."""
    draw = torch.Generator().manual_seed(0)
    size, states = given["action_size"], given.get("state_size", 8)

    def shown(number):
        actions = LOW + (HIGH - LOW) * torch.rand(rows, 1, size, generator=draw) ** 2
        actions[:2] = torch.tensor([LOW, HIGH])[:, None, None]
        actions[..., -1] = actions[..., -1].sign()
        height, width, channels = given["image"]
        rgb = torch.randint(0, 256, (rows + 1, height, width, channels), generator=draw, dtype=torch.uint8)
        state = 0.3 + 2.0 * torch.randn(rows + 1, states, generator=draw)
        return episode(rows, observation={"rgb": rgb, "state": state}, actions=actions)

    save_demonstrations(path, (shown(number) for number in range(episodes)), "rlinf")


def configuration(name, known, shown, **settings):
    given = {key: value for key, value in known.config.items() if key not in ("type", "image", "action_size")}
    given |= {"relative": True} if "relative" in name else {}
    given |= {"embodiment": "plain", "cameras": 2} if name == "gr00t" else {}
    size = known.config["action_size"] - 1
    bounds = {"low": [LOW] * size + [-1.0], "high": [HIGH] * size + [1.0]}
    about = {
        "algorithm": "imitation", "trials": {"episodes": 0}, "optimizer": {"lr": 3e-3},
        "policy": {"type": known.config["type"], "path": str(known.path), "settings": given | settings},
        "imitation": {"path": str(shown), "bounds": bounds, "statistics": ROBOT, "batch": 16, "held_out": 0.25},
    }  # fmt: skip
    shown.with_suffix(".yaml").write_text(json.dumps(about))
    return load_embodied(shown.with_suffix(".yaml"))


async def imitated(config, directory):
    """Losses on what is held out before and after a few steps, and the directory of the saved policy."""
    prepared = prepare_embodied(config, 1)
    async with ActorSystem.local() as system:
        roles = await spawn_roles(system, prepared.placed, await learners_of(config, prepared, {}))
        losses = [(await roles["trainer"].held_out())["held_out/loss"]]
        await roles["trainer"].imitate_steps(0, 6)
        losses.append((await roles["trainer"].held_out())["held_out/loss"])
        await roles["trainer"].save(directory)
    return losses, directory / "policy"


def on_scale(units, counted, scale):
    """Numbers in the robot's units, [..., A], on a model's scale, by the formulas of its authors."""
    if scale == "mean_std":
        return (units - counted.mean(0)) / counted.std(0, correction=0)
    share = 0.01 if scale == "q01_q99" else 0.0
    low, high = counted.quantile(share, 0), counted.quantile(1.0 - share, 0)
    return 2.0 * (units - low) / (high - low) - 1.0


@pytest.mark.parametrize("name", SCALES)
async def test_it_learns_from_them_and_has_their_statistics_in_its_authors_form(name, tmp_path):
    known = instance(name.partition(" ")[0], tmp_path / "authors")
    record(tmp_path / "shown", known.config)
    config = configuration(name, known, tmp_path / "shown")
    (before, after), saved = await imitated(config, tmp_path / "saved")
    assert after < before

    mine = load_policy(saved)
    for ours in ("policy.json", "extra.safetensors"):
        (saved / ours).unlink()
    scale, file = SCALES[name]
    if file is not None:  # lerobot's numbers have no name
        assert ROBOT in (saved / file).read_text() or (saved / file).parent.name == ROBOT
    fitted = {key: getattr(mine.config, key) for key in ("image", "action_size", "action_low", "action_high")}
    fitted |= {"state_size": mine.config.state_size} if "state_size" in known.config else {}
    authors = load_policy(saved, {"type": known.config["type"], **config.policy.settings, **fitted})

    learned = open_parts(shown_of(config.imitation), config.seed)[0][0].places
    recorded = read_demonstrations(tmp_path / "shown")
    before, length = mine.lesson
    window = Window([recorded[place] for place in learned], length, before)
    rows = window.between(0, len(window))
    units, counted = rows.actions[..., :-1], rows.actions[:, before, :-1]  # of every decision one action: each once
    if "relative" in name:
        units = units - rows.observation["state"][:, None, :6]
        counted = units[rows.valid]
    wanted = on_scale(units, counted, scale)
    low, high = (torch.tensor(each) for each in (mine.config.action_low, mine.config.action_high))
    actions = 2.0 * (rows.actions - low) / (high - low) - 1.0
    told = ["push"] * len(rows)
    for policy in (mine, authors):
        found = policy.demonstrated(rows.observation, actions, told)["actions"]
        found = policy.bins.decode(found) if "openvla" in name else found[:, :length]
        off, most = (1 / 255, 1.0) if "openvla" in name else (1e-4, torch.inf)
        found, expected = found[..., : wanted.shape[-1]][rows.valid], wanted[rows.valid].clamp(-most, most)
        torch.testing.assert_close(found, expected, atol=off + 1e-4, rtol=1e-4)
    few = {key: part[:3] for key, part in rows.observation.items()}
    acts = [policy.act(few, instructions=told[:3], greedy=True).actions for policy in (mine, authors)]
    assert torch.equal(*acts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("policy.type=mlp", "policy.path=null"), r"MlpPolicy keeps.*statistics"),
        (("imitation.path=null",), r"imitation.statistics.*there.*demonstrations"),
        (("imitation.statistics=../robot",), r"take.*name.*my_robot"),
        (("imitation.statistics=/robot",), r"take.*name.*my_robot"),
        (("policy.path={shown}",), r"saved.*statistics"),
    ],
)
def test_statistics_that_nobody_could_use_are_refused(changes, said, tmp_path):
    known = instance("pi0", tmp_path / "authors")
    record(tmp_path / "shown", known.config)
    configuration("pi0", known, tmp_path / "shown")
    (tmp_path / "shown/policy.json").write_text("{}")
    changes = [each.format(shown=tmp_path / "shown") for each in changes]
    with pytest.raises(ConfigError, match=said):
        prepare_embodied(load_embodied(tmp_path / "shown.yaml", changes), 1)


def test_demonstrations_of_another_robot_than_the_simulator_s_are_refused_by_their_section(tmp_path):
    known = instance("pi0", tmp_path / "authors")
    record(tmp_path / "shown", known.config)
    configuration("pi0", known, tmp_path / "shown")
    toy = ("env.simulator=rlinf.envs.toy.Reach", "env.options={dims: 2, pixels: 28}", "env.workers=0")
    keys = [*toy, "trials.episodes=2", f"output_dir={tmp_path}", "trace=false"]
    with pytest.raises(InputError, match=r"^imitation:.*7.*simulator.*2"):
        train(load_embodied(tmp_path / "shown.yaml", keys))
