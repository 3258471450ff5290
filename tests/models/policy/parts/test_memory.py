"""Policies that remember: along sequences as one by one, beside torch's own recurrent layer."""

import pytest
import torch

from rlinf.models.policy.actor_critic import Memory
from rlinf.models.policy.build import build_policy_model
from tests.models.policy.cases import CNN, MLP, observed, rough

REMEMBERING = {**MLP, "memory": 6, "chunk": 2, "level": "action", "value_level": "action", "sequence": 4}


def lived(policy, config, rows=5, decisions=4, starts=()):
    """Decisions in a row; episodes begin at the first and in the (decision, row) of `starts`. Stored rows [rows,
    decisions, ...], and what was said at deciding."""
    acts, memory = [], None
    for time in range(decisions):
        observation = observed(config, rows, seed=time)
        if memory is not None:
            for when, row in starts:
                if when == time:
                    memory[row] = 0.0
            observation["memory"] = memory
        acts.append(policy.act(observation, generator=torch.arange(rows) + 100 * time))
        memory = acts[-1].memory.clone()
    stored = {name: torch.stack([act.stored[name] for act in acts], 1) for name in acts[0].stored}
    return stored, acts


@pytest.mark.parametrize("config", [REMEMBERING, {**CNN, "memory": 6, "state_size": 5}], ids=["state", "pixels"])
def test_sequences_are_scored_as_they_were_decided_also_over_ends_of_episodes(config):
    policy = rough(build_policy_model(config))
    stored, acts = lived(policy, config, starts=[(2, 1), (3, 4)])
    found = policy.evaluate(stored)
    logprobs = torch.stack([act.logprobs for act in acts], 1).flatten(0, 1)
    values = torch.stack([act.values for act in acts], 1).flatten(0, 1)
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.values, values, rtol=1e-5, atol=1e-5)
    alone = policy.evaluate({name: rows.flatten(0, 1) for name, rows in stored.items()})  # each from its own memory
    torch.testing.assert_close(alone.logprobs, logprobs, rtol=1e-5, atol=1e-5)


def test_an_episode_that_begins_remembers_nothing_of_the_last():
    policy = rough(build_policy_model(REMEMBERING))
    (_, first), (_, again) = (lived(policy, REMEMBERING, starts=[(2, 1)]), lived(policy, REMEMBERING))
    fresh = policy.act(observed(REMEMBERING, 5, seed=2), generator=torch.arange(5) + 200)
    torch.testing.assert_close(first[2].actions[1], fresh.actions[1])
    assert not torch.allclose(again[2].actions[1], fresh.actions[1], atol=1e-3)
    assert [float(act.memory[1, -1]) for act in first] == [1, 2, 1, 2]


def test_the_unit_is_torch_s_and_gradients_go_back_to_the_beginning_of_the_episode():
    memory = Memory(3, 5)
    theirs = torch.nn.GRU(3, 5, batch_first=True)
    theirs.load_state_dict({f"{name}_l0": each for name, each in memory.cell.state_dict().items()})
    x = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    counts = torch.arange(7.0).repeat(2, 1)
    counts[1, 4:] -= 4.0  # an episode of the second begins with its fifth decision
    found = memory.along(x, torch.cat([torch.full((2, 7, 5), 9.0), counts[..., None]], -1))
    torch.testing.assert_close(found[0], theirs(x[:1])[0][0])
    torch.testing.assert_close(found[1, 4:], theirs(x[1:, 4:])[0][0])
    (slope,) = torch.autograd.grad(found[:, 6].sum(), x)
    assert (slope[0].abs().sum(-1) > 0).all()
    assert (slope[1].abs().sum(-1) > 0).tolist() == [False] * 4 + [True] * 3


def test_what_is_no_memory_is_refused():
    with pytest.raises(ValueError, match="sequence=0"):
        build_policy_model({**MLP, "memory": 4, "sequence": 0})
    policy = build_policy_model({**MLP, "memory": 4})
    with pytest.raises(ValueError, match="memory"):
        policy.demonstrated(observed(MLP, 2), torch.zeros(2, 1, 3))
