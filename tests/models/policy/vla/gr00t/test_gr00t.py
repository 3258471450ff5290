"""GR00T N1.5: the authors' directory in and out, its networks beside plain formulas, and how it learns."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from rlinf.models.policy.build import build_policy_model, load_policy, save_policy
from rlinf.models.policy.vla.gr00t import EAGLE_CONFIG, ROBOTS, Prompts
from rlinf.models.policy.vla.gr00t_transformer import ActionHead, Attention, DiffusionTransformer, TimeEncoder
from tests.models.policy.vla.gr00t.tiny import GIVEN, HEAD, MODEL, STATISTICS, as_lerobot, publish

WORDS = ["Put it there.", "go", "x y z"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gr00t") / "authors"
    return directory, publish(directory)


@pytest.fixture(scope="module")
def policy(published):
    return load_policy(published[0], GIVEN)


def seen(rows=3, seed=0):
    random = torch.Generator().manual_seed(seed)
    rgb = torch.randint(0, 256, (rows, 40, 40, 6), dtype=torch.uint8, generator=random)
    return {"rgb": rgb, "state": torch.rand(rows, 4, generator=random)}


# The authors' directory -----------------------------------------------------------------------------------------------


def test_it_reads_the_authors_tensors_and_writes_the_same_back(published, policy, tmp_path):
    directory, tensors = published
    save_policy(policy, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    for file in ("experiment_cfg/metadata.json", "eagle/vocab.json", "eagle/config.json"):
        assert (tmp_path / file).read_bytes() == (directory / file).read_bytes()
    assert json.loads((tmp_path / "config.json").read_text()) == MODEL

    again = load_policy(tmp_path)
    acted = [each.act(seen(), instructions=WORDS, generator=torch.arange(3)) for each in (policy, again)]
    assert torch.equal(acted[0].actions, acted[1].actions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gr00t_n1_6"}, "no GR00T N1.5"),
        ({"backbone_cfg": None}, "backbone_cfg"),
    ],
)
def test_a_directory_of_another_model_is_refused(published, tmp_path, change, said):
    about = {key: value for key, value in {**MODEL, **change}.items() if value is not None}
    for path in published[0].iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=said):
        load_policy(tmp_path, GIVEN)


def test_lerobot_s_directory_says_its_statistics_its_robot_and_how_instructions_are_written(published, tmp_path):
    rows = as_lerobot(published[0], tmp_path / "lerobot")
    settings = {**GIVEN, "embodiment": "plain", "cameras": 2, "model": MODEL}
    policy = load_policy(tmp_path / "lerobot", settings)
    assert (policy.robot, policy.reads_padding, policy.config.crop) == (2, False, 1.0)
    assert "['Put it there.']" in policy._prompts.text("Put it there.")
    low, high = rows["action.min"], rows["action.max"]
    x = torch.rand(2, 5, 7) * 2 - 1
    torch.testing.assert_close(
        policy.scalings[1].unnormalised(x), (x + 1) * 0.5 * (high - low) + low, atol=1e-5, rtol=0
    )
    low, high = rows["observation.state.min"], rows["observation.state.max"]
    state = seen()["state"]
    torch.testing.assert_close(
        policy.scalings[0].normalised(state), 2 * (state - low) / (high - low) - 1, atol=1e-5, rtol=1e-5
    )
    save_policy(policy, tmp_path / "again")
    theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("lerobot", "again"))
    assert theirs.keys() <= ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    files = [path.name for path in (tmp_path / "lerobot").glob("*") if path.suffix == ".json" or "step" in path.name]
    assert len(files) == 5
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "lerobot" / name).read_bytes()
    acted = [each.act(seen(), instructions=WORDS, greedy=True) for each in (policy, load_policy(tmp_path / "again"))]
    assert torch.equal(acted[0].actions, acted[1].actions)
    other = {"statistics": {"mine": {"statistics": STATISTICS}}, "robot": "mine"}
    tuned = load_policy(tmp_path / "lerobot", {**settings, **other})
    save_policy(tuned, tmp_path / "other")
    numbers = load_file(tmp_path / "other" / "policy_postprocessor_step_2_groot_action_un.safetensors")
    assert numbers["action.max"].tolist() == [1.0] * 7
    torch.testing.assert_close(numbers["observation.state.max"], torch.tensor([1.0, 2.0, 4.0, 0.04]))
    (tmp_path / "other" / "policy.json").unlink()
    acted = [each.act(seen(), instructions=WORDS, greedy=True).actions
             for each in (tuned, load_policy(tmp_path / "other", settings))]  # fmt: skip
    torch.testing.assert_close(*acted)


def test_what_lerobot_s_processors_do_and_is_not_done_here_is_refused(published, tmp_path):
    as_lerobot(published[0], tmp_path / "lerobot", formalize_language=True)
    with pytest.raises(ValueError, match=r"policy_preprocessor\.json.*formalize_language"):
        load_policy(tmp_path / "lerobot", {**GIVEN, "model": MODEL})


def test_a_robot_that_the_checkpoint_has_no_statistics_of_is_refused(published):
    with pytest.raises(ValueError, match=r"statistics.*libero_franka.*gr1:.*policy\.settings\.robot"):
        load_policy(published[0], {**GIVEN, "robot": "gr1"})


def test_without_a_tokenizer_it_says_where_one_belongs(published, tmp_path):
    for path in published[0].iterdir():
        if path.name != "eagle":
            (tmp_path / path.name).symlink_to(path)
    found = load_policy(tmp_path, {**GIVEN, "eagle": json.loads((published[0] / "eagle/config.json").read_text())})
    with pytest.raises(ValueError, match=r"Eagle's.*folder eagle/"):
        found.act(seen(), instructions=WORDS)


def test_the_real_one_has_the_published_shapes():
    with torch.device("meta"):
        real = build_policy_model({**GIVEN, "image": (224, 224, 6)})
    shapes = {real.published_name(name): tuple(each.shape) for name, each in real.state_dict().items()}
    eagle, told = "backbone.eagle_model", "action_head.model.timestep_encoder.timestep_embedder"
    expected = {
        f"{eagle}.vision_model.vision_model.encoder.layers.26.mlp.fc1.weight": (4304, 1152),
        f"{eagle}.mlp1.0.weight": (2048, 1152),
        f"{eagle}.language_model.model.layers.11.self_attn.q_proj.weight": (2048, 2048),
        f"{eagle}.language_model.model.layers.11.self_attn.k_proj.weight": (1024, 2048),
        f"{eagle}.language_model.lm_head.weight": (151680, 2048),
        f"{told}.linear_1.weight": (1536, 256),
        "action_head.model.transformer_blocks.0.norm1.linear.weight": (3072, 1536),
        "action_head.model.transformer_blocks.0.attn1.to_k.weight": (1536, 2048),
        "action_head.model.transformer_blocks.15.attn1.to_k.weight": (1536, 1536),
        "action_head.model.transformer_blocks.15.ff.net.0.proj.weight": (6144, 1536),
        "action_head.model.proj_out_1.weight": (3072, 1536),
        "action_head.model.proj_out_2.weight": (1024, 1536),
        "action_head.state_encoder.layer1.W": (32, 64, 1024),
        "action_head.state_encoder.layer2.W": (32, 1024, 1536),
        "action_head.action_encoder.W1.W": (32, 32, 1536),
        "action_head.action_encoder.W2.W": (32, 3072, 1536),
        "action_head.action_encoder.W3.W": (32, 1536, 1536),
        "action_head.action_decoder.layer1.W": (32, 1024, 1024),
        "action_head.action_decoder.layer2.W": (32, 1024, 32),
        "action_head.future_tokens.weight": (32, 1536),
        "action_head.position_embedding.weight": (1024, 1536),
        "action_head.vl_self_attention.transformer_blocks.3.norm1.weight": (2048,),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert f"{eagle}.language_model.model.layers.12.self_attn.q_proj.weight" not in shapes
    assert real.critic[0].in_features == 3584
    assert EAGLE_CONFIG["vision_config"]["image_size"] == 224
    assert (ROBOTS["libero_franka"], ROBOTS["maniskill_widowx"]) == (31, 30)


# What goes in and out -------------------------------------------------------------------------------------------------


def test_the_chat_holds_each_picture_patch_by_patch(policy):
    patches = "<IMG_CONTEXT>" * 4
    assert policy._prompts.text("go") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<image 1><img>{patches}</img><image 2><img>{patches}</img>go<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = policy._prompts.encode(WORDS)
    assert (tokens == policy._prompts.picture).sum(1).tolist() == [8, 8, 8]
    assert [int((row >= 0).sum()) for row in tokens] == [len(policy._prompts._tokenizer.encode(
        policy._prompts.text(text))) for text in WORDS]  # fmt: skip
    assert (tokens[:, -1] >= 0).all()
    with pytest.raises(ValueError, match=r"prompt_length=160.*2 pictures.*4 tokens"):
        policy._prompts.encode(["x" * 200])


def test_padding_is_seen_by_no_word_and_seen_by_the_action_head(policy):
    text = policy._prompts.encode(["go"])
    pixels = policy._pictures(seen(1)["rgb"])
    said = policy._eagle(pixels, text.clamp(min=0), text >= 0)
    shorter = text[:, text.ne(-1).long().argmax() :]
    alone = policy._eagle(pixels, shorter, shorter >= 0)
    torch.testing.assert_close(said[:, -shorter.shape[1] :], alone, atol=2e-5, rtol=1e-4)
    assert said.isfinite().all()


@pytest.mark.parametrize("embodiment", ["plain", "libero"])
def test_a_prompt_acts_by_itself_as_its_authors_have_it_where_padding_is_not_read(published, embodiment):
    """They run batches of one, without padding: rows of that very length, in which all tokens are read."""
    bound = {**GIVEN, "embodiment": embodiment, "cameras": 2, "robot": "libero_franka", "gripper": None}
    bound = {key: value for key, value in bound.items() if value is not None}
    policy = load_policy(published[0], {**bound, "reads_padding": None if embodiment == "plain" else False})
    together = policy.act(seen(), instructions=WORDS, generator=torch.arange(3), greedy="from_noise")
    lengths = policy._prompts.encode(WORDS).ge(0).sum(1).tolist()
    assert len({*lengths}) == 3
    for row, (words, length) in enumerate(zip(WORDS, lengths, strict=True)):
        alone = load_policy(published[0], {**bound, "prompt_length": length, "reads_padding": True})
        one = {name: each[row : row + 1] for name, each in seen().items()}
        acted = alone.act(one, instructions=[words], generator=torch.tensor([row]), greedy="from_noise")
        torch.testing.assert_close(together.actions[row : row + 1], acted.actions, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(together.values[row : row + 1], acted.values, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("side", "inner", "first"), [(40, 38, 1), (128, 121, 4), (300, 285, 8), (480, 456, 12)])
def test_pictures_are_cropped_where_torchvision_crops_them_and_cut_to_bytes(policy, side, inner, first):
    """Its CenterCrop begins at round((H - h) / 2), to the even one between two; 0..1 times 255 loses its fraction."""
    rgb = torch.randint(0, 256, (1, side, side, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(side))
    kept = rgb[0, first : first + inner, first : first + inner, :3].permute(2, 0, 1)[None] / 255
    small = torch.nn.functional.interpolate(kept, (28, 28), mode="bilinear", antialias=True)
    expected = (small * 255 + 1e-4).to(torch.uint8)  # a product that is whole but for rounding is that number
    found = ((policy._pictures(rgb)[0, 0] * 0.5 + 0.5) * 255).round().to(torch.uint8)
    assert (found == expected[0]).float().mean() > 0.999


def test_actions_are_in_the_robots_units_with_libero_s_gripper(policy):
    x = torch.tensor([[[-1.0, 0.0, 1.0, -1.0, 0.0, 1.0, 0.9], [-1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -0.9]]])
    low, high = STATISTICS["action"]["x"]["min"][0], STATISTICS["action"]["x"]["max"][0]
    middle = (low + high) / 2
    assert policy.emitted(x, {})[0, 0].tolist() == [low, middle, high, low, middle, high, -1.0]  # open
    assert policy.emitted(x, {})[0, 1, 6] == 1.0  # closed


def test_demonstrated_actions_come_back(policy):
    random = torch.Generator().manual_seed(3)
    actions = torch.rand(2, 5, 7, generator=random) * 1.5 - 0.5
    actions[..., 6] = torch.randint(0, 2, (2, 5), generator=random) * 2.0 - 1.0
    there = policy.encode(actions, {})
    assert there.shape == (2, 6, 8)
    back = policy.emitted(there[:, :5, :7], {})
    torch.testing.assert_close(back, actions, atol=1e-5, rtol=0)


def test_without_statistics_its_numbers_are_the_bounds_themselves(published):
    """As of the other models: -1 and 1 are the simulator's least and greatest."""
    bounds = {"action_low": [-2.0] * 7, "action_high": [6.0] * 7}
    bare = load_policy(published[0], {**GIVEN, **bounds, "statistics": {}})
    x = torch.tensor([[[-1.0, 0.0, 1.0, 0.5, 2.0, -0.5, 0.9]]])
    assert bare.emitted(x, {})[0, 0].tolist() == [-1.0, 0.0, 1.0, 0.5, 1.0, -0.5, -1.0]
    actions = torch.tensor([[[0.3, -0.2, 0.0, 1.0, -1.0, 0.5, -1.0]]])
    torch.testing.assert_close(bare.denoised(actions, {})[..., :6], actions[..., :6])


