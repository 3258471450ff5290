"""Policies of an actor and a critic beside torch.distributions."""

import pytest
import torch
from torch.distributions import Categorical, Normal

from rlinf.models.policy.build import build_policy_model, fitted, load_policy, save_policy
from tests.models.policy.cases import CHOOSING, CNN, MLP, observed, rough


@pytest.mark.parametrize("config", [{**MLP, "chunk": 2, "shared": True}, {**CNN, "state_size": 5}], ids=["mlp", "cnn"])
def test_gradients_are_those_of_a_plain_normal_distribution(config):
    policy = rough(build_policy_model(config))
    stored = policy.act(observed(config)).stored
    weight = torch.randn(6, config.get("chunk", 1))

    found = policy.evaluate(stored)
    loss = (found.logprobs.exp() * weight).sum() + 0.1 * found.entropy.sum()
    ours = torch.autograd.grad(loss, policy.without_critic())

    mean = policy.actor(policy.trunk(policy.features(stored))).view(6, -1, config["action_size"])
    plain = Normal(mean, policy.log_std.exp())
    reference = (plain.log_prob(stored["actions"]).sum(-1).exp() * weight).sum() + 0.1 * plain.entropy().sum()
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    for mine, other in zip(ours, torch.autograd.grad(reference, policy.without_critic()), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_actions_are_drawn_around_the_mean_with_the_deviation_told():
    policy = rough(build_policy_model({**MLP, "log_std": -1.5, "normalise": False}))
    one = {name: array.expand(4000, *array.shape[1:]) for name, array in observed(MLP, 1).items()}
    drawn = policy.act(one, generator=torch.Generator().manual_seed(0)).stored["actions"][:, 0]
    mean = policy.act(observed(MLP, 1), greedy=True).stored["actions"][0, 0]
    deviation = policy.log_std.exp()[0].detach()
    assert ((drawn.mean(0) - mean).abs() < 4 * deviation / 4000**0.5).all()
    torch.testing.assert_close(drawn.std(0), deviation, rtol=0.05, atol=0.0)


def test_the_environment_gets_actions_cut_to_its_bounds_and_the_log_prob_is_of_the_uncut_ones():
    policy = build_policy_model({**MLP, "log_std": 1.0})
    drawn = policy.act(observed(MLP, 200), generator=torch.Generator().manual_seed(0))
    made = drawn.stored["actions"]
    assert (made.abs() > 1.5).any()
    assert torch.equal(drawn.actions, made.clamp(-1, 1))
    torch.testing.assert_close(drawn.logprobs, Normal(torch.zeros(3), 1.0).log_prob(made / torch.e).sum(-1) - 3.0,
                               rtol=1e-2, atol=0.05)  # fmt: skip


def test_an_untrained_policy_explores_around_zero_and_expects_nothing():
    policy = build_policy_model(MLP)
    drawn = policy.act(observed(MLP), greedy=True)
    assert drawn.actions.abs().max() < 0.05
    assert drawn.values.tolist() == [0.0] * 6


def test_separate_layers_keep_the_critic_out_of_the_actor_and_shared_ones_do_not():
    for shared in (False, True):
        policy = rough(build_policy_model({**MLP, "shared": shared}))
        values = policy.evaluate(policy.act(observed(MLP)).stored).values
        gradients = torch.autograd.grad(values.sum(), policy.without_critic(), allow_unused=True)
        assert any(each is not None for each in gradients) == shared


def test_states_of_any_scale_look_alike_once_they_are_known():
    policy = rough(build_policy_model(MLP))
    state, offset, scale = observed(MLP, 64)["state"], torch.linspace(-50, 50, 5), torch.logspace(-2, 2, 5)
    policy.adapt({"state": state * scale + offset})
    other = rough(build_policy_model(MLP))
    other.adapt({"state": state})
    first = policy.act({"state": state * scale + offset}, greedy=True).actions
    torch.testing.assert_close(first, other.act({"state": state}, greedy=True).actions, rtol=1e-3, atol=1e-3)


def test_choices_are_those_of_plain_categorical_distributions():
    policy = rough(build_policy_model(CHOOSING))
    drawn = policy.act(observed(CHOOSING, 3000), generator=torch.Generator().manual_seed(0))
    made = drawn.stored["actions"]
    said = policy.actor(policy.trunk(policy.features(drawn.stored))).view(3000, 2, 3, 4)
    logprobs, entropy = [], []
    for number, count in enumerate(CHOOSING["choices"]):
        plain = Categorical(logits=said[:, :, number, :count])
        logprobs.append(plain.log_prob(made[:, :, number]))
        entropy.append(plain.entropy())
        shares = torch.nn.functional.one_hot(made[:, :, number], count).float().mean(0)
        torch.testing.assert_close(shares, plain.probs.mean(0), rtol=0.0, atol=4 * (0.25 / 3000) ** 0.5)
    found = policy.evaluate(drawn.stored, level="token")
    torch.testing.assert_close(found.logprobs, torch.stack(logprobs, -1))
    torch.testing.assert_close(found.entropy, torch.stack(entropy, -1))


def test_the_greedy_action_is_the_likeliest_choice_and_not_the_middle_of_them():
    policy = build_policy_model({**MLP, "action_size": 1, "choices": [3]})
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(torch.tensor([2.0, 0.0, 2.5]))  # the mean of what is drawn is choice 1
    assert policy.act(observed(MLP, 1), greedy=True).stored["actions"].item() == 2


def test_choices_and_the_numbers_that_they_are_for_the_environment_are_inverses():
    policy = build_policy_model({**MLP, "choices": [1, 7, 1000]})
    made = torch.stack([torch.zeros(7).long(), torch.arange(7), torch.arange(993, 1000)], -1)[:, None]
    numbers = policy._heads(observed(MLP, 7)["state"].new_zeros(7, 5))[0].actions(made)
    assert numbers.abs().max() < 1.0
    assert torch.equal(policy.encode(numbers, {}), made)
    edges = policy.encode(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])[:, None], {})
    assert edges[:, 0].tolist() == [[0, 0, 0], [0, 6, 999]]


