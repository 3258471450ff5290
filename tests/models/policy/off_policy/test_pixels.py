"""Soft actor-critic from pictures: what trains the convolutions, and who looks at them."""

import pytest
import torch

from rlinf.models.policy.build import build_policy_model, load_policy, save_policy
from rlinf.training.embodied.replay import SacSettings
from rlinf.training.embodied.sac import SacLearner

PIXELS = {"type": "soft_pixels", "image": [8, 8, 3], "action_size": 1, "hidden": [16], "channels": [4, 8],
          "picture_features": 6}  # fmt: skip


def pictures(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 8, 8, 3), generator=random, dtype=torch.uint8)


def batch(count, state=False, gripper=False):
    random = torch.Generator().manual_seed(1)
    rows = {"seen.rgb": pictures(count), "following.rgb": pictures(count, 2)}
    if state:
        rows |= {f"{when}.state": torch.randn(count, 2, generator=random) for when in ("seen", "following")}
    return {
        **rows,
        "actions": torch.cat([torch.randn(count, 1, 1, generator=random), torch.ones(count, 1, int(gripper))], -1),
        "rewards": torch.randn(count, 1, generator=random),
        "steps": torch.ones(count, dtype=torch.int64),
        "terminated": torch.zeros(count, dtype=torch.bool),
    }


def test_the_actor_sends_no_gradient_into_the_convolutions():
    policy = build_policy_model(PIXELS)
    drawn = policy.draw(policy.inputs({"rgb": pictures(4)}), torch.rand(4, 1, dtype=torch.float64))
    drawn.logprobs.sum().backward()
    assert all(each.grad is None for each in policy.of_critic())
    assert all(each.grad is not None for each in policy.trunk.parameters())


@pytest.mark.parametrize(("state", "gripper"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_critics_alone_train_the_convolutions_and_targets_have_their_own(state, gripper):
    sizes = {"state_size": 2 if state else 0, "gripper": gripper, "action_size": 1 + gripper}
    policy = build_policy_model({**PIXELS, **sizes})
    learner = SacLearner(policy, SacSettings(lr=1e-2, critic_lr=1e-2, tau=0.5, shift=1))
    before = {name: tensor.clone() for name, tensor in learner.module.state_dict().items()}
    learner.learn(batch(8, state, gripper), seed=0)
    after = learner.module.state_dict()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert any(name.startswith("policy.critic.eyes") for name in moved)
    assert any(name.startswith("target.eyes") for name in moved)
    assert any(name.startswith("policy.trunk") for name in moved)
    for part in ("policy.critic.gripper", "target.gripper"):
        assert any(name.startswith(part) for name in moved) == gripper
    name = "critic.eyes.layers.0.weight"
    middle = (before[f"policy.{name}"] + after[f"policy.{name}"]) / 2
    torch.testing.assert_close(after["target.eyes.layers.0.weight"], middle)


def test_it_learns_what_a_picture_says():
    # The best action is up where the picture is bright, and down where it is dark; one decision, then the end.
    learner = SacLearner(build_policy_model(PIXELS), SacSettings(lr=4e-3, alpha=0.02, alpha_lr=0.0))
    random = torch.Generator().manual_seed(0)
    for seed in range(120):
        bright = torch.rand(32, generator=random) < 0.5
        shown = (bright[:, None, None, None] * 200).to(torch.uint8).expand(-1, 8, 8, 3).contiguous()
        actions = torch.rand(32, 1, 1, generator=random) * 1.9 - 0.95
        wanted = torch.where(bright, 0.5, -0.5)
        learner.learn(
            {
                "seen.rgb": shown, "following.rgb": shown, "actions": torch.atanh(actions),
                "rewards": -2 * (actions[:, 0] - wanted[:, None]).square(),
                "steps": torch.ones(32, dtype=torch.int64), "terminated": torch.ones(32, dtype=torch.bool),
            }, seed=seed,
        )  # fmt: skip
    found = learner.policy.act({"rgb": shown}, greedy=True).actions[:, 0, 0]
    assert ((found > 0) == bright).all()


def test_it_is_saved_and_made_again(tmp_path):
    policy = build_policy_model(PIXELS)
    save_policy(policy, tmp_path)
    seen = {"rgb": pictures(3)}
    assert torch.equal(load_policy(tmp_path).act(seen, greedy=True).actions, policy.act(seen, greedy=True).actions)


def test_pictures_too_small_for_the_convolutions_are_named():
    with pytest.raises(ValueError, match=r"least 4 pixels"):
        build_policy_model({**PIXELS, "image": [2, 8, 3]})
