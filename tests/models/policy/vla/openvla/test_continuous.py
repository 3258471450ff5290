"""OpenVLA-OFT's continuous head: read from its authors' file, it acts, imitates, explores and is saved back."""

import pytest
import torch
from torch.nn import functional

from rlinf.models.policy.build import load_policy, save_policy
from tests.models.policy.vla.openvla_case import loaded, seen, shaken, told, write_tiny

WIDTH, NUMBERS = 64, 3
PART = "action_head--150000_checkpoint.pt"


def authors_head():
    """Tensors by the authors' names and shapes, as their trainer saves them."""
    random, wide = torch.Generator().manual_seed(5), WIDTH * NUMBERS
    shapes = {"layer_norm1.weight": (wide,), "layer_norm1.bias": (wide,), "fc1.weight": (WIDTH, wide),
              "fc1.bias": (WIDTH,), "layer_norm2.weight": (WIDTH,), "layer_norm2.bias": (WIDTH,),
              "fc2.weight": (NUMBERS, WIDTH), "fc2.bias": (NUMBERS,)}  # fmt: skip
    for block in range(2):
        at = f"mlp_resnet_blocks.{block}.ffn"
        shapes |= {f"{at}.0.weight": (WIDTH,), f"{at}.0.bias": (WIDTH,), f"{at}.1.weight": (WIDTH, WIDTH),
                   f"{at}.1.bias": (WIDTH,)}  # fmt: skip
    return {f"module.model.{name}": 0.3 * torch.randn(shape, generator=random) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = write_tiny(tmp_path_factory.mktemp("oft") / "tiny", "openvla-oft", action_size=3)
    torch.save(authors_head(), made / PART)
    return made


@pytest.fixture
def policy(directory):
    return loaded(directory, "openvla-oft", state_size=5)


def test_a_directory_with_such_a_head_acts_by_it_as_its_authors_compute_it(policy):
    assert (policy.config.head, policy.config.variant) == ("l1", "official")
    inputs, named = policy.inputs(seen(), told()), authors_head()
    with torch.no_grad():
        hidden = policy._pass(inputs)
        assert hidden.shape == (4, 2 * NUMBERS, WIDTH)
        x = hidden.reshape(4, 2, NUMBERS * WIDTH)

        def linear(x, at):
            return x @ named[f"module.model.{at}.weight"].T + named[f"module.model.{at}.bias"]

        def norm(x, at):
            scale, offset = named[f"module.model.{at}.weight"], named[f"module.model.{at}.bias"]
            return functional.layer_norm(x, x.shape[-1:]) * scale + offset

        x = linear(norm(x, "layer_norm1"), "fc1").relu()
        for block in range(2):
            x = x + linear(norm(x, f"mlp_resnet_blocks.{block}.ffn.0"), f"mlp_resnet_blocks.{block}.ffn.1").relu()
        x = linear(norm(x, "layer_norm2"), "fc2")
    acted = policy.act(seen(), instructions=told(), greedy=True)
    torch.testing.assert_close(acted.stored["actions"], x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(acted.actions, policy.robot.to_simulator(x), atol=1e-5, rtol=1e-5)
    assert x.std() > 0.05


def test_it_explores_by_its_learned_deviations(policy):
    with torch.no_grad():
        policy.log_std.copy_(torch.linspace(-3, -1, 2 * NUMBERS).view(2, NUMBERS))
    mean = policy.act(seen(), instructions=told(), greedy=True).stored["actions"]
    drawn = [policy.act(seen(), instructions=told(), generator=torch.arange(4) + 10 * turn) for turn in range(40)]
    away = torch.stack([each.stored["actions"] for each in drawn]) - mean
    torch.testing.assert_close(away.std((0, 1)).log(), policy.log_std.detach(), atol=0.2, rtol=0)
    expected = torch.distributions.Normal(mean, policy.log_std.exp()).log_prob(drawn[0].stored["actions"])
    found = policy.evaluate(drawn[0].stored, level="token").logprobs
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    found.sum().backward()
    assert policy.log_std.grad.abs().min() > 0
    assert not policy.language_model.lm_head.weight.grad  # nothing reads it, so it does not learn
    assert "!language_model.lm_head.*" in policy.trains


def test_it_imitates_by_the_mean_distance(directory):
    policy = shaken(loaded(directory, "openvla-oft", value_level=None))
    wanted = torch.linspace(-0.8, 0.8, 24).view(4, 2, 3)
    stored = policy.demonstrated(seen(), wanted, told())
    torch.testing.assert_close(policy.robot.to_simulator(stored["actions"]), wanted, atol=1e-5, rtol=0)
    numbers = policy.act(seen(), instructions=told(), greedy=True).stored["actions"]
    distance = (numbers - stored["actions"]).abs()
    torch.testing.assert_close(policy.imitate(stored).mean().float(), distance.mean())
    mask = torch.zeros(4, 2, dtype=torch.bool)
    mask[1, 0] = True
    torch.testing.assert_close(policy.imitate(stored, mask).mean().float(), distance[1, 0].mean())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    for _ in range(8):
        optimizer.zero_grad()
        policy.imitate(stored).mean().backward()
        optimizer.step()
    assert policy.imitate(stored).mean().item() < 0.5 * distance.mean().item()


def test_it_is_saved_in_the_authors_file_anew_only_where_it_has_changed(policy, directory, tmp_path):
    save_policy(policy, tmp_path / "alike")
    assert (tmp_path / "alike" / PART).read_bytes() == (directory / PART).read_bytes()
    with torch.no_grad():
        policy.action_head.model.fc2.bias += 1.0
    save_policy(policy, tmp_path / "changed")
    theirs = torch.load(tmp_path / "changed" / PART, weights_only=True)
    assert theirs.keys() == authors_head().keys()
    for name, tensor in authors_head().items():
        assert torch.equal(theirs[name], tensor + (name == "module.model.fc2.bias"))
    assert (tmp_path / "changed" / "proprio_projector--latest_checkpoint.pt").is_file()
    again = load_policy(tmp_path / "changed").act(seen(), instructions=told(), greedy=True)
    assert torch.equal(again.actions, policy.act(seen(), instructions=told(), greedy=True).actions)


def test_a_new_head_is_told_of_and_what_draws_tokens_is_refused(directory, tmp_path, caplog):
    for path in directory.iterdir():
        if path.name != PART:
            (tmp_path / path.name).symlink_to(path)
    loaded(tmp_path, "openvla-oft", head="l1", variant="official")
    assert "action_head" in caplog.text
    assert "imitate first" in caplog.text
    with pytest.raises(ValueError, match=r"temperature=1\.6.*head=l1"):
        loaded(directory, "openvla-oft", temperature=1.6)
