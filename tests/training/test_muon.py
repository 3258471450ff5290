"""Muon beside AdamW: next to torch's own, to its definition in float64, in slices and copies, saved, gone on from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.config.learning import LearningSettings, MuonConfig
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.models.language.lora import add_adapters
from rlinf.models.language.policy_model import PolicyModel
from rlinf.training.checkpoint import copy_state, load_state
from rlinf.training.fsdp import Learner
from rlinf.training.muon import Muon, hidden_matrices, orthogonal
from rlinf.training.optimizer import Adam
from tests.actors import toys
from tests.actors.watched import in_double
from tests.training.programs.contract import OPTIMIZER, alone, copied, far, one_step

SETTINGS = {"kind": "muon", "lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(11, 24), torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 16), torch.nn.Tanh(),
        torch.nn.Linear(16, 16, bias=False), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1),
    )  # fmt: skip


@settings(max_examples=8)
@given(
    momentum=st.floats(0.5, 0.99),
    nesterov=st.booleans(),
    adjust=st.sampled_from(["match_rms_adamw", "original"]),
    lr_ratio=st.sampled_from([1.0, 20.0]),
)
def test_steps_are_those_of_torch_for_the_same_gradients(momentum, nesterov, adjust, lr_ratio):
    how = MuonConfig(lr_ratio=lr_ratio, momentum=momentum, nesterov=nesterov, adjust=adjust)
    ours, theirs = network(), network()
    optimizer = Muon(list(ours.parameters()), hidden_matrices(ours), LearningSettings(muon=how, **SETTINGS))
    matrices = [theirs[place].weight for place in (1, 3, 5)]
    others = [each for each in theirs.parameters() if all(each is not one for one in matrices)]
    same = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust, "weight_decay": 0.1}
    references = (
        torch.optim.Muon(matrices, lr=3e-3 * lr_ratio, **same),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True),
    )
    for _ in range(4):
        loss = ours(torch.randint(0, 11, (32,))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = mine.grad.clone()
        optimizer.step()
        for each in references:
            each.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


def defined(update):
    """Five steps of Newton and Schulz as they are written, in float64."""
    x = update.double() / update.double().norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(24, 24), (16, 80), (80, 16), (3, 16, 40), (3, 40, 16)])
def test_a_matrix_is_made_orthogonal_as_defined_and_each_expert_by_itself(shape):
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = [defined(one) for one in update.reshape(-1, *shape[-2:])]
    for exact, bound in ((torch.float64, 1e-12), (torch.bfloat16, 0.05)):  # 8 bits over some 15 products
        found = orthogonal(update.to(exact)).reshape(-1, *shape[-2:]).double()
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() < bound * other.norm()
    for one in expected:
        values = torch.linalg.svdvals(one)
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


@pytest.fixture(scope="module")
def loop():
    """Of a plain loop in float64: weights before and after each of three steps, and loss and norm of each."""
    net = in_double(build_model(toys.configuration(), load_tokenizer(toys.ALPHABET)).eval())
    named = dict(net.named_parameters())
    matrices = {name: torch.zeros_like(each) for name, each in named.items() if "proj.weight" in name}
    others = [each for name, each in named.items() if name not in matrices]
    lr, decay = OPTIMIZER["lr"], OPTIMIZER["weight_decay"]
    adamw = torch.optim.AdamW(others, lr=lr, betas=OPTIMIZER["betas"], weight_decay=decay)
    weights, numbers = [copied(net)], []
    for seed in range(3):
        net.zero_grad()
        loss = toys.by_a_plain_loop(net, toys.groups(7, seed))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), OPTIMIZER["grad_clip"])
        adamw.step()
        with torch.no_grad():
            for name, mean in matrices.items():
                mean.copy_(0.95 * mean + 0.05 * named[name].grad)
                step = defined(0.95 * mean + 0.05 * named[name].grad)
                named[name].mul_(1 - lr * decay).sub_(lr * 0.2 * max(step.shape) ** 0.5 * step)
        weights.append(copied(net))
        numbers.append((float(loss.detach()), float(norm)))
    return weights, numbers


def test_one_rank_learns_as_the_loop_does_with_clipping_and_several_micro_batches(loop):
    """Log-probs are float32, so gradients are off by 1e-7 of the largest; five steps of the polynomial multiply what is
    small in a matrix by up to 3.4445 ** 5 = 485."""
    weights, numbers = loop
    net, learner = alone("muon")
    for seed, (loss, norm) in enumerate(numbers):
        said = one_step(learner, seed)
        assert (said["loss"], said["grad_norm"]) == pytest.approx((loss, norm), rel=1e-5)
        assert said["lr"] == OPTIMIZER["lr"]
        assert far(copied(net), weights[seed + 1], weights[seed]) < 1e-3


def test_a_state_of_another_kind_of_optimizer_is_refused_in_words(tmp_path):
    for mine, theirs in (("adamw", "muon"), ("muon", "adamw")):
        (net, saved), (_, other) = alone(mine), alone(theirs)
        copy_state(net, saved.optimizer, saved.schedule, 0, rank=0, ranks=1).write(tmp_path / mine)
        with pytest.raises(ValueError, match=f"its optimizer is {mine} and this one {theirs}"):
            load_state(other._policy.model, other.optimizer, other.schedule, tmp_path / mine, rank=0)


def test_what_is_no_hidden_matrix_is_left_to_adamw():
    for kind, extra in (("qwen2", {}), ("llama", {}), ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 8})):
        net = toys.model(kind, **extra)
        chosen = {id(each) for each in hidden_matrices(net)}
        for name, each in net.named_parameters():
            hidden = name.endswith("_proj.weight") or ".experts." in name
            assert (id(each) in chosen) == hidden, name
        assert any(each.dim() == 3 for each in hidden_matrices(net)) == (kind == "qwen3_moe")


def test_adapters_and_steps_of_adam_are_refused():
    net, learner = alone("muon")
    with pytest.raises(ValueError, match="take adamw"):
        learner.step(Adam())
    add_adapters(net, {"r": 2, "alpha": 4, "target_modules": "auto"})
    with pytest.raises(ValueError, match="no hidden matrix learns here"):
        Learner(PolicyModel(net), LearningSettings(kind="muon"))
