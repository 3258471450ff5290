"""Policies made and saved by their authors' own code, beside ours: `make test-peers`, which makes what they run in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.tiny_checkpoints import flow_tokenizer, write_tiny_flow
from rlinf.data.demonstrations.statistics import Accumulator
from rlinf.data.rng import mix
from rlinf.models.policy.base import normals, uniforms
from rlinf.models.policy.build import build_policy_model, load_policy, save_policy
from rlinf.models.policy.vla.fast_tokens import FastTokens
from rlinf.models.policy.vla.flow import follow
from tests.models.policy.contract import wall_x_tokenizer
from tests.models.policy.vla.gr00t.tiny import GIVEN, HEAD, MODEL, VISION, WORDS, as_lerobot, publish

HERE = Path(__file__).parent
SEEDS = torch.tensor([mix(3, row) for row in range(3)])
CPU = torch.device("cpu")


def ask(environments, program, *arguments):
    """Run an author's code in its own environment, or in several, the first before the others; skip where one is not
    made."""
    packages = [HERE.parents[1] / f".venv-{environment}" for environment in environments.split()]
    if missing := [each.name for each in packages if not (each / ".installed").is_file()]:
        pytest.skip(f"{missing[0]} is not there: `make test-peers` makes it")
    paths = os.pathsep.join(map(str, [*packages, HERE]))
    env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, HERE / program, *map(str, arguments)], env=env, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def drawn(horizon, width):
    """Noise and times as `imitate` draws them, the noise as `act` begins with it, too."""
    random = uniforms(SEEDS, 3, horizon * width + 1, CPU)
    time = 0.999 * random[:, -1].float() ** (2.0 / 3.0) + 0.001
    return {"noise": normals(random[:, :-1]).view(3, horizon, width), "time": time}


def robot(rows=3, side=224, state=8, horizon=4):
    random = torch.Generator().manual_seed(1)
    return {
        "rgb": torch.randint(0, 256, (rows, side, side, 6), dtype=torch.uint8, generator=random),
        "state": torch.rand(rows, state, generator=random) * 2 - 1,
        "actions": torch.rand(rows, horizon, 7, generator=random) * 2 - 1,
    }


def spread(size):
    random = torch.Generator().manual_seed(size)
    low, width = -1 - torch.rand(size, generator=random), 2 + torch.rand(size, generator=random)
    names = {"mean": low / 3, "std": width / 3, "q01": low, "q99": low + width}
    return {name: [round(number, 4) for number in row.tolist()] for name, row in names.items()}


# openpi ---------------------------------------------------------------------------------------------------------------

TEXTS = ["Put the Bowl on the plate", "open_the_drawer", "push it\nto the left"]
BOUND = 10.0
"""The simulator's bounds, so far out that nothing is cut to them."""


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def openpi(request, tmp_path_factory):
    """(ours, what was given, openpi's answers, its directory) for pi0 and pi0.5."""
    folder, length = tmp_path_factory.mktemp(request.param), 48 if request.param == "pi0" else 120
    given = {**robot(), **drawn(4, 32)}
    save_file(given, folder / "given.safetensors")
    statistics = {"state": spread(8), "actions": spread(7)}
    about = {"statistics": statistics, "texts": TEXTS, "length": length, "steps": 10}
    (folder / "given.json").write_text(json.dumps(about))
    flow_tokenizer().save(str(folder / "tokenizer.json"))
    ask("openpi", "by_openpi.py", request.param, folder)
    (folder / "openpi" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = {
        "type": request.param, "image": [224, 224, 6], "state_size": 8, "action_size": 7, "chunk": 4, "steps": 10,
        "prompt_length": length, "action_low": [-BOUND] * 7, "action_high": [BOUND] * 7,
    }  # fmt: skip
    return load_policy(folder / "openpi", settings), given, load_file(folder / "answers.safetensors"), folder / "openpi"


def test_openpi_reads_the_same_tokens_and_acts_the_same(openpi):
    policy, given, answers, _ = openpi
    observation = {"rgb": given["rgb"], "state": given["state"]}
    inputs = policy.inputs(observation, TEXTS)
    assert torch.equal(inputs["text"], answers["tokens"])
    assert len({tuple(row) for row in inputs["text"].tolist()}) == 3
    with torch.no_grad():
        chain = follow(policy.velocity(policy.context(inputs)), 10, given["noise"])
    torch.testing.assert_close(chain, answers["chain"], atol=1e-4, rtol=1e-4)
    acted = policy.act(observation, instructions=TEXTS, generator=SEEDS, greedy="from_noise")
    torch.testing.assert_close(acted.actions * BOUND, answers["actions"].float(), atol=1e-4, rtol=1e-4)
    assert answers["actions"].std() > 0.1


def test_openpi_loses_the_same(openpi):
    policy, given, answers, _ = openpi
    observation = {"rgb": given["rgb"], "state": given["state"]}
    stored = policy.demonstrated(observation, given["actions"] / BOUND, TEXTS)
    with torch.no_grad():
        lost = policy.imitate(stored, generator=SEEDS).mean()
    torch.testing.assert_close(lost.float(), answers["losses"].mean(), atol=1e-4, rtol=1e-4)


def test_openpi_finds_its_own_names_in_what_is_saved(openpi, tmp_path):
    policy, _, _, directory = openpi
    save_policy(policy, tmp_path)
    ours, theirs = (load_file(each / "model.safetensors") for each in (tmp_path, directory))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# lerobot --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gr00t(tmp_path_factory):
    """(ours, observation, what was given, lerobot's answers, its directory)."""
    folder = tmp_path_factory.mktemp("gr00t")
    publish(folder / "parts")
    words = {**WORDS, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    eagle = json.loads((folder / "parts/eagle/config.json").read_text())
    eagle |= {"vision_config": {**VISION, "model_type": "siglip_vision_model"}, "text_config": words}
    attention = {**HEAD["vl_self_attention_cfg"], "positional_embeddings": None}
    dit = {**HEAD["diffusion_model_cfg"], "cross_attention_dim": 48}
    head = {**HEAD, "diffusion_model_cfg": dit, "vl_self_attention_cfg": attention, "add_pos_embed": True}
    model = {**MODEL, "action_head_cfg": head}
    settings = {**GIVEN, "embodiment": "plain", "robot": "libero_franka", "cameras": 2, "chunk": 6}
    ours = load_policy(folder / "parts", {**settings, "model": model})
    observation = {"rgb": robot(side=40)["rgb"], "state": robot(state=4)["state"]}
    inputs = ours.inputs(observation, TEXTS)
    state = torch.nn.functional.pad(ours.scalings[0].normalised(inputs["state"]), (0, 6))
    wanted = ours.encode(robot(horizon=6)["actions"], inputs)
    given = {**drawn(6, 8), "text": inputs["text"], "pixels": ours._pictures(inputs["rgb"]), "state": state}
    save_file({**given, "wanted": wanted}, folder / "given.safetensors")
    (folder / "given.json").write_text(json.dumps({"eagle": eagle, "model": model}))
    ask("lerobot", "by_lerobot.py", "gr00t", folder)
    for part in ("eagle", "experiment_cfg"):
        (folder / "gr00t" / part).symlink_to(folder / "parts" / part)
    return (
        load_policy(folder / "gr00t", settings),
        observation,
        given,
        load_file(folder / "answers.safetensors"),
        folder,
    )


def test_gr00t_acts_as_lerobot_s_does_in_batches_of_one(gr00t):
    policy, observation, given, answers, _ = gr00t
    with torch.no_grad():
        chain = follow(policy.velocity(policy.context(policy.inputs(observation, TEXTS))), 4, given["noise"])
    torch.testing.assert_close(chain, answers["chain"], atol=1e-4, rtol=1e-4)
    assert answers["chain"].std() > 0.1


def test_gr00t_loses_what_lerobot_s_loses(gr00t):
    policy, observation, _, answers, _ = gr00t
    stored = policy.demonstrated(observation, robot(horizon=6)["actions"], TEXTS)
    with torch.no_grad():
        lost = policy.imitate(stored, generator=SEEDS).mean()
    torch.testing.assert_close(lost.float(), answers["losses"].mean(), atol=1e-4, rtol=1e-4)


def test_gr00t_is_saved_under_the_names_of_lerobot_s_writer(gr00t, tmp_path):
    policy, *_, folder = gr00t
    save_policy(policy, tmp_path)
    ours, theirs = (load_file(each / "model.safetensors") for each in (tmp_path, folder / "gr00t"))
    tied = "backbone.eagle_model.language_model.lm_head.weight"  # which newer writers leave out
    assert ours.keys() - {tied} == theirs.keys() - {tied}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def processed(tmp_path_factory):
    """(folder with what lerobot's processors saved and made of states, actions and texts; what was given)."""
    folder = tmp_path_factory.mktemp("processors")
    given = {"state": robot()["state"] * 1.2, "actions": robot()["actions"]}
    picture = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    save_file({**given, "rgb": picture}, folder / "given.safetensors")
    about = {"statistics": {"state": spread(8), "actions": spread(7)}, "texts": TEXTS}
    (folder / "given.json").write_text(json.dumps(about))
    ask("lerobot", "by_lerobot.py", "processors", folder)
    return folder, given


def test_gr00t_of_lerobot_is_told_and_scaled_as_its_processors_do(processed, tmp_path):
    (folder, given), answers = processed, load_file(processed[0] / "answers.safetensors")
    publish(tmp_path / "authors")
    as_lerobot(tmp_path / "authors", tmp_path / "groot")
    for old in (tmp_path / "groot").glob("policy_p*"):
        old.unlink()
    for file in (folder / "groot").iterdir():
        (tmp_path / "groot" / file.name).symlink_to(file)
    settings = {**GIVEN, "embodiment": "plain", "cameras": 1, "image": [8, 8, 3], "state_size": 8, "model": MODEL}
    policy = load_policy(tmp_path / "groot", settings)
    assert answers["groot_robot"].tolist() == [policy.robot] * 3
    state = torch.nn.functional.pad(policy.scalings[0].normalised(given["state"]), (0, 56))
    torch.testing.assert_close(state, answers["groot_state"][:, 0], atol=1e-5, rtol=1e-5)
    units = policy.scalings[1].unnormalised(given["actions"][:, 0])
    torch.testing.assert_close(units, answers["groot_actions"], atol=1e-5, rtol=1e-5)
    assert f">{json.loads((folder / 'chats.json').read_text())[0]}<" in policy._prompts.text(TEXTS[0])


def test_pi05_writes_states_and_scales_numbers_as_lerobot_s_processors_do(processed):
    tmp_path, given = processed
    write_tiny_flow(tmp_path / "tiny", "pi05")
    mapping = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    said = json.loads((tmp_path / "tiny/config.json").read_text())
    said |= {"type": "pi05", "normalization_mapping": mapping, "max_state_dim": 32}
    for path in (tmp_path / "tiny").iterdir():
        if path.is_file() and path.name != "config.json":
            (tmp_path / "lerobot" / path.name).symlink_to(path)
    (tmp_path / "lerobot" / "config.json").write_text(json.dumps(said))
    settings = {"type": "pi05", "image": [28, 28, 6], "state_size": 8, "action_size": 7, "chunk": 4}
    policy = load_policy(tmp_path / "lerobot", settings)
    answers = load_file(tmp_path / "answers.safetensors")
    torch.testing.assert_close(policy._normal(given["state"]), answers["state"], atol=1e-5, rtol=1e-5)
    units = policy._robot.scaling.unnormalised(given["actions"])
    torch.testing.assert_close(units, answers["actions"], atol=1e-5, rtol=1e-5)
    prompts = json.loads((tmp_path / "prompts.json").read_text())
    assert torch.equal(policy._tokens(TEXTS, given["state"]), policy.prompts.encode([(text,) for text in prompts]))
    assert all(len(text.split("State: ")[1].split(";")[0].split()) == 32 for text in prompts)


NUMBERS = {
    "observation.state": {"mean": [0.1, -0.2, 0.3, 0.0, 0.5], "std": [1.5, 0.7, 0.9, 2.0, 1.1]},
    "action": {"mean": [0.2, 0.1, -0.3, 0.4], "std": [0.8, 1.2, 0.5, 0.9]},
    "observation.images.wrist": {"mean": [[[0.4]], [[0.5]], [[0.6]]], "std": [[[0.2]], [[0.3]], [[0.25]]]},
}
"""As lerobot's data sets have them; none of the other camera."""


SMALL = {
    "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "n_encoder_layers": 2, "n_vae_encoder_layers": 2,
    "latent_dim": 6, "chunk_size": 7, "n_action_steps": 7, "dropout": 0.0, "pretrained_backbone_weights": None,
}  # fmt: skip
LIMITS = {"min": [-1.0] * 5, "max": [0.5, 1.0, 2.0, 1.5, 0.8]}
STATE, WORLD = {"observation.state": ("STATE", (5,))}, {"observation.environment_state": ("ENV", (3,))}
ACTS = {
    "pictures": {
        "inputs": {f"observation.images.{name}": ("VISUAL", (3, 64, 64)) for name in ("top", "wrist")} | STATE,
        "sizes": SMALL, "numbers": NUMBERS,
    },
    "world": {
        "inputs": STATE | WORLD, "numbers": {**NUMBERS, "observation.state": LIMITS, "action": LIMITS},
        "sizes": {
            **SMALL, "pre_norm": True, "feedforward_activation": "gelu", "use_vae": False, "n_decoder_layers": 2,
            "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "IDENTITY"},
        },
    },
}  # fmt: skip


def acts(folder, kind):
    """(ours, what was given, lerobot's answers, folder with its directory `act`)."""
    given = robot(side=64, state=5 if kind == "pictures" else 8, horizon=7)
    pads = torch.arange(7) >= torch.tensor([7, 4, 6])[:, None]
    latent = normals(uniforms(SEEDS, 3, 6, CPU))
    given |= {"actions": given["actions"][..., :4].contiguous(), "pads": pads.to(torch.uint8), "latent": latent}
    save_file(given, folder / "given.safetensors")
    (folder / "given.json").write_text(
        json.dumps({**ACTS[kind], "outputs": {"action": ("ACTION", (4,))}, "texts": TEXTS})
    )
    ask("lerobot", "by_lerobot_policies.py", "make", "act", folder)
    policy = load_policy(folder / "act", {"type": "act", "action_low": [-BOUND] * 4, "action_high": [BOUND] * 4})
    return policy, given, load_file(folder / "answers.safetensors"), folder


@pytest.fixture(scope="module")
def act(tmp_path_factory):
    return acts(tmp_path_factory.mktemp("act"), "pictures")


def chosen(policy, given):
    return policy.act({"rgb": given["rgb"], "state": given["state"]}, greedy=True).actions * BOUND


def missed(policy, given):
    """The loss of what is demonstrated."""
    observation = {"rgb": given["rgb"], "state": given["state"]}
    stored = policy.demonstrated(observation, given["actions"] / BOUND)
    return policy.imitate(stored, given["pads"] == 0, SEEDS).mean().float()


@pytest.mark.parametrize("kind", ACTS)
def test_act_of_lerobot_acts_and_loses_the_same(kind, request, tmp_path):
    policy, given, answers, _ = request.getfixturevalue("act") if kind == "pictures" else acts(tmp_path, kind)
    torch.testing.assert_close(chosen(policy, given), answers["actions"], atol=1e-4, rtol=1e-4)
    assert answers["actions"].std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(missed(policy, given), answers["loss"], atol=1e-4, rtol=1e-4)


def measured(given):
    """Other statistics than the directory's."""
    counted = {}
    for name, rows in (("state", given["state"]), ("actions", given["actions"].flatten(0, 1))):
        counter = Accumulator()
        counter.add(rows)
        counted[name] = counter.done()
    return counted


def learned(lost, parameters):
    """Losses of a few steps of Adam."""
    optimizer, losses = torch.optim.Adam(parameters, lr=1e-3), []
    for _ in range(8):
        losses.append(lost())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return losses


def check_saved_alike(policy, directory, tmp_path):
    """What was loaded is saved byte for byte, and its tensors under the same names."""
    save_policy(policy, tmp_path / "same")
    for file in directory.iterdir():
        mine = tmp_path / "same" / file.name
        if file.name == "model.safetensors":
            ours, theirs = load_file(mine), load_file(file)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        else:
            assert mine.read_bytes() == file.read_bytes()


def check_goes_back(kind, folder, learners, answer, dropping=(), environments="lerobot"):
    """Policies that learn here are loaded by lerobot, and act and lose the same there.

    Args:
        kind: the policy's type.
        folder: with what was given.
        learners: policies by the names under which they are saved.
        answer: of one: its actions in the robot's units, and its loss.
        dropping: names of those that drop out in lerobot, so that losses differ.
        environments: that lerobot runs in.
    """
    for name, learner in learners.items():
        losses = learned(lambda learner=learner: answer(learner)[1], learner.parameters())
        assert losses[-1] < losses[0]
        save_policy(learner, folder / name)
    ask(environments, "by_lerobot_policies.py", "load", kind, folder, *learners)
    for name, learner in learners.items():
        theirs = load_file(folder / f"{name}.safetensors")
        with torch.no_grad():
            acted, lost = answer(learner)
        torch.testing.assert_close(acted, theirs["actions"], atol=1e-4, rtol=1e-4)
        if name not in dropping:
            torch.testing.assert_close(lost, theirs["loss"], atol=1e-4, rtol=1e-4)


BOUNDS = {"action_low": [-BOUND] * 4, "action_high": [BOUND] * 4}


def test_act_that_learned_here_goes_back_to_lerobot_with_its_numbers(act, tmp_path):
    policy, given, _, folder = act
    check_saved_alike(policy, folder / "act", tmp_path)
    settings = {"type": "act", **BOUNDS, **type(policy).with_statistics("mine", measured(given), 3)}
    sizes = {key: value for key, value in policy.config.sizes.items() if key in ("dim_model", "n_heads", "latent_dim")}
    new = {**settings, "image": [64, 64, 6], "state_size": 5, "action_size": 4, "chunk": 7}
    learners = {
        "tuned": load_policy(folder / "act", settings),
        "fresh": build_policy_model({**new, "model": {**sizes, "dim_feedforward": 48, "chunk_size": 7}}),
    }
    check_goes_back(
        "act", folder, learners, lambda mine: (chosen(mine, given), missed(mine, given)), dropping=("fresh",)
    )


VLM = {
    "scale_factor": 2, "text_config": {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5, "head_dim": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 128, "rms_norm_eps": 1e-5,
    },
    "vision_config": {
        "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 64, "patch_size": 16,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory):
    """(ours, what was given, lerobot's answers, folder with its directory `smolvla`)."""
    folder = tmp_path_factory.mktemp("smolvla")
    given = robot(side=48, state=5, horizon=7)
    given |= {"actions": given["actions"][..., :4].contiguous(), "rgb": given["rgb"][:, :40].contiguous()}
    given |= {**drawn(7, 32), "pads": torch.zeros(3, 7, dtype=torch.uint8)}
    save_file(given, folder / "given.safetensors")
    flow_tokenizer().save(str(folder / "tokenizer.json"))
    cameras = {f"observation.images.{name}": ("VISUAL", (3, 40, 48)) for name in ("top", "wrist")}
    about = {
        "inputs": {**cameras, **STATE}, "outputs": {"action": ("ACTION", (4,))}, "texts": TEXTS, "vlm": VLM,
        "numbers": NUMBERS, "sizes": {
            "chunk_size": 7, "n_action_steps": 7, "num_vlm_layers": 4, "resize_imgs_with_padding": (64, 64),
        },
    }  # fmt: skip
    (folder / "given.json").write_text(json.dumps(about))
    ask("lerobot", "by_lerobot_policies.py", "make", "smolvla", folder)
    (folder / "smolvla" / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    bounds = {"action_low": [-BOUND] * 4, "action_high": [BOUND] * 4}
    policy = load_policy(folder / "smolvla", {"type": "smolvla", **bounds})
    return policy, given, load_file(folder / "answers.safetensors"), folder


def flowed(policy, given):
    """Actions in the robot's units, and the loss of what is demonstrated."""
    observation = {"rgb": given["rgb"], "state": given["state"]}
    acted = policy.act(observation, instructions=TEXTS, generator=SEEDS, greedy="from_noise").actions * BOUND
    stored = policy.demonstrated(observation, given["actions"] / BOUND, TEXTS)
    return acted, policy.imitate(stored, generator=SEEDS).mean().float()


def test_smolvla_of_lerobot_acts_and_loses_the_same(smolvla):
    policy, given, answers, _ = smolvla
    with torch.no_grad():
        acted, lost = flowed(policy, given)
    torch.testing.assert_close(acted, answers["actions"], atol=1e-4, rtol=1e-4)
    assert answers["actions"].std() > 0.1
    torch.testing.assert_close(lost, answers["loss"], atol=1e-4, rtol=1e-4)


def test_smolvla_that_learned_here_goes_back_to_lerobot_with_its_numbers(smolvla, tmp_path):
    policy, given, _, folder = smolvla
    check_saved_alike(policy, folder / "smolvla", tmp_path)
    settings = {"type": "smolvla", **BOUNDS, **type(policy).with_statistics("mine", measured(given), 3)}
    learners = {"tuned": load_policy(folder / "smolvla", settings)}
    check_goes_back("smolvla", folder, learners, lambda mine: flowed(mine, given))


QWEN = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "vocab_size": 120, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_experts": 3,
    "experts": [
        {"hidden_size": size, "intermediate_size": inner, "hidden_act": "silu"}
        for size, inner in ((48, 64), (32, 40), (48, 24))
    ],
    "dim_inputs": [48, 32], "mlp_moe": True, "dof_config": {"arm": 13, "hand": 7}, "agent_pos_config": {"all": 20},
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "initializer_range": 0.2,
    "image_token_id": 104, "vision_start_token_id": 102, "video_token_id": 119, "pad_token_id": 107,
    "vision_config": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48,
        "fullatt_block_indexes": [1], "initializer_range": 0.2,
    },
}  # fmt: skip
"""As WALL-OSS has it, tiny; the third expert is nobody's."""


@pytest.fixture(scope="module")
def wall_x(tmp_path_factory):
    """(ours, what was given, lerobot's answers, folder with its directory `wall_x`)."""
    folder = tmp_path_factory.mktemp("wall_x")
    given = robot(side=72, state=5, horizon=7)
    given |= {"actions": given["actions"][..., :4].contiguous(), "rgb": given["rgb"][:, :40].contiguous()}
    given |= {**drawn(7, 20), "pads": torch.zeros(3, 7, dtype=torch.uint8)}
    save_file(given, folder / "given.safetensors")
    wall_x_tokenizer().save(str(folder / "tokenizer.json"))
    cameras = {f"observation.images.{name}": ("VISUAL", (3, 40, 72)) for name in ("face_view", "wrist")}
    about = {
        "inputs": {**cameras, **STATE}, "outputs": {"action": ("ACTION", (4,))}, "texts": TEXTS, "network": QWEN,
        "numbers": NUMBERS, "sizes": {"chunk_size": 7, "n_action_steps": 7},
    }  # fmt: skip
    (folder / "given.json").write_text(json.dumps(about))
    ask("lerobot", "by_lerobot_policies.py", "make", "wall_x", folder)
    (folder / "qwen" / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    policy = load_policy(folder / "wall_x", {"type": "wall_x", **BOUNDS})
    return policy, given, load_file(folder / "answers.safetensors"), folder


def test_wall_oss_of_lerobot_acts_and_loses_the_same(wall_x):
    policy, given, answers, _ = wall_x
    with torch.no_grad():
        acted, lost = flowed(policy, given)
    torch.testing.assert_close(acted, answers["actions"], atol=1e-4, rtol=1e-4)
    assert answers["actions"].std() > 0.1
    torch.testing.assert_close(lost, answers["loss"], atol=1e-4, rtol=1e-4)


def test_wall_oss_that_learned_here_goes_back_to_lerobot_with_its_numbers(wall_x, tmp_path):
    policy, given, _, folder = wall_x
    check_saved_alike(policy, folder / "wall_x", tmp_path)
    settings = {"type": "wall_x", **BOUNDS, **type(policy).with_statistics("mine", measured(given), 3)}
    learners = {"tuned": load_policy(folder / "wall_x", settings)}
    check_goes_back("wall_x", folder, learners, lambda mine: flowed(mine, given))


PALIGEMMA = {
    "vision": {
        "hidden_size": 144, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 56, "patch_size": 14, "projection_dim": 48, "vision_use_head": False,
    },
    "stack": {"width": 48, "depth": 2, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 1, "head_dim": 16},
}  # fmt: skip
BOTH = "openpi lerobot"
"""Openpi's transformers before lerobot's, since lerobot's lines for PaliGemma are written for those."""


@pytest.fixture(scope="module")
def pi0_fast(tmp_path_factory):
    """(ours, what was given, lerobot's answers, folder with its directory `pi0_fast`)."""
    folder = tmp_path_factory.mktemp("pi0_fast")
    given = robot(side=56, state=5, horizon=7)
    ends, along = given["actions"][..., :4], torch.linspace(0, 1, 7)[:, None]
    given["actions"] = (ends[:, :1] * (1 - along) + ends[:, 1:2] * along).contiguous()
    given |= {"pads": torch.zeros(3, 7, dtype=torch.uint8), "rgb": given["rgb"][:, :40].contiguous()}
    save_file(given, folder / "given.safetensors")
    fast = FastTokens.fit(given["actions"] * 2, scale=5.0, size=64)
    words = flow_tokenizer(fast.size)
    for name, files in (("fast", fast.files()), ("words", {"tokenizer.json": words.to_str().encode()})):
        (folder / name).mkdir()
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    (folder / "words" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GemmaTokenizer", "pad_token": "<pad>"})
    )
    cameras = {f"observation.images.{name}": ("VISUAL", (3, 40, 56)) for name in ("top", "wrist")}
    about = {
        **PALIGEMMA, "words": {"vocab_size": words.get_vocab_size()}, "texts": TEXTS, "numbers": NUMBERS,
        "inputs": {**cameras, **STATE}, "outputs": {"action": ("ACTION", (4,))}, "sizes": {
            "chunk_size": 7, "n_action_steps": 7, "image_resolution": (56, 56), "max_action_tokens": 64,
            "max_decoding_steps": 48, "fast_skip_tokens": 0, "validate_action_token_prefix": False,
        },
    }  # fmt: skip
    (folder / "given.json").write_text(json.dumps(about))
    ask(BOTH, "by_lerobot_policies.py", "make", "pi0_fast", folder)
    (folder / "pi0_fast" / "tokenizer.json").symlink_to(folder / "words" / "tokenizer.json")
    policy = load_policy(folder / "pi0_fast", {"type": "pi0_fast", **BOUNDS})
    return policy, given, load_file(folder / "answers.safetensors"), folder


def spoken(policy, given):
    """Actions in the robot's units, and the loss of what is demonstrated."""
    observation = {"rgb": given["rgb"], "state": given["state"]}
    acted = policy.act(observation, instructions=TEXTS, greedy=True).actions * BOUND
    stored = policy.demonstrated(observation, given["actions"] / BOUND, TEXTS)
    return acted, policy.imitate(stored).mean().float()


def test_pi0_fast_of_lerobot_acts_and_loses_the_same(pi0_fast):
    policy, given, answers, _ = pi0_fast
    with torch.no_grad():
        acted, lost = spoken(policy, given)
    torch.testing.assert_close(acted, answers["actions"], atol=1e-4, rtol=1e-4)
    assert answers["actions"].std() > 0.1
    torch.testing.assert_close(lost, answers["loss"], atol=1e-4, rtol=1e-4)


def test_pi0_fast_that_learned_here_goes_back_to_lerobot_with_its_numbers(pi0_fast, tmp_path):
    policy, given, _, folder = pi0_fast
    check_saved_alike(policy, folder / "pi0_fast", tmp_path)
    # so near to what it knows that it goes on saying whole chunks: otherwise lerobot may say any words, unlike this
    row = NUMBERS["action"]
    near = {**row, "mean": [0.002 + each for each in row["mean"]]}
    settings = {"type": "pi0_fast", **BOUNDS, "statistics": {"state": NUMBERS["observation.state"], "actions": near}}
    learners = {"tuned": load_policy(folder / "pi0_fast", settings)}
    check_goes_back("pi0_fast", folder, learners, lambda mine: spoken(mine, given), environments=BOTH)


TINY = {
    "horizon": 8, "n_action_steps": 4, "down_dims": (16, 32), "n_groups": 4, "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 6,
}  # fmt: skip
DENOISED = {
    "pictures": {
        "inputs": {f"observation.images.{name}": ("VISUAL", (3, 64, 72)) for name in ("top", "wrist")} | STATE,
        "numbers": {**NUMBERS, "observation.state": LIMITS, "action": {name: row[:4] for name, row in LIMITS.items()}},
        "sizes": {
            **TINY, "use_separate_rgb_encoder_per_camera": True, "resize_shape": (40, 44), "crop_ratio": 0.9,
            "crop_is_random": False, "noise_scheduler_type": "DDIM", "num_inference_steps": 6,
        },
    },
    "world": {
        "inputs": STATE | WORLD, "numbers": {**NUMBERS, "observation.state": LIMITS},
        "sizes": {
            **TINY, "n_obs_steps": 3, "beta_schedule": "linear", "prediction_type": "sample", "num_train_timesteps": 20,
            "use_film_scale_modulation": False, "do_mask_loss_for_padding": True, "clip_sample_range": 2.0,
            "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MEAN_STD"},
        },
    },
}  # fmt: skip


def denoisers(folder, kind):
    """(ours, what was given, lerobot's answers, folder with its directory `diffusion`)."""
    frames, steps, most = (2, 6, 100) if kind == "pictures" else (3, 20, 20)
    given = robot(side=72, state=frames * (5 if kind == "pictures" else 8), horizon=8)
    given |= {"actions": given["actions"][..., :4].contiguous()}
    given |= {"rgb": given["rgb"][:, :64].repeat(1, 1, 1, frames).roll(7, 1).contiguous()}
    given["rgb"][..., 6:] //= 2
    numbers = 8 * 4
    random = uniforms(SEEDS, 3, numbers * (1 + steps), CPU)
    noise = normals(random).view(3, 1 + steps, 8, 4)
    given |= {"noise": noise[:, 0].contiguous(), "draws": noise[:, 1:].contiguous()}
    given |= {"steps": (random[:, numbers] * most).long()}
    copies = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 1, 2, 3, 4, 5, 6, 7], [2, 2, 2, 3, 4, 5, 5, 5]])
    given |= {"pads": (copies != torch.arange(8)).to(torch.uint8)}
    given |= {"actions": given["actions"].gather(1, copies[..., None].expand(-1, -1, 4)).contiguous()}
    save_file(given, folder / "given.safetensors")
    outputs = {"action": ("ACTION", (4,))}
    (folder / "given.json").write_text(json.dumps({**DENOISED[kind], "outputs": outputs, "texts": TEXTS}))
    ask("lerobot", "by_lerobot_policies.py", "make", "diffusion", folder)
    policy = load_policy(folder / "diffusion", {"type": "diffusion", **BOUNDS, "min_std": 0.0})
    return policy, given, load_file(folder / "answers.safetensors"), folder


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory):
    return denoisers(tmp_path_factory.mktemp("diffusion"), "pictures")


