"""pi0 and pi0.5: against transformers' pi0, against the equations written down a second time, and as policies."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import GemmaConfig, PI0Config, PI0ForConditionalGeneration
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from examples.tiny_checkpoints import SIZES
from examples.tiny_checkpoints import flow_tokenizer as tokenizer
from examples.tiny_checkpoints import write_tiny_flow as write_tiny
from rlinf.data.rng import mix
from rlinf.models.policy.build import build_policy_model, load_policy, make_policy, save_policy
from rlinf.models.policy.vla.flow import follow, sinusoids
from rlinf.models.policy.vla.gemma import AdaptiveNorm, Gemma
from rlinf.models.policy.vla.pi0 import Prompts, written
from rlinf.training.embodied.ppo import Preparation, choose
from tests.models.policy.cases import rough

CPU = torch.device("cpu")
SEEDS = torch.tensor([mix(3, row) for row in range(3)])
WORDS = ["pick up the bowl", "put_it\nthere ", "go"]
RUN = {"image": [40, 30, 6], "state_size": 8, "action_size": 7, "chunk": 2, "embodiment": "libero", "steps": 3,
       "critic_hidden": [16]}  # fmt: skip


def seen(rows=3):
    random = torch.Generator().manual_seed(5)
    picture = torch.randint(0, 256, (rows, 40, 30, 6), generator=random, dtype=torch.uint8)
    return {"rgb": picture, "state": torch.randn(rows, 8, generator=random)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tiny checkpoint of each, with weights that are all moved."""
    found = {}
    for model in ("pi0", "pi05"):
        path = tmp_path_factory.mktemp(model)
        write_tiny(path, model)
        policy = make_policy({"type": model, **RUN, "value_level": None}, str(path), CPU)
        save_policy(rough(policy), path)
        for name in ("policy.json", "extra.safetensors"):
            (path / name).unlink()
        found[model] = path
    return found


@pytest.fixture(params=["pi0", "pi05"])
def model(request):
    return request.param


@pytest.fixture
def read(directories):
    def reading(model, dtype=torch.float32, **settings):
        policy = make_policy({"type": model, **RUN, **settings}, str(directories[model]), CPU, dtype)
        choose(policy, Preparation())
        if policy.critic is not None:
            rough(policy.critic)
        return policy

    return reading


def test_pi0_denoises_as_that_of_transformers_does(read, directories, tmp_path):
    gemma = {"model_type": "gemma", "num_key_value_heads": 1}
    native = PI0Config(
        vlm_config={
            "model_type": "paligemma", "text_config": {**gemma, **SIZES["language"]}, "projection_dim": 32,
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **SIZES["vision"]},
            "image_token_id": 128,
        },
        dit_config={**gemma, **SIZES["expert"]},
        chunk_size=4,
    )  # fmt: skip
    native.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(directories["pi0"] / "model.safetensors")
    theirs, told = PI0ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    policy = read("pi0")
    inputs = policy.inputs(seen(), WORDS)
    noise = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = follow(policy.velocity(policy.context(inputs)), 5, noise)
        pictures = torch.cat(
            [inputs["rgb"] / 127.5 - 1, torch.zeros(3, 1, 3, 28, 28)], 1
        )  # the third camera is missing
        ids = torch.cat([torch.full((3, 8), 128), inputs["text"]], 1)
        state = functional.pad(seen()["state"] * 3**0.5 / (1 + 1e-6 * 3**0.5), (0, 24))
        expected = theirs.eval().sample_actions(
            state, ids, pictures, noise, (ids != 0).long(), torch.tensor([[True, True, False]] * 3), 5
        )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert (ours[0] - ours[1]).abs().max() > 0.01  # it matters what is seen and read


