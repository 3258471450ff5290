"""Both ways of decoding: what every policy promises, and log-probs beside the language model's own, row by row."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from examples.tiny_checkpoints import write_tiny_openvla as write_tiny
from tests.models.policy.vla.openvla_case import loaded, seen, shaken, told

KINDS = ("openvla", "openvla-oft", "official")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("openvla") / "tiny", action_size=3)


@pytest.fixture(scope="module", params=KINDS)
def policy(request, directory):
    kind = request.param
    if kind == "official":
        own = {"variant": "official", "state_size": 5, "views": 2, "image": (32, 40, 6)}
        return shaken(loaded(directory, "openvla-oft", value_level="action", **own))
    return shaken(loaded(directory, kind, value_level="action", temperature=0.7))


def shown(policy, rows=4, seed=0):
    return seen(rows, policy.config.image[2], seed)


@pytest.fixture(scope="module")
def drawn(policy):
    return policy.act(shown(policy), instructions=told(), generator=torch.arange(4))


def reference(policy, drawn, row):
    """Log-probs of a row's numbers [C, D]: the row alone, without padding, by transformers' eager attention."""
    config = copy.deepcopy(policy.language_model.config)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(policy.language_model.state_dict())
    with torch.no_grad():
        pictures = policy.projector(policy.vision_backbone(drawn.stored["pictures"][row])).flatten(0, 1)
        prompt = drawn.stored["prompt"][row]
        words = model.model.embed_tokens(prompt[prompt != 32000])
        front = [words[:1], pictures]
        if getattr(policy, "proprio_projector", None) is not None:
            front.append(policy.proprio_projector(drawn.stored["state"][row])[None])
        tokens = drawn.stored["actions"][row].flatten()
        if policy.config.model == "openvla":
            rest = [model.model.embed_tokens(tokens[:-1])]
            mask = None
        else:
            rest = [torch.zeros(len(tokens), words.shape[1])]
            if policy.config.variant == "official":
                rest.append(model.model.embed_tokens(torch.tensor([2])))
        whole = torch.cat([*front, words[1:], *rest])
        if policy.config.model != "openvla":
            mask = torch.zeros(1, 1, len(whole), len(whole))
        logits = model(inputs_embeds=whole[None], attention_mask=mask).logits[0] / policy.config.temperature
    first = sum(len(part) for part in front) + len(words) - 2
    logits = logits[first : first + len(tokens)]
    kept = torch.full_like(logits, -torch.inf)
    kept[:, 31744:32000] = logits[:, 31744:32000]
    return kept.log_softmax(-1).gather(1, tokens[:, None]).view(drawn.stored["actions"].shape[1:])


def test_log_probs_are_those_of_the_language_model_on_each_row_alone(policy, drawn):
    found = policy.evaluate(drawn.stored).logprobs.detach()
    for row in range(4):
        torch.testing.assert_close(found[row], reference(policy, drawn, row), rtol=1e-5, atol=2e-5)
    assert found.std() > 0.1


def test_rows_do_not_depend_on_the_batch_that_they_are_in(policy, drawn):
    for row in (0, 3):
        observation = {name: array[row : row + 1] for name, array in shown(policy).items()}
        alone = policy.act(observation, instructions=told()[row : row + 1], generator=torch.arange(4)[row : row + 1])
        torch.testing.assert_close(alone.logprobs[0], drawn.logprobs[row], rtol=1e-5, atol=1e-5)
        assert torch.equal(alone.actions[0], drawn.actions[row])


def test_values_know_nothing_of_the_actions_and_bootstrapping_is_the_same(policy, drawn):
    other = policy.act(shown(policy), instructions=told(), generator=torch.arange(4) + 50)
    assert not torch.equal(other.actions, drawn.actions)
    torch.testing.assert_close(other.values, drawn.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(policy.value(shown(policy), told()), drawn.values[:, 0], rtol=1e-5, atol=1e-5)


def test_what_it_sees_and_reads_matters(policy, drawn):
    others = policy.act(shown(policy), instructions=["place the bowl"] * 4, generator=torch.arange(4))
    assert not torch.equal(others.logprobs, drawn.logprobs)
    others = policy.act(shown(policy, seed=1), instructions=told(), generator=torch.arange(4))
    assert (others.logprobs - drawn.logprobs).abs().min() > 0


def test_imitation_lowers_the_surprise_at_demonstrated_actions(directory):
    policy = loaded(directory, "openvla-oft", value_level=None)
    wanted = torch.linspace(-0.8, 0.8, 24).view(4, 2, 3)
    stored = policy.demonstrated(seen(), wanted, told())
    torch.testing.assert_close(
        policy.robot.to_simulator(policy.bins.decode(stored["actions"])), wanted, atol=1 / 255, rtol=0
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.0, fused=True)
    first = policy.imitate(stored).mean().item()
    for _ in range(8):
        optimizer.zero_grad()
        policy.imitate(stored).mean().backward()
        optimizer.step()
    assert policy.imitate(stored).mean().item() < first - 1.0


def test_in_autoregression_a_number_depends_on_those_before_it_alone(directory):
    policy = shaken(loaded(directory, "openvla"))
    stored = policy.act(seen(), instructions=told(), generator=torch.arange(4)).stored
    before = policy.evaluate(stored, level="token").logprobs.flatten(1)
    stored["actions"] = stored["actions"].clone()
    stored["actions"][:, 1, 0] = 31744 + (stored["actions"][:, 1, 0] - 31744 + 100) % 256
    after = policy.evaluate(stored, level="token").logprobs.flatten(1)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert (after[:, 4:] != before[:, 4:]).all()


def test_in_parallel_decoding_places_read_what_stands_behind_them(directory):
    policy = shaken(loaded(directory, "openvla-oft", variant="official"))
    stored = policy.act(seen(), instructions=told(), generator=torch.arange(4)).stored
    before = policy.evaluate(stored, level="token").logprobs[:, 0, 0]
    with torch.no_grad():
        policy.language_model.model.embed_tokens.weight[2] += 1.0  # the stop token's, which is last
    assert (policy.evaluate(stored, level="token").logprobs[:, 0, 0] != before).all()


def test_only_the_likeliest_can_be_drawn_and_greedy_is_the_likeliest(directory):
    policy = shaken(loaded(directory, "openvla-oft", top_k=2))
    for start in range(3):
        found = policy.act(seen(), instructions=told(), generator=torch.arange(4) + 100 * start)
        assert torch.isfinite(found.logprobs).all()
    entropy = policy.evaluate(found.stored).entropy
    assert (entropy <= torch.tensor(2.0).log() + 1e-5).all()
    best = policy.act(seen(), instructions=told(), greedy=True)
    assert (best.logprobs >= -torch.tensor(2.0).log() - 1e-5).all()


def test_robots_units_reach_the_simulator_s_bounds_and_its_gripper(tmp_path):
    low, high = [-0.5, -1.0, 0.0], [0.5, 1.0, 1.0]
    stats = {"bridge_orig": {"action": {"q01": low, "q99": high, "mask": [True, True, False]}}}
    write_tiny(tmp_path, action_size=3, norm_stats=stats)
    given = {"embodiment": "maniskill", "chunk": 2, "action_low": (-1.0, -1.0, -1.0), "action_high": (1.0, 1.0, 1.0)}
    policy = loaded(tmp_path, "openvla-oft", **given)
    ids = torch.tensor([[[31744, 31999, 31744], [31999, 31744, 31999]]])  # the largest number is the first token
    found = policy.robot.to_simulator(policy.bins.decode(ids))
    torch.testing.assert_close(found, torch.tensor([[[0.498, -0.996, 1.0], [-0.498, 0.996, -1.0]]]), atol=1e-3, rtol=0)
    inside = torch.tensor([[[0.25, -0.5, 1.0], [-0.25, 0.5, -1.0]]])
    made = policy.encode(inside, {})
    assert torch.equal(policy.encode(policy.robot.to_simulator(policy.bins.decode(made)), {}), made)


def test_a_projector_of_states_comes_from_the_authors_file(directory, tmp_path):
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    random = torch.Generator().manual_seed(5)
    shapes = {"fc1.weight": (64, 5), "fc1.bias": (64,), "fc2.weight": (64, 64), "fc2.bias": (64,)}
    state = {f"module.{name}": torch.randn(shape, generator=random) for name, shape in shapes.items()}
    torch.save(state, tmp_path / "proprio_projector--150000_checkpoint.pt")
    torch.save({"module.model.fc1.weight": torch.zeros(2)}, tmp_path / "action_head--150000_checkpoint.pt")
    policy = loaded(tmp_path, "openvla-oft", variant="official", state_size=5, head="tokens")
    found = policy.proprio_projector.state_dict()
    assert all(torch.equal(found[name], state[f"module.{name}"]) for name in shapes)
    assert "action_head--150000_checkpoint.pt" in policy.files
    with pytest.raises(ValueError, match=r"environment's.*4 numbers:"):
        loaded(tmp_path, "openvla-oft", variant="official", state_size=4, head="tokens")
    with pytest.raises(ValueError, match=r"action_head--150000_checkpoint\.pt.*head of diffusion"):
        loaded(tmp_path, "openvla-oft", state_size=5)
    (tmp_path / "vision_backbone--150000_checkpoint.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="FiLM"):
        loaded(tmp_path, "openvla-oft")


def test_what_the_environment_does_not_show_is_said(directory):
    policy = loaded(directory, "openvla-oft", views=2)
    with pytest.raises(ValueError, match=r"2 cameras.*environment.*1:.*policy.settings.views"):
        policy.act(seen(), instructions=told())
    policy = loaded(directory, "openvla")
    with pytest.raises(ValueError, match=r"another environment"):
        policy.act(seen(channels=6), instructions=told())
    policy.prompts = None
    with pytest.raises(ValueError, match=r"reads.*checkpoint's tokenizer.json:.*policy.path"):
        policy.act(seen(), instructions=told())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 0.0}, r"temperature=0.0.*more.*0"),
        ({"top_k": -1}, r"top_k=-1.*least 1"),
        ({"embodiment": "liberoo"}, r"mean libero"),
        ({"gripper": "thumb"}, r"gripper='thumb'"),
        ({"action_low": (-1.0,)}, "action_low and action_high"),
    ],
)
def test_settings_that_cannot_be_are_refused(directory, settings, said):
    with pytest.raises(ValueError, match=said):
        loaded(directory, "openvla-oft", **settings)
