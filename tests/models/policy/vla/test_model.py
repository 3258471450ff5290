"""The small VLA: what it reads, and its log-probs beside a plain categorical distribution."""

import pytest
import torch
from torch.distributions import Categorical

from rlinf.models.language.lora import add_adapters, is_adapter, start_adapters
from rlinf.models.policy.build import build_policy_model
from rlinf.models.policy.vla.tokens import picked_by
from tests.models.policy.cases import VLA, observed, rough

CHUNKED = {**VLA, "chunk": 2}


def policy_of(config):
    return rough(build_policy_model(config))


def one_by_one(policy, stored):
    """Distributions of all tokens, each from a pass of its own over what stands before it, without a cache."""
    tokens, found = stored["actions"].flatten(1), []
    for number in range(tokens.shape[1]):
        prefix, seen = policy._prefix(stored)
        known = policy.decoder.get_input_embeddings()(tokens[:, :number])
        seen = torch.cat([seen, torch.ones(len(tokens), number, dtype=torch.int64)], 1)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        out = policy.decoder(
            inputs_embeds=torch.cat([prefix, known], 1), attention_mask=seen, position_ids=places, use_cache=False
        )
        logits = policy.head(out.last_hidden_state[:, -1])[:, -policy.config.bins :]
        found.append(Categorical(logits=logits / policy.config.temperature))
    return found


def test_log_probs_entropy_and_gradients_are_those_of_plain_categorical_distributions():
    policy = policy_of({**CHUNKED, "temperature": 0.8})
    stored = policy.act(observed(VLA), instructions=["go", "stay"] * 3).stored
    weight = torch.randn(6, 4)
    chosen = stored["actions"].flatten(1) - policy.bins.first

    found = policy.evaluate(stored, level="token")
    plain = one_by_one(policy, stored)
    logprobs = torch.stack([each.log_prob(chosen[:, i]) for i, each in enumerate(plain)], 1)
    entropy = torch.stack([each.entropy() for each in plain], 1)
    torch.testing.assert_close(found.logprobs.flatten(1), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy.flatten(1), entropy, rtol=1e-5, atol=1e-5)

    parameters = policy.without_critic()
    ours = torch.autograd.grad((found.logprobs.flatten(1) * weight).sum(), parameters)
    theirs = torch.autograd.grad((logprobs * weight).sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_a_token_depends_on_those_before_it_and_on_none_behind():
    policy = policy_of(CHUNKED)
    stored = policy.act(observed(VLA), generator=torch.Generator().manual_seed(0)).stored
    before = policy.evaluate(stored, level="token").logprobs.flatten(1)
    changed = {**stored, "actions": stored["actions"].clone()}
    middle = changed["actions"].flatten(1)[:, 1]
    changed["actions"][:, 0, 1] = policy.bins.first + (middle - policy.bins.first + 5) % 16
    after = policy.evaluate(changed, level="token").logprobs.flatten(1)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert ((after[:, 2] - before[:, 2]).abs() > 1e-5).any()


def test_room_for_longer_instructions_changes_nothing():
    short, long = (policy_of({**CHUNKED, "text_length": length}) for length in (8, 30))
    long.load_state_dict(short.state_dict())
    instructions = ["go", "stay", "turn"] * 2
    how = {"instructions": instructions, "generator": torch.arange(6)}
    first, second = (each.act(observed(VLA), **how) for each in (short, long))
    torch.testing.assert_close(first.actions, second.actions)
    torch.testing.assert_close(first.logprobs, second.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.values, second.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["picture", "second camera", "instruction", "state"])
def test_what_it_sees_and_reads_matters(what):
    config = {**VLA, "image": [16, 16, 6], "state_size": 5}
    policy = policy_of(config)
    observation, words = observed(config), ["go"] * 6
    stored = policy.act(observation, instructions=words).stored
    before = policy.evaluate(stored).logprobs
    other = {name: array.clone() for name, array in observation.items()}
    if what == "instruction":
        words = ["no"] * 6
    elif what == "state":
        other["state"] += 1.0
    else:
        other["rgb"][..., 3 * (what == "second camera")] = 255
    inputs = policy.inputs(other, words)
    after = policy.evaluate({**stored, **inputs}).logprobs
    assert ((after - before).abs() > 1e-5).any(-1).any(-1).all()


def test_the_instruction_of_the_config_stands_in_where_the_environment_says_nothing():
    policy = policy_of({**VLA, "instruction": "go"})
    first, second = policy.inputs(observed(VLA)), policy.inputs(observed(VLA), ["go"] * 6)
    assert torch.equal(first["text"], second["text"])


def test_only_action_tokens_are_drawn_and_as_often_as_they_are_likely():
    logprobs = torch.tensor([0.5, 0.0, 0.2, 0.3]).log()
    noise = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    found = torch.bincount(picked_by(logprobs.expand(1000, 4), noise), minlength=4)
    assert found.tolist() == [500, 0, 200, 300]
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    never = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).log().expand(2, 4)
    assert picked_by(never, ends).tolist() == [1, 2]

    policy = policy_of(VLA)
    drawn = policy.act(observed(VLA, 50)).stored["actions"]
    assert drawn.min() >= policy.bins.first
    assert drawn.max() < policy.bins.vocabulary


def test_adapters_go_into_the_decoder_and_change_nothing_at_first():
    policy = policy_of(VLA)
    stored = policy.act(observed(VLA)).stored
    before = policy.evaluate(stored).logprobs
    add_adapters(policy.decoder, {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]})
    for parameter, value in start_adapters(policy, seed=0):
        parameter.data.copy_(value)
    after = policy.evaluate(stored).logprobs
    assert torch.equal(before, after)
    after.sum().backward()
    learned = [name for name, each in policy.decoder.named_parameters() if each.grad is not None]
    assert len(learned) == 2 * 2 * 2  # layers x modules x matrices
    assert all(is_adapter(name) for name in learned)


def test_with_its_defaults_it_fits_a_cpu():
    policy = build_policy_model({"type": "vla", "image": [64, 64, 3], "action_size": 7, "chunk": 8})
    assert 500_000 < sum(each.numel() for each in policy.parameters()) < 1_500_000


@pytest.mark.parametrize(("change", "says"), [
    ({"image": [16, 24, 3]}, "square"),
    ({"image": [20, 20, 3]}, "multiple of patch_size=8"),
    ({"image": [16, 16, 4]}, r"3 channels.*camera"),
    ({"temperature": 0.0}, r"temperature=0.0.*more.*0"),
    ({"decoder": {"vocab_size": 7}}, r"vocab_size.*vision.*decoder"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_explained(change, says):
    with pytest.raises(ValueError, match=says):
        build_policy_model({**VLA, **change})