def test_choices_of_the_environment_become_the_policy_s_and_are_saved(tmp_path):
    config = fitted({"type": "mlp"}, {"state": (5,)}, 1, (3,))
    policy = rough(build_policy_model(config))
    save_policy(policy, tmp_path)
    again = load_policy(tmp_path)
    stored = policy.act(observed(MLP)).stored
    assert torch.equal(again.evaluate(stored).logprobs, policy.evaluate(stored).logprobs)
    assert "choices" not in fitted({"type": "vla"}, {"rgb": (16, 16, 3)}, 1, (3,))


@pytest.mark.parametrize("choices", [[2], [2, 0, 2]])
def test_wrong_counts_of_choices_are_refused(choices):
    with pytest.raises(ValueError, match="choices"):
        build_policy_model({**MLP, "choices": choices})


def test_the_scale_of_returns_moves_no_prediction_and_brings_returns_to_a_mean_of_0_and_a_variance_of_1():
    policy = rough(build_policy_model({**MLP, "normalise_values": True}))
    stored = policy.act(observed(MLP, 50)).stored
    seen = []
    for mean, spread in ((-800.0, 300.0), (40.0, 2000.0)):
        before = policy.evaluate(stored).values.detach()
        returns = mean + spread * torch.randn(400, generator=torch.Generator().manual_seed(0))
        policy.adapt_values(returns)
        seen.append(returns)
        torch.testing.assert_close(policy.evaluate(stored).values, before, rtol=1e-4, atol=2e-3)
        torch.testing.assert_close(policy.value(observed(MLP, 50)), before, rtol=1e-4, atol=2e-3)
    assert float(policy.value_scale) == pytest.approx(float(torch.cat(seen).std(correction=0)), rel=1e-5)
    with torch.no_grad():
        policy.critic[-1].weight.zero_()
        policy.critic[-1].bias.zero_()
    assert policy.value(observed(MLP, 1)).item() == pytest.approx(float(torch.cat(seen).mean()), rel=1e-4)
