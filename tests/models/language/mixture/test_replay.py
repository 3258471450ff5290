"""Router replay in the policy: tokens go where a batch says, and nothing else changes."""

import numpy as np
import pytest
import torch

from rlinf.data.packing import Row, pack
from rlinf.models.language.policy_model import PolicyModel
from tests.actors.toys import VOCABULARY, model

RNG = np.random.default_rng(3)
KINDS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


def mixture(kind="qwen3_moe", spread=1.0, **more):
    net = model(kind, **{**KINDS[kind], **more})
    with torch.no_grad():  # gates of a new model say next to nothing
        for name, parameter in net.named_parameters():
            if "gate.weight" in name or "router" in name:
                parameter.normal_(std=spread, generator=torch.Generator().manual_seed(5))
            elif "experts" in name:
                parameter.mul_(20)  # and its experts do next to nothing
    return net.eval()


def rows(prompts=((0, 4), (0, 4), (1, 2), (2, 9)), answers=(5, 1, 8, 3), routes=None):
    texts = {key: np.random.default_rng(key).integers(2, VOCABULARY, key[1]) for key in prompts}
    return [
        Row(
            texts[key],
            np.random.default_rng(n).integers(2, VOCABULARY, answer),
            routes=None if routes is None else routes[n],
        )
        for n, (key, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


@torch.no_grad()
def chosen(net, row):
    """Where the tokens of a row go by the model's own gates, each text alone, [tokens, layers, experts per token]."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logits = net(ids, output_router_logits=True).router_logits
    return np.stack([layer.topk(2, dim=-1).indices.numpy() for layer in logits], axis=1).astype(np.uint8)[:-1]


def policy_of(net, replay="auto", **more):
    policy = PolicyModel(net, router_replay=replay, **more)
    policy.settle()
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_routes_that_the_gates_would_choose_change_nothing_and_others_are_followed(kind):
    net = mixture(kind)
    free = rows()
    own = [chosen(net, row) for row in free]
    policy = policy_of(net)
    assert policy.mixture.replays
    expected, _, unled = policy(pack(free))
    told = rows(routes=own)
    found, _, led = policy(pack(told))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert bool(led.has_route.all()), not bool(unled.has_route.any())
    assert not led.route_drift.any()
    far, _, gone = policy(pack(rows(routes=[(one + 1) % 8 for one in own])))
    assert (far - expected).abs().max() > 1e-4
    assert gone.route_drift.any()
    learned = np.concatenate([one[-len(row.response_ids) :] for one, row in zip(own, free, strict=True)])
    counts = np.stack([np.bincount((learned[:, layer].ravel() + 1) % 8, minlength=8) for layer in range(2)])
    np.testing.assert_array_equal(gone.counts.numpy(), counts)


@pytest.mark.parametrize("way", [{"attention": "padded"}, {"gradient_checkpointing": True}, {"compiled": True}])
def test_every_way_to_compute_follows_the_same_routes_with_the_same_gradients(way, monkeypatch):
    monkeypatch.setattr(PolicyModel, "compiler", "eager")
    net = mixture()
    other = [(chosen(net, row) + 3) % 8 for row in rows()]
    found = {}
    for name, more in {"plain": {}, "way": way}.items():
        policy = policy_of(mixture(), **more)
        logprobs, _, routed = policy(pack(rows(routes=other)))
        logprobs.square().sum().backward()
        found[name] = logprobs, routed.counts, [parameter.grad for parameter in policy.parameters()]
    torch.testing.assert_close(found["way"], found["plain"], atol=5e-5, rtol=1e-4)


def test_unknown_tokens_go_where_the_gates_send_them():
    net = mixture()
    own = [chosen(net, row) for row in rows()]
    policy = policy_of(net)
    expected, _, _ = policy(pack(rows()))
    half = [np.where(np.arange(len(one))[:, None, None] % 2 == 0, one, 255).astype(np.uint8) for one in own]
    found, _, routed = policy(pack(rows(routes=half)))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert 0 < int(routed.has_route.sum()) < len(found)


def test_with_the_experts_held_a_small_change_of_weights_moves_ratios_less():
    many = {"prompts": [(n, 3 + n % 5) for n in range(24)], "answers": [12] * 24}
    own = [chosen(mixture(), row) for row in rows(**many)]
    old, _, _ = policy_of(mixture())(pack(rows(**many)))
    changed = mixture()
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "gate.weight" in name:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    policy = policy_of(changed)
    free, _, _ = policy(pack(rows(**many)))
    held, _, routed = policy(pack(rows(**many, routes=own)))
    swapped = routed.route_drift.any(0)  # where gates would choose otherwise now
    assert swapped.sum() > 10
    far, near = ((one - old)[swapped].exp().sub(1).abs().mean() for one in (free, held))
    assert near < 0.6 * far


def test_a_policy_that_shall_not_replay_tells_all_the_same_and_another_one_nothing():
    net = mixture()
    other = [(chosen(net, row) + 3) % 8 for row in rows()]
    expected, _, _ = policy_of(mixture())(pack(rows()))
    found, _, routed = policy_of(mixture(), replay=False)(pack(rows(routes=other)))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert not routed.has_route.any()
    reference, *more = policy_of(mixture(), replay=None)(pack(rows(routes=other)))
    torch.testing.assert_close(reference, expected, atol=1e-6, rtol=0)
    assert len(more) == 1


def test_a_model_without_experts_cannot_be_told_to_replay():
    with pytest.raises(ValueError, match=r"trainer.router_replay=true: Qwen2ForCausalLM.*experts"):
        policy_of(model(), replay=True)
    assert len(policy_of(model())(pack(rows()))) == 2
    policy = policy_of(mixture())
    with pytest.raises(ValueError, match=r"engine.*trainer"):
        policy(pack(rows(routes=[np.zeros((20, 5, 2), np.uint8)] * 4)))


def test_a_server_tells_of_layers_without_experts_too():
    net = mixture(mlp_only_layers=[0])
    own = [(chosen(net, row) + 1) % 8 for row in rows()]
    both = [np.concatenate([np.zeros_like(one), one], axis=1) for one in own]
    policy = policy_of(net)
    found, expected = (policy(pack(rows(routes=routes)))[0] for routes in (both, own))
    torch.testing.assert_close(found, expected)