def joint_pi05(weights, policy, inputs, x, t):
    """The velocity of pi0.5 as one pass over prefix and suffix together, from a checkpoint's tensors alone."""
    w = {name.removeprefix("paligemma_with_expert."): each for name, each in weights.items()}
    vlm, expert, heads, size = "paligemma.model.language_model.", "gemma_expert.model.", 2, 16
    patches = policy.paligemma_with_expert.paligemma._patches((inputs["rgb"] / 127.5 - 1).flatten(0, 1)).view(
        len(x), -1, 32
    )
    text = w["paligemma.lm_head.weight"][inputs["text"]] * 32**0.5
    streams = [torch.cat([patches, text], 1), x @ w["action_in_proj.weight"].T + w["action_in_proj.bias"]]
    time = sinusoids(t, 32, 4e-3, 4.0)
    for name in ("time_mlp_in", "time_mlp_out"):
        time = functional.silu(time @ w[f"{name}.weight"].T + w[f"{name}.bias"])
    here = torch.cat([torch.ones(len(x), 8), (inputs["text"] != 0).float(), torch.ones(len(x), 4)], 1).bool()
    block = torch.cat([torch.zeros(8 + inputs["text"].shape[1]), torch.ones(4)])
    mask = (block[None, :] <= block[:, None])[None] & here[:, None, :]
    positions = here.long().cumsum(1) - 1
    angle = positions[..., None] / 10000 ** (torch.arange(0, size, 2) / size)
    angle = torch.cat([angle, angle], -1)[:, None]

    def normed(stream, name, prefix):
        y = stream * (stream.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        if prefix == vlm:
            return y * (1 + w[f"{prefix}{name}.weight"]), 1.0
        scale, shift, gate = (time @ w[f"{prefix}{name}.dense.weight"].T + w[f"{prefix}{name}.dense.bias"])[
            :, None
        ].chunk(3, -1)
        return y * (1 + scale) + shift, gate

    for number in range(2):
        q, k, v, gates = [], [], [], []
        for stream, prefix in zip(streams, (vlm, expert), strict=True):
            of = f"layers.{number}."
            y, gate = normed(stream, f"{of}input_layernorm", prefix)
            gates.append(gate)
            for part, name, many in ((q, "q", heads), (k, "k", 1), (v, "v", 1)):
                part.append((y @ w[f"{prefix}{of}self_attn.{name}_proj.weight"].T).unflatten(-1, (many, size)))
        q, k, v = (torch.cat(each, 1).transpose(1, 2) for each in (q, k, v))

        def turned(z):
            half = torch.cat([-z[..., size // 2 :], z[..., : size // 2]], -1)
            return z * angle.cos() + half * angle.sin()

        scores = turned(q) @ turned(k).transpose(-1, -2) / size**0.5
        found = scores.masked_fill(~mask[:, None], -1e30).softmax(-1) @ v
        found = found.transpose(1, 2).flatten(2)
        parts = found.split([streams[0].shape[1], 4], 1)
        for index, (part, prefix) in enumerate(zip(parts, (vlm, expert), strict=True)):
            of = f"{prefix}layers.{number}."
            stream = streams[index] + part @ w[f"{of}self_attn.o_proj.weight"].T * gates[index]
            y, gate = normed(stream, f"layers.{number}.post_attention_layernorm", prefix)
            inner = functional.gelu(y @ w[f"{of}mlp.gate_proj.weight"].T, approximate="tanh")
            inner = inner * (y @ w[f"{of}mlp.up_proj.weight"].T)
            streams[index] = stream + inner @ w[f"{of}mlp.down_proj.weight"].T * gate
    return normed(streams[1], "norm", expert)[0] @ w["action_out_proj.weight"].T + w["action_out_proj.bias"]


def test_pi05_is_joint_attention_with_blockwise_masks_and_conditioned_norms(read, directories):
    policy = read("pi05")
    inputs = policy.inputs(seen(), WORDS)
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([1.0, 0.4, 0.7])
    with torch.no_grad():
        ours = policy.velocity(policy.context(inputs))(x, t).velocity
        expected = joint_pi05(load_file(directories["pi05"] / "model.safetensors"), policy, inputs, x, t)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_conditioned_norm_without_condition_is_the_ordinary_one_and_closes_its_gate():
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    adaptive, plain = AdaptiveNorm(8, 1e-6), GemmaRMSNorm(8)
    found, gate = adaptive(x, torch.zeros(2, 8))
    torch.testing.assert_close(found, plain(x))
    assert not gate.any()
    rough(adaptive, 1.0)
    condition = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    scale, shift, gate = (condition @ adaptive.dense.weight.T + adaptive.dense.bias).chunk(3, 1)
    found, again = adaptive(x, condition)
    rms = x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(found, x / rms * (1 + scale[:, None]) + shift[:, None])
    torch.testing.assert_close(again, gate[:, None])


def test_the_conditioned_stack_is_the_ordinary_one_where_its_condition_says_the_same():
    config = GemmaConfig(num_key_value_heads=1, **SIZES["expert"])
    plain, adaptive = rough(Gemma(config)), Gemma(config, adaptive=True)
    state = adaptive.state_dict()
    for name, each in plain.state_dict().items():
        if name in state:
            state[name] = each
        else:  # scale, no shift, and a gate of 1, whatever the condition
            state[name.replace(".weight", ".dense.bias")] = torch.cat([each, torch.zeros(32), torch.ones(32)])
    adaptive.load_state_dict(state)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    mask, places = torch.ones(2, 5, 5, dtype=torch.bool).tril(), torch.arange(5).expand(2, 5)
    found, cache = adaptive(x, mask, places, None, torch.randn(2, 32))
    expected, known = plain(x, mask, places)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(cache, known)


def test_the_state_does_not_see_actions_and_nothing_sees_pads(read, model):
    policy, longer = read(model), read(model, prompt_length=220)
    inputs, longer_inputs = policy.inputs(seen(), WORDS), longer.inputs(seen(), WORDS)
    x, t = torch.randn(3, 4, 32), torch.full((3,), 0.5)
    with torch.no_grad():
        context = policy.context(inputs)
        one = policy.velocity(context)(x, t)
        two = longer.velocity(longer.context(longer_inputs))(x, t)
        other = policy.velocity(context)(x + torch.tensor([0.0, 0, 0, 1])[:, None], t)
    assert longer_inputs["text"].shape[1] == 220
    torch.testing.assert_close(one.velocity, two.velocity, rtol=1e-5, atol=1e-5)
    assert (one.features[:, 0] - other.features[:, 0]).abs().max() > 1e-4  # actions see each other
    if model == "pi0":
        expert, seen_by = policy.paligemma_with_expert.gemma_expert, []
        expert.register_forward_hook(lambda module, given, found: seen_by.append(found[:, 0]))
        with torch.no_grad():
            policy.velocity(context)(x, t)
            policy.velocity(context)(x + 1, t)
        assert torch.equal(*seen_by)


@pytest.mark.parametrize(("model", "method"), [("pi0", "flow_sde"), ("pi05", "flow_noise")])
def test_as_a_policy_it_scores_what_it_drew_row_by_row_and_learns_in_the_expert(read, model, method):
    policy = read(model, method=method)
    drawn = policy.act(seen(), instructions=WORDS, generator=SEEDS)
    found = policy.evaluate(drawn.stored)
    torch.testing.assert_close(found.logprobs, drawn.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.values, drawn.values, rtol=1e-5, atol=1e-5)
    assert drawn.actions.shape == (3, 2, 7)
    assert drawn.logprobs.shape == found.entropy.shape == (3,)
    alone = policy.act(
        {name: each[1:2] for name, each in seen().items()}, instructions=WORDS[1:2], generator=SEEDS[1:2]
    )
    torch.testing.assert_close(alone.actions[0], drawn.actions[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone.logprobs[0], drawn.logprobs[1], rtol=1e-4, atol=1e-4)
    value = policy.value(seen(), WORDS)
    if model == "pi05":  # of the observation alone; that of pi0 reads the chain
        torch.testing.assert_close(value, drawn.values, rtol=1e-5, atol=1e-5)
    assert value.shape == (3,)
    acting = [each for each in policy.without_critic() if each.requires_grad]
    of_values = torch.autograd.grad(found.values.sum(), acting, allow_unused=True, retain_graph=True)
    assert all(each is None for each in of_values)
    (found.logprobs.sum() + found.values.sum()).backward()
    learned = {name for name, each in policy.named_parameters() if each.grad is not None and each.grad.any()}
    assert {name for name, each in policy.named_parameters() if each.requires_grad} == learned
    assert not any(name.startswith("paligemma_with_expert.paligemma.") for name in learned)
    assert "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight" in learned


def test_all_of_it_learns_where_it_may(read, model):
    policy = read(model, value_level=None).requires_grad_(True)
    drawn = policy.act(seen(), instructions=WORDS, generator=SEEDS)
    policy.evaluate(drawn.stored).logprobs.sum().backward()
    still = [name for name, each in policy.named_parameters() if each.grad is None or not each.grad.any()]
    last = "paligemma_with_expert.paligemma.model.language_model.layers.1."  # only its keys and values are read
    unread = (f"{last}self_attn.q_", f"{last}self_attn.o_", f"{last}mlp", f"{last}post")
    assert [name for name in still if not name.startswith((*unread, last[:-9] + "norm")) and "vision" not in name] == []


def test_a_checkpoint_is_saved_as_it_was_published_and_read_again(read, directories, model, tmp_path):
    policy = read(model)
    save_policy(policy, tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (directories[model], tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any("embed_tokens" in name for name in after)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (directories[model] / name).read_bytes()
    stats = "physical-intelligence/libero/norm_stats.json"
    assert json.loads((tmp_path / stats).read_text()) == json.loads((directories[model] / stats).read_text())
    one, two = (each.act(seen(), instructions=WORDS, generator=SEEDS) for each in (policy, load_policy(tmp_path)))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.values, two.values)


def as_lerobot(openpi, directory, about):
    """A checkpoint of openpi as lerobot names its parts, without its statistics."""
    directory.mkdir()
    for path in openpi.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    named = {f"model.{name}": each for name, each in load_file(openpi / "model.safetensors").items()}
    words = named["model.paligemma_with_expert.paligemma.lm_head.weight"].clone()
    twice = {**named, "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight": words}
    save_file(twice, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"chunk_size": 4, "vision_heads": 2, **about}))
    return named


def write_processors(directory, numbers):
    """What lerobot's processors save of the steps that normalise."""
    for name, step in (("policy_preprocessor", "normalizer"), ("policy_postprocessor", "unnormalizer")):
        file = f"{name}_step_3_{step}_processor.safetensors"
        steps = [{"registry_name": "rename", "config": {}}, {"registry_name": step, "config": {}, "state_file": file}]
        (directory / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}))
        save_file({key: row for key, row in numbers.items() if "pre" in name or "action" in key}, directory / file)


def test_lerobots_names_are_read_and_written_back(directories, read, tmp_path):
    named = as_lerobot(directories["pi0"], tmp_path / "lerobot", {"type": "pi0"})
    (tmp_path / "lerobot" / "norm_stats.json").write_bytes(
        next(directories["pi0"].rglob("norm_stats.json")).read_bytes()
    )
    policy = make_policy({"type": "pi0", **RUN}, str(tmp_path / "lerobot"), CPU)
    expected = read("pi0").act(seen(), instructions=WORDS, generator=SEEDS).actions
    assert torch.equal(policy.act(seen(), instructions=WORDS, generator=SEEDS).actions, expected)
    save_policy(policy, tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == named.keys()


@pytest.mark.parametrize(
    ("kind", "names"), [("MIN_MAX", ("min", "max")), ("QUANTILES", ("q01", "q99")), ("MEAN_STD", ("mean", "std"))]
)
def test_lerobots_statistics_and_kind_of_normalisation_are_read_and_go_back(model, kind, names, directories, tmp_path):
    mapping = {"VISUAL": "IDENTITY", "STATE": kind, "ACTION": kind}
    about = {"type": model, "normalization_mapping": mapping, "max_state_dim": 32}
    as_lerobot(directories[model], tmp_path / "lerobot", about)
    numbers = {
        f"{feature}.{name}": torch.rand(size) + by
        for feature, size in (("observation.state", 8), ("action", 7))
        for name, by in zip(names, (-1.0, 1.0), strict=True)
    }
    write_processors(tmp_path / "lerobot", numbers)
    policy = make_policy({"type": model, **RUN}, str(tmp_path / "lerobot"), CPU)

    def rows(feature):
        return [numbers[f"{feature}.{name}"] for name in names]

    def normal(x, low, high):  # lerobot's processors/normalize_processor.py
        return (x - low) / high if kind == "MEAN_STD" else 2 * (x - low) / (high - low) - 1

    state, action = seen()["state"], torch.randn(3, 2, 7)
    torch.testing.assert_close(policy._normal(state), normal(state, *rows("observation.state")), rtol=1e-4, atol=1e-4)
    scaled = policy._robot.scaling.unnormalised(action)
    torch.testing.assert_close(normal(scaled, *rows("action")), action, rtol=1e-4, atol=1e-4)
    if model == "pi05":  # lerobot's Pi05PrepareStateTokenizerProcessorStep pads before it writes
        wanted = written(functional.pad(policy._normal(state)[0], (0, 24)))
        prompt = policy.prompts.encode([(f"Task: go, State: {wanted};\nAction: ",)])
        assert torch.equal(policy._tokens(["go"], state[:1]), prompt)
    save_policy(policy, tmp_path / "again")
    files = {path.name for path in (tmp_path / "lerobot").glob("policy_*")}
    assert len(files) == 4
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "lerobot" / name).read_bytes()
    sizes = {"state": 8, "actions": 7}
    other = {"mine": {part: {names[0]: [0.5] * size, names[1]: [1.0] * size} for part, size in sizes.items()}}
    others = make_policy({"type": model, **RUN, "statistics": other}, str(tmp_path / "lerobot"), CPU)
    save_policy(others, tmp_path / "other")  # with numbers of its own, in lerobot's files too
    for path in (tmp_path / "other").glob("policy_p*.safetensors"):
        assert {name: row.tolist() for name, row in load_file(path).items() if "action" in name} == {
            f"action.{names[0]}": [0.5] * 7, f"action.{names[1]}": [1.0] * 7,
        }  # fmt: skip
    assert (tmp_path / "other" / "mine" / "norm_stats.json").is_file()


@pytest.mark.parametrize("mapping", [{"STATE": "QUANTILES", "ACTION": "MEAN_STD"}, {"ACTION": "QUANTILE10"}])
def test_normalisations_that_are_none_of_ours_are_refused(mapping, directories, tmp_path):
    as_lerobot(directories["pi0"], tmp_path / "lerobot", {"type": "pi0", "normalization_mapping": mapping})
    with pytest.raises(ValueError, match=r"config\.json: normalization_mapping.*ACTION"):
        make_policy({"type": "pi0", **RUN}, str(tmp_path / "lerobot"), CPU)


def test_without_any_statistics_and_with_damaged_ones_the_directory_is_named(directories, tmp_path):
    as_lerobot(directories["pi0"], tmp_path / "lerobot", {"type": "pi0"})
    with pytest.raises(ValueError, match=r"norm_stats\.json.*policy_preprocessor"):
        make_policy({"type": "pi0", **RUN}, str(tmp_path / "lerobot"), CPU)
    write_processors(tmp_path / "lerobot", {"action.mean": torch.zeros(7)})
    next((tmp_path / "lerobot").glob("*normalizer*.safetensors")).write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"policy_p.*damaged"):
        make_policy({"type": "pi0", **RUN}, str(tmp_path / "lerobot"), CPU)


@pytest.mark.parametrize("absolute", [True, False])
def test_statistics_outside_of_the_directory_are_not_read(absolute, directories, tmp_path):
    as_lerobot(directories["pi0"], tmp_path / "lerobot", {"type": "pi0"})
    save_file({"action.mean": torch.zeros(7), "action.std": torch.ones(7)}, tmp_path / "outside.safetensors")
    name = str(tmp_path / "outside.safetensors") if absolute else "../outside.safetensors"
    (tmp_path / "lerobot" / "policy_preprocessor.json").write_text(json.dumps({"steps": [{"state_file": name}]}))
    with pytest.raises(ValueError, match=r"policy_preprocessor\.json.*state_file"):
        make_policy({"type": "pi0", **RUN}, str(tmp_path / "lerobot"), CPU)


def test_in_bfloat16_what_openpi_keeps_in_float32_stays_and_scores_agree(read, model):
    policy = read(model, torch.bfloat16)
    kinds = {name: each.dtype for name, each in policy.named_parameters()}
    main = "paligemma_with_expert.paligemma.model."
    of = "vision_tower.vision_model"
    for name in ("language_model.layers.0.mlp.up_proj.weight", f"{of}.encoder.layers.0.layer_norm1.weight"):
        assert kinds[main + name] == torch.bfloat16
    norm = ".dense" if model == "pi05" else ""
    for name in (f"{main}{of}.embeddings.patch_embedding.weight", f"{main}language_model.norm.weight",
                 f"{main}language_model.layers.1.input_layernorm.weight", "action_out_proj.weight", "critic.0.weight",
                 f"paligemma_with_expert.gemma_expert.model.norm{norm}.weight"):  # fmt: skip
        assert kinds[name] == torch.float32, name
    drawn = policy.act(seen(), instructions=WORDS, generator=SEEDS)
    exact = read(model).act(seen(), instructions=WORDS, generator=SEEDS)
    torch.testing.assert_close(drawn.actions, exact.actions, rtol=0, atol=0.2)  # 8 bits through two stacks
    torch.testing.assert_close(policy.evaluate(drawn.stored).logprobs, drawn.logprobs, rtol=1e-3, atol=1e-3)
    policy.evaluate(drawn.stored).logprobs.sum().backward()


def test_actions_come_out_in_the_robots_units_and_then_in_the_simulators_bounds(directories):
    bounds = {"action_low": [-0.5] * 6 + [float("-inf")], "action_high": [0.5] * 6 + [float("inf")]}
    policies = {
        model: make_policy({"type": model, **RUN, **bounds}, str(directories[model]), CPU) for model in directories
    }
    x = torch.tensor([0.3, -0.2, 0.9, -1.5, 0.0, 0.1, 0.8]).expand(1, 2, 7)
    pi0 = policies["pi0"].emitted(x, {})[0, 0]
    units = x[0, 0] * (1 / 3**0.5 + 1e-6)  # mean 0
    torch.testing.assert_close(pi0, torch.cat([(units[:6] / 0.5).clamp(-1, 1), units[6:]]))
    pi05 = policies["pi05"].emitted(x, {})[0, 0]
    units = (x[0, 0] + 1) / 2 * (1.96 + 1e-6) - 0.98  # from -0.98 to 0.98
    torch.testing.assert_close(pi05, torch.cat([(units[:6] / 0.5).clamp(-1, 1), units[6:]]))
    for policy in policies.values():
        actions = torch.linspace(-0.9, 0.9, 14).view(1, 2, 7)
        stored = policy.encode(actions, {})
        assert stored.shape == (1, 4, 32)
        assert torch.equal(stored[:, 2], stored[:, 1])  # behind the chunk
        assert not stored[..., 7:].any()
        torch.testing.assert_close(policy.emitted(stored[:, :2, :7], {}), actions)


def test_demonstrations_of_actions_relative_to_the_state_come_back(read, model):
    policy = read(model, relative=True)
    actions = torch.linspace(-0.9, 0.9, 42).view(3, 2, 7)
    stored = policy.demonstrated(seen(), actions, WORDS)
    made = stored["actions"][:, :2, :7]
    torch.testing.assert_close(policy.emitted(made, stored), actions, atol=1e-5, rtol=0)
    absolute = read(model).demonstrated(seen(), actions, WORDS)["actions"][:, :2, :7]
    apart = (absolute - made) * policy._robot.scaling.half  # in the robot's units
    torch.testing.assert_close(apart[..., :6].float(), seen()["state"][:, None, :6].expand(3, 2, 6), atol=1e-5, rtol=0)
    assert policy.imitate(stored).mean().isfinite()


def test_prompts_are_those_of_openpi(read, directories):
    letters = tokenizer()

    def text(row):
        return "".join(letters.id_to_token(token) for token in row.tolist() if token)

    state = seen()["state"]
    assert [text(row) for row in read("pi0").inputs(seen(), WORDS)["text"]] == [
        "<bos>pick up the bowl\n", "<bos>put it there\n", "<bos>go\n"
    ]  # fmt: skip
    libero = read("pi05").inputs(seen(), WORDS)
    assert text(libero["text"][1]) == "<bos>put it there\n"  # its embodiment has no state
    assert "state" not in libero
    policy = read("pi05", embodiment="")
    row = policy.inputs(seen(), WORDS)["text"][1]
    scaled = 2 * (state[1] + 0.98) / (1.96 + 1e-6) - 1
    bins = [int(((x + 1) * 128).floor().clamp(-1, 255)) for x in scaled]
    assert text(row) == f"<bos>Task: put it there, State: {' '.join(map(str, bins))};\nAction: "
    assert written(torch.tensor([-1.5, -1.0, 0.0, 0.9999, 1.5])) == "-1 0 128 255 255"


def test_either_file_of_a_tokenizer_is_read_and_what_is_wrong_is_said(monkeypatch, caplog):
    import sys
    import types

    class Processor:
        def __init__(self, model_proto):
            assert model_proto == b"pieces"

        def bos_id(self):
            return 2

        def eos_id(self):
            return 1

        def vocab_size(self):
            return 257152

        def encode(self, text):
            return [ord(letter) for letter in text]

    made = types.ModuleType("sentencepiece")
    made.SentencePieceProcessor = Processor
    monkeypatch.setitem(sys.modules, "sentencepiece", made)
    prompts = Prompts({"paligemma_tokenizer.model": b"pieces"}, 5)
    assert prompts.encode([("go", "\n")]).tolist() == [[2, 103, 111, 10, 0]]
    too_long = Prompts({"paligemma_tokenizer.model": b"pieces"}, 5).encode([("gone", "\n"), ("gone", "\n")])
    assert too_long.tolist() == [[2, 103, 111, 110, 101]] * 2
    assert caplog.text.count("prompt_length=5") == 1
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for files, said in (
        ({"paligemma_tokenizer.model": b""}, "pip install sentencepiece"),
        ({}, "has no tokenizer"),
        ({"tokenizer.json": b"{}"}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=said):
            Prompts(files, 5)


def test_at_their_real_size_they_have_the_published_shapes():
    with torch.device("meta"):
        pi0, pi05 = (
            build_policy_model(
                {"type": model, "image": [224, 224, 6], "action_size": 7, "chunk": 5, "embodiment": "libero"}
            )
            for model in ("pi0", "pi05")
        )
    shapes = {name: tuple(each.shape) for name, each in pi0.state_dict().items()}
    main, expert = "paligemma_with_expert.paligemma.model.", "paligemma_with_expert.gemma_expert.model."
    for name, shape in {
        f"{main}vision_tower.vision_model.encoder.layers.26.mlp.fc1.weight": (4304, 1152),
        f"{main}multi_modal_projector.linear.weight": (2048, 1152),
        f"{main}language_model.layers.17.mlp.gate_proj.weight": (16384, 2048),
        f"{main}language_model.layers.0.self_attn.k_proj.weight": (256, 2048),
        "paligemma_with_expert.paligemma.lm_head.weight": (257152, 2048),
        f"{expert}layers.17.self_attn.q_proj.weight": (2048, 1024),
        f"{expert}layers.0.mlp.down_proj.weight": (1024, 4096),
        "state_proj.weight": (1024, 32), "action_in_proj.weight": (1024, 32), "action_out_proj.weight": (32, 1024),
        "action_time_mlp_in.weight": (1024, 2048), "action_time_mlp_out.weight": (1024, 1024),
        "critic.0.weight": (512, 1024), "critic.6.weight": (1, 128),
    }.items():  # fmt: skip
        assert shapes[name] == shape, name
    other = {name: tuple(each.shape) for name, each in pi05.state_dict().items()}
    for name in (f"{expert}norm", f"{expert}layers.17.input_layernorm", f"{expert}layers.3.post_attention_layernorm"):
        assert other[f"{name}.dense.weight"] == (3072, 1024)
        assert other[f"{name}.dense.bias"] == (3072,)
    assert other["time_mlp_in.weight"] == (1024, 1024)
    assert other["critic.0.weight"] == (1024, 2048)
    assert not {"state_proj.weight", "action_time_mlp_in.weight"} & other.keys()
    assert (pi0.horizon, pi05.horizon) == (50, 50)
    assert len(pi0.blocks()) == 27 + 18 + 18
    noise = build_noise()
    assert [tuple(each.shape) for each in noise.parameters() if each.ndim == 2] == [(128, 1024), (64, 128), (32, 64)]


def build_noise():
    from rlinf.models.policy.vla.flow import NoiseNet

    with torch.device("meta"):
        return NoiseNet(1024, 32, (0.08, 0.16))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"embodiment": "libro"}, r"mean libero"),
        ({"chunk": 5}, r"chunk=5.*action_size=7.*denoised, 4 actions.*32"),
        ({"value_level": "action", "level": "action"}, r"value_level.*chunk"),
        ({"asset": "none"}, r"checkpoint's: physical-intelligence/libero"),
        ({"gripper": "hand"}, r"gripper='hand'"),
        ({"horizn": 3}, r"mean horizon"),
    ],
)
def test_wrong_settings_are_refused_by_name(read, settings, said):
    with pytest.raises(ValueError, match=said):
        read("pi0", **settings)


def test_what_a_directory_lacks_is_said(directories, tmp_path):
    import shutil

    for number, (lost, said) in enumerate((
        ("tokenizer.json", "has no tokenizer"),
        ("physical-intelligence/libero/norm_stats.json", "norm_stats.json"),
    )):  # fmt: skip
        path = tmp_path / str(number)
        shutil.copytree(directories["pi0"], path)
        (path / lost).unlink()
        with pytest.raises(ValueError, match=said):
            make_policy({"type": "pi0", **RUN}, str(path), CPU)
    with pytest.raises(ValueError, match=r"set policy.path"):
        build_policy_model({"type": "pi0", **RUN, "horizon": 4, **SIZES}).act(seen(), instructions=WORDS)
    with pytest.raises(ValueError, match=r"another.*version"):
        make_policy({"type": "pi05", **RUN}, str(directories["pi0"]), CPU)
