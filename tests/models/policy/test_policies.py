"""What every policy promises, whatever network it is."""

import json
import pickle

import pytest
import torch

from rlinf.models.policy.base import Policy, at_level
from rlinf.models.policy.build import build_policy_model, described, load_policy, save_policy
from tests.models.policy.cases import CONFIGS, instructed, observed, rough


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def policy(config):
    return rough(build_policy_model(config))


def seeds(rows):
    return torch.arange(rows) * 7919 + 13


def close(config):
    """Drawing and scoring are the same operations, so equal to the last bit, but where the VLA draws token by token."""
    return {"rtol": 1e-5, "atol": 1e-5} if config["type"] == "vla" else {"rtol": 0.0, "atol": 0.0}


def act(policy, config, rows=6, **how):
    return policy.act(observed(config, rows), instructions=instructed(config, rows), **how)


def test_scoring_what_was_stored_gives_the_log_probs_and_values_of_drawing(policy, config):
    drawn = act(policy, config, generator=seeds(6))
    found = policy.evaluate(drawn.stored)
    torch.testing.assert_close(found.logprobs, drawn.logprobs, **close(config))
    if drawn.values is None:
        assert found.values is None
    else:
        torch.testing.assert_close(found.values, drawn.values, **close(config))


def test_rows_do_not_depend_on_the_batch_that_they_are_in(policy, config):
    whole = act(policy, config, generator=seeds(6))
    for row in range(6):
        observation = {name: array[row : row + 1] for name, array in observed(config).items()}
        texts = instructed(config)
        alone = policy.act(observation, instructions=texts and texts[row : row + 1], generator=seeds(6)[row : row + 1])
        for name in ("actions", "logprobs", "values"):
            mine, ours = getattr(alone, name), getattr(whole, name)
            assert mine is None or torch.allclose(mine[0], ours[row], rtol=1e-5, atol=1e-5), name
        scored = policy.evaluate({name: array[row : row + 1] for name, array in whole.stored.items()})
        torch.testing.assert_close(scored.logprobs[0], whole.logprobs[row], rtol=1e-5, atol=1e-5)


def test_shapes_are_those_of_the_protocol(policy, config):
    drawn = act(policy, config)
    count, size = config.get("chunk", 1), config["action_size"]
    level = policy.config.level
    shape = {"token": (6, count, size), "action": (6, count), "chunk": (6,)}[level]
    assert drawn.actions.shape == (6, count, size)
    assert drawn.actions.dtype == drawn.logprobs.dtype == torch.float32
    assert drawn.actions.abs().max() <= 1.0
    assert drawn.logprobs.shape == shape
    scored = policy.evaluate(drawn.stored)
    assert scored.logprobs.shape == scored.entropy.shape == shape
    values = {"action": (6, count), "chunk": (6,), None: None}[policy.config.value_level]
    assert (None if drawn.values is None else tuple(drawn.values.shape)) == values
    assert all(len(array) == 6 for array in drawn.stored.values())


def test_levels_are_sums_over_what_is_decided_as_one(policy, config):
    stored = act(policy, config).stored
    token, action, chunk = (policy.evaluate(stored, level=level) for level in ("token", "action", "chunk"))
    for name in ("logprobs", "entropy"):
        fine = getattr(token, name)
        torch.testing.assert_close(fine.sum(2), getattr(action, name))
        torch.testing.assert_close(fine.flatten(1).sum(1), getattr(chunk, name))
    with pytest.raises(ValueError, match="meant 'token'"):
        at_level(token.logprobs, "tokens")


def test_the_value_of_an_observation_is_that_before_the_first_action(policy, config):
    if policy.config.value_level is None:
        with pytest.raises(ValueError, match="value_level is null"):
            policy.value(observed(config), instructed(config))
        return
    values = act(policy, config).values
    found = policy.value(observed(config), instructed(config))
    torch.testing.assert_close(found, values if values.ndim == 1 else values[:, 0], rtol=1e-5, atol=1e-5)
    assert not found.requires_grad


@pytest.mark.parametrize("config", [each for each in CONFIGS.values() if each.get("value_level", "") is not None])
def test_values_know_nothing_of_the_actions_that_they_are_to_judge(config):
    policy = rough(build_policy_model(config))
    stored = act(policy, config, generator=seeds(6)).stored
    other = act(policy, config, generator=seeds(6) + 1).stored
    assert not torch.equal(stored["actions"], other["actions"])
    first, second = (policy.evaluate(each).values.reshape(6, -1)[:, 0] for each in (stored, other))
    torch.testing.assert_close(first, second)


def test_acting_leaves_no_graph_and_scoring_reaches_every_weight(policy, config):
    drawn = act(policy, config)
    assert not drawn.logprobs.requires_grad
    found = policy.evaluate(drawn.stored)
    total = found.logprobs.sum() + found.entropy.sum()
    total = total if found.values is None else total + found.values.square().sum()
    total.backward()
    missing = [name for name, each in policy.named_parameters() if each.grad is None or not each.grad.any()]
    # The vision encoder's mask token is for pretraining.
    assert [name for name in missing if not name.endswith("mask_token")] == []


def test_what_only_values_need_is_told_apart(policy, config):
    critic, rest = policy.of_critic(), policy.without_critic()
    assert bool(critic) == (policy.config.value_level is not None)
    assert {id(each) for each in critic} | {id(each) for each in rest} == {id(each) for each in policy.parameters()}
    found = policy.evaluate(act(policy, config).stored)
    gradients = torch.autograd.grad(found.logprobs.sum(), critic, allow_unused=True) if critic else ()
    assert all(each is None for each in gradients)