def diffused(policy, given):
    """Actions in the robot's units, by DDIM from the noise, and the loss of what is demonstrated."""
    observation = {"rgb": given["rgb"], "state": given["state"]}
    acted = policy.act(observation, generator=SEEDS, greedy="from_noise" if policy._method == "DDIM" else False)
    real = given["pads"] == 0
    stored = policy.demonstrated(observation, given["actions"] / BOUND * real[..., None])
    return acted.actions * BOUND, policy.imitate(stored, real, SEEDS).mean().float()


@pytest.mark.parametrize("kind", DENOISED)
def test_diffusion_policy_of_lerobot_acts_and_loses_the_same(kind, request, tmp_path):
    made = request.getfixturevalue("diffusion") if kind == "pictures" else denoisers(tmp_path, kind)
    policy, given, answers, folder = made
    with torch.no_grad():
        acted, lost = diffused(policy, given)
    torch.testing.assert_close(acted, answers["actions"], atol=1e-4, rtol=1e-4)
    assert answers["actions"].std() > 0.1
    torch.testing.assert_close(lost, answers["loss"], atol=1e-4, rtol=1e-4)
    check_saved_alike(policy, folder / "diffusion", tmp_path)


def test_diffusion_policy_that_learned_here_goes_back_to_lerobot_with_its_numbers(diffusion):
    policy, given, _, folder = diffusion
    settings = {"type": "diffusion", **BOUNDS, **type(policy).with_statistics("mine", measured(given), 3)}
    new = {**settings, "image": [64, 72, 12], "state_size": 10, "action_size": 4, "chunk": 4, "steps": 6}
    sizes = {key: value for key, value in policy.config.sizes.items() if key in TINY} | {"resize_shape": [40, 44]}
    sizes |= {"noise_scheduler_type": "DDIM", "num_inference_steps": 6}
    learners = {
        "tuned": load_policy(folder / "diffusion", settings),
        "fresh": build_policy_model({**new, "model": sizes}),
    }
    check_goes_back("diffusion", folder, learners, lambda mine: diffused(mine, given))