def test_the_widowx_has_no_state_but_the_sines_and_cosines_of_zeros(published):
    about = {"maniskill_widowx": {"statistics": STATISTICS}}
    given = {**GIVEN, "embodiment": "maniskill", "statistics": about, "model": {**MODEL, "action_head_cfg": HEAD}}
    found = load_policy(published[0], given)
    inputs = found.inputs(seen(), WORDS)
    assert "state" not in inputs
    token = found.context(inputs).before[:, 0]
    layers = found.action_head.state_encoder
    expected = layers(torch.tensor([[[0.0] * 4 + [1.0] * 4 + [0.0] * 2]]), 30)[0]
    torch.testing.assert_close(token, expected.expand(3, -1))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("vl_self_attention_cfg", {**HEAD["vl_self_attention_cfg"], "positional_embeddings": "sinusoidal"},
         r"action_head_cfg\.vl_self_attention_cfg\.positional_embeddings='sinusoidal'"),
        ("diffusion_model_cfg", {**HEAD["diffusion_model_cfg"], "interleave_self_attention": False},
         r"action_head_cfg\.diffusion_model_cfg\.interleave_self_attention=False"),
        ("use_vlln", False, r"action_head_cfg\.use_vlln=False"),
    ],
)  # fmt: skip
def test_a_head_of_another_structure_is_refused_instead_of_computed_wrongly(key, value, said):
    with torch.device("meta"), pytest.raises(ValueError, match=said):
        ActionHead({**HEAD, key: value})