def test_greedy_is_the_same_every_time_and_likelier_than_what_is_drawn(policy, config):
    best, again = (act(policy, config, greedy=True) for _ in range(2))
    assert torch.equal(best.actions, again.actions)
    stored = {**best.stored}
    likeliest = policy.evaluate(stored, level="token").logprobs[:, 0, 0]
    for seed in range(5):
        stored["actions"] = act(policy, config, generator=seeds(6) + seed).stored["actions"]
        assert (policy.evaluate(stored, level="token").logprobs[:, 0, 0] <= likeliest + 1e-6).all()


def test_a_generator_repeats_and_moves_on(policy, config):
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    one, two = act(policy, config, generator=first), act(policy, config, generator=second)
    assert torch.equal(one.stored["actions"], two.stored["actions"])
    assert not torch.equal(one.stored["actions"], act(policy, config, generator=first).stored["actions"])


def test_stored_rows_of_several_steps_concatenate_and_are_picked_one_by_one(policy, config):
    parts = [policy.act(observed(config, 3, seed), instructions=instructed(config, 3)) for seed in range(3)]
    together = {name: torch.cat([part.stored[name] for part in parts]) for name in parts[0].stored}
    order = torch.tensor([8, 0, 5, 2])
    found = policy.evaluate({name: array[order] for name, array in together.items()}).logprobs
    expected = torch.cat([part.logprobs for part in parts])[order]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_same_configuration_makes_the_same_policy_and_disturbs_no_other_randomness(config):
    torch.manual_seed(5)
    first = build_policy_model(config)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    second = build_policy_model(pickle.loads(pickle.dumps({**config, "seed": 0})))
    other = build_policy_model({**config, "seed": 1})
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_a_saved_policy_acts_as_before_to_the_last_bit(policy, config, tmp_path):
    policy.adapt(act(policy, config).stored)
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    one, two = (act(each, config, generator=seeds(6)) for each in (policy, loaded))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.logprobs, two.logprobs)
    assert json.loads((tmp_path / "policy" / "policy.json").read_text())["type"] == config["type"]
    assert described(loaded) == described(policy)


def test_statistics_stand_still_within_an_update_and_move_when_told(policy, config):
    drawn = act(policy, config, generator=seeds(6))
    before = policy.evaluate(drawn.stored).logprobs
    policy.train()
    for _ in range(3):
        act(policy, config)
        policy.evaluate(drawn.stored)
    assert torch.equal(policy.evaluate(drawn.stored).logprobs, before)
    policy.adapt(drawn.stored)
    moved = not torch.equal(policy.evaluate(drawn.stored).logprobs, before)
    assert moved == (getattr(policy, "norm", None) is not None)


def test_demonstrated_actions_come_back_when_they_are_imitated(config):
    policy = build_policy_model(config)
    rows, count, size = 4, config.get("chunk", 1), config["action_size"]
    wanted = torch.linspace(-0.8, 0.8, rows * count * size).view(rows, count, size)
    stored = policy.demonstrated(observed(config, rows), wanted, instructed(config, rows))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    first = policy.imitate(stored).mean().item()
    for _ in range(80):
        optimizer.zero_grad()
        policy.imitate(stored).mean().backward()
        optimizer.step()
    assert policy.imitate(stored).mean().item() < first - 0.5
    found = policy.act(observed(config, rows), instructions=instructed(config, rows), greedy=True).actions
    if "choices" in config:  # a number stands for the choice in whose part it lies
        assert torch.equal(policy.encode(found, stored), policy.encode(wanted, stored))
    else:
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.15)


def test_imitation_counts_only_what_its_mask_keeps(policy, config):
    rows, count, size = 4, config.get("chunk", 1), config["action_size"]
    stored = policy.demonstrated(observed(config, rows), torch.zeros(rows, count, size), instructed(config, rows))
    mask = torch.zeros(rows, count, dtype=torch.bool)
    mask[1, -1] = True
    loss = policy.imitate(stored, mask)
    expected = -policy.evaluate(stored, level="token").logprobs[1, -1].sum()
    torch.testing.assert_close(loss.total, expected)
    assert loss.weight == size


def test_demonstrations_of_another_shape_are_refused(policy, config):
    with pytest.raises(ValueError, match=r"actions.*numbers"):
        policy.demonstrated(observed(config), torch.zeros(6, config["action_size"]))


def test_calling_a_policy_is_scoring(policy, config):
    stored = act(policy, config).stored
    assert isinstance(policy, Policy)
    assert torch.equal(policy(stored).logprobs, policy.evaluate(stored).logprobs)


def test_an_observation_of_another_environment_is_refused_by_name(policy, config):
    kept, shown = ("state", "rgb") if config["type"] == "mlp" else ("rgb", "state")
    with pytest.raises(ValueError, match=f"'{kept}'.*\\['{shown}'\\]"):
        policy.act({shown: observed(config)[shown]})
    with pytest.raises(ValueError, match=r"another environment"):
        policy.act({name: array[:, :-1] for name, array in observed(config).items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_an_accelerator_it_draws_the_same(policy, config):
    here = act(policy, config, generator=seeds(6))
    policy.cuda()
    there = policy.act(
        {name: array.cuda() for name, array in observed(config).items()},
        instructions=instructed(config),
        generator=seeds(6),
    )
    torch.testing.assert_close(there.actions.cpu(), here.actions, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(there.logprobs.cpu(), here.logprobs, rtol=1e-2, atol=1e-2)
    scored = policy.evaluate(there.stored)
    torch.testing.assert_close(scored.logprobs, there.logprobs, rtol=1e-3, atol=1e-3)
