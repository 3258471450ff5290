"""Policies that denoise: what is drawn, scored, imitated and steered, shown on the small one on states."""

import pytest
import torch

from rlinf.data.rng import mix
from rlinf.models.policy.base import normals, uniforms
from rlinf.models.policy.build import build_policy_model
from tests.models.policy.cases import rough

FLOW = {"type": "flow", "state_size": 5, "action_size": 2, "chunk": 3, "hidden": [16, 16], "steps": 3}
SEEDS = torch.tensor([mix(7, row) for row in range(6)])


@pytest.fixture(params=["flow_sde", "flow_cps", "flow_noise"])
def policy(request):
    return rough(build_policy_model({**FLOW, "method": request.param}))


def seen(rows=6, seed=0):
    return {"state": torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))}


def test_a_row_does_not_depend_on_the_batch_that_it_is_in(policy):
    whole = policy.act(seen(), generator=SEEDS)
    for row in range(6):
        alone = policy.act({"state": seen()["state"][row : row + 1]}, generator=SEEDS[row : row + 1])
        torch.testing.assert_close(alone.actions[0], whole.actions[row], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone.logprobs[0], whole.logprobs[row], rtol=1e-5, atol=1e-5)
        assert alone.stored["drew"] == whole.stored["drew"][row]


def test_every_step_that_can_draw_is_chosen(policy):
    drawn = policy.act(seen(64), generator=torch.Generator().manual_seed(0))
    assert set(drawn.stored["drew"].tolist()) == set(range(policy.how.can_draw))


def test_gradients_of_log_probs_and_values_reach_every_weight_and_keep_apart(policy):
    found = policy.evaluate(policy.act(seen(), generator=SEEDS).stored)
    assert all(
        each is None for each in torch.autograd.grad(found.logprobs.sum(), policy.of_critic(), allow_unused=True,
                                                    retain_graph=True)
    )  # fmt: skip
    (found.logprobs.sum() + found.values.square().sum()).backward()
    assert [name for name, each in policy.named_parameters() if each.grad is None or not each.grad.any()] == []


def test_greedy_repeats_and_is_the_most_likely_draw_of_its_step(policy):
    best = policy.act(seen(), greedy=True)
    assert torch.equal(best.actions, policy.act(seen(), greedy=True).actions)
    torch.testing.assert_close(best.actions, policy.steered(policy.inputs(seen()), torch.zeros(6, 3, 2)))
    shaken = {**best.stored, "actions": best.stored["actions"].clone()}
    shaken["actions"][:, 1] += 0.05
    assert (policy.evaluate(shaken).logprobs < best.logprobs).all()


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps", "flow_noise"])
def test_from_noise_is_the_ode_from_a_start_that_follows_from_the_row_s_seed(method):
    policy = rough(build_policy_model({**FLOW, "method": method}))
    acted = policy.act(seen(), generator=SEEDS, greedy="from_noise")
    x = normals(uniforms(SEEDS, 6, 6, torch.device("cpu"))).view(6, 3, 2)
    assert torch.equal(acted.stored["actions"][:, 0], x)
    assert torch.equal(x, policy.act(seen(), generator=SEEDS).stored["actions"][:, 0])  # as training begins
    field = policy.velocity(policy.context(policy.inputs(seen())))
    with torch.no_grad():
        for step in range(policy.how.steps):
            x = x - field(x, torch.full((6,), 1 - step / policy.how.steps)).velocity / policy.how.steps
    torch.testing.assert_close(acted.actions, x.clamp(-1, 1), atol=1e-5, rtol=1e-5)
    alone = policy.act({"state": seen()["state"][2:3]}, generator=SEEDS[2:3], greedy="from_noise")
    torch.testing.assert_close(alone.actions, acted.actions[2:3], atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="from_noise"):
        build_policy_model({"type": "mlp", "state_size": 5, "action_size": 2}).act(seen(), greedy="from_noise")


def test_learned_deviations_stay_within_their_bounds():
    policy = rough(build_policy_model({**FLOW, "method": "flow_noise", "noise_std": [0.05, 0.2]}), scale=5.0)
    found = policy.deviation(torch.randn(500, 3, 32) * 10)
    assert 0.05 - 1e-6 <= found.min() < 0.06
    assert 0.19 < found.max() <= 0.2 + 1e-6


def test_demonstrations_are_imitated_by_flow_matching(policy):
    wanted = torch.linspace(-0.8, 0.8, 36).view(6, 3, 2)
    stored = policy.demonstrated(seen(), wanted)
    assert torch.equal(policy.imitate(stored, generator=SEEDS).total, policy.imitate(stored, generator=SEEDS).total)
    assert not torch.equal(
        policy.imitate(stored, generator=SEEDS).total, policy.imitate(stored, generator=-SEEDS).total
    )
    mask = torch.zeros(6, 3, dtype=torch.bool)
    mask[1, 2] = True
    assert policy.imitate(stored, mask, SEEDS).weight == 2
    with pytest.raises(ValueError, match=r"`imitate` learns"):
        policy.evaluate(stored)


def test_what_is_imitated_comes_back():
    policy = build_policy_model({**FLOW, "hidden": [64, 64]})
    wanted = torch.linspace(-0.8, 0.8, 36).view(6, 3, 2)
    stored = {
        name: rows.repeat(16, *[1] * (rows.ndim - 1)) for name, rows in policy.demonstrated(seen(), wanted).items()
    }
    optimizer = torch.optim.Adam(policy.without_critic(), lr=1e-2)
    random = torch.Generator().manual_seed(3)
    for _ in range(80):
        optimizer.zero_grad()
        policy.imitate(stored, generator=random).mean().backward()
        optimizer.step()
    torch.testing.assert_close(policy.act(seen(), greedy=True).actions, wanted, rtol=0, atol=0.2)


def test_the_loss_of_imitation_is_the_distance_to_the_published_target():
    """Against the definition, with the numbers that the seeds give: (v(x_t, t) - (noise - actions))^2."""
    from rlinf.models.policy.base import normals, uniforms

    policy = rough(build_policy_model(FLOW))
    actions = torch.linspace(-1, 1, 36).view(6, 3, 2)
    drawn = uniforms(SEEDS, 6, 7, torch.device("cpu"))
    noise, t = normals(drawn[:, :6]).view(6, 3, 2), 0.999 * drawn[:, 6] ** (1 / 1.5) + 0.001
    x = torch.stack([t[row] * noise[row] + (1 - t[row]) * actions[row] for row in range(6)]).float()
    stored = policy.demonstrated(seen(), actions)
    v = policy.velocity(policy.context(stored))(x, t.float()).velocity
    found = policy.imitate(stored, generator=SEEDS)
    torch.testing.assert_close(found.mean(), (v - (noise - actions)).square().mean(), check_dtype=False)


def test_wrong_settings_are_refused_by_name():
    for wrong, said in (
        ({"method": "sde"}, "method"),
        ({"steps": 0}, "steps=0"),
        ({"noise_std": [0.2, 0.1]}, "noise_std"),
        ({"hidden": []}, "hidden"),
    ):
        with pytest.raises(ValueError, match=said):
            build_policy_model({**FLOW, **wrong})