def test_eagle_s_template_is_that_of_its_processor(policy):
    """It lies in a file of its own, which tokenizers do not read."""
    template = (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{% set at = namespace(i=0) %}"
        "{% for part in turn.content %}{% if part.type == 'image' %}{% set at.i = at.i + 1 %}<image-{{ at.i }}>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )
    files = {name.removeprefix("eagle/"): content for name, content in policy.files.items() if "eagle/" in name}
    chat = json.dumps({"chat_template": template}).encode()
    found = Prompts({**files, "chat_template.json": chat}, 2, 1, 90)
    assert found.text("go") == (
        "<|im_start|>user\n<image 1><img><IMG_CONTEXT></img><image 2><img><IMG_CONTEXT></img>go<|im_end|>"
    )
    blind = json.dumps({"chat_template": "{{ messages[0].content[-1].text }}"}).encode()
    with pytest.raises(ValueError, match=r"0.*2.*<image-1>, <image-2> …"):
        Prompts({**files, "chat_template.json": blind}, 2, 1, 90).encode(["go"])


# Networks beside plain formulas ---------------------------------------------------------------------------------------


def test_attention_is_the_plain_formula():
    layer, x, context = Attention(6, 2, 4, 5), torch.randn(2, 3, 6), torch.randn(2, 7, 5)
    q, k, v = layer.to_q(x), layer.to_k(context), layer.to_v(context)
    heads = []
    for at in (slice(0, 4), slice(4, 8)):
        weights = (q[..., at] @ k[..., at].mT / math.sqrt(4)).softmax(-1)
        heads.append(weights @ v[..., at])
    torch.testing.assert_close(layer(x, context), layer.to_out[0](torch.cat(heads, -1)), atol=1e-6, rtol=1e-5)


def test_times_are_waves_from_1_to_a_ten_thousandth():
    encoder, bucket = TimeEncoder(8), torch.tensor([0, 250, 999])
    waves = [
        [wave(number * 10_000 ** -(i / 127)) for wave in (math.cos, math.sin) for i in range(128)]
        for number in bucket.tolist()
    ]
    expected = encoder.timestep_embedder(torch.tensor(waves))
    torch.testing.assert_close(encoder(bucket), expected, atol=1e-4, rtol=1e-4)


def test_only_even_blocks_look_at_the_context():
    model = DiffusionTransformer(layers=2, heads=2, head_dim=4, context=5, outputs=3)
    tokens, context, bucket = torch.randn(1, 3, 8), torch.randn(1, 2, 5, requires_grad=True), torch.tensor([7])
    out = model(tokens, context, bucket)
    time = model.timestep_encoder(bucket)
    x = tokens
    for number, block in enumerate(model.transformer_blocks):
        scale, offset = block.norm1.linear(torch.nn.functional.silu(time)).chunk(2, -1)
        normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        normed = normed * (1 + scale) + offset
        x = x + block.attn1(normed, context if number == 0 else normed)
        normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        x = x + block.ff(normed)
    offset, scale = model.proj_out_1(torch.nn.functional.silu(time)).chunk(2, -1)
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    torch.testing.assert_close(out, model.proj_out_2(normed * (1 + scale) + offset), atol=1e-5, rtol=1e-4)


def test_without_noise_it_is_the_authors_loop(policy):
    inputs = policy.inputs(seen(), WORDS)
    start = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    read = policy.context(inputs)
    x = start
    with torch.no_grad():
        for number in range(4):
            t = torch.full((3,), number / 4)
            x = x + policy.action_head(read.context, read.before, x, t, policy.robot)[0] / 4
        found = policy.steered(inputs, start)
    torch.testing.assert_close(found, policy.emitted(x[:, :5, :7], inputs), atol=2e-5, rtol=1e-4)


# Learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
def test_log_probs_are_found_again_with_gradient(published, method):
    policy = load_policy(published[0], {**GIVEN, "method": method})
    acted = policy.act(seen(), instructions=WORDS, generator=torch.arange(3))
    found = policy.evaluate(acted.stored)
    torch.testing.assert_close(found.logprobs, acted.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.values, acted.values)
    (found.logprobs.sum() + found.values.sum()).backward()
    head = {name: each.grad for name, each in policy.action_head.named_parameters()}
    assert [name for name, grad in head.items() if grad is None or not grad.isfinite().all()] == []
    others = torch.arange(32) != policy.robot
    assert head["state_encoder.layer1.W"][others].abs().max() == 0  # of other robots
    assert head["action_decoder.layer2.W"][policy.robot].abs().max() > 0


def test_it_imitates(published):
    policy = load_policy(published[0], GIVEN)
    stored = policy.demonstrated(seen(4), torch.zeros(4, 5, 7), [*WORDS, "go"])
    optimizer = torch.optim.Adam(policy.action_head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = policy.imitate(stored, generator=torch.arange(4)).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        padding = policy.action_head.action_decoder.layer2.b.grad[policy.robot, 7:]
        assert not padding.any()  # numbers that the robot does not have are not learned
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
