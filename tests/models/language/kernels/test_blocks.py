"""Blocks compiled one by one: the gradients of uncompiled ones, by few graphs, whatever the lengths."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from rlinf.data.packing import Row, pack
from rlinf.models.language.kernels import Kernel, scores, slopes_alone
from rlinf.models.language.lora import add_adapters, start_adapters
from rlinf.models.language.policy_model import PolicyModel, ValueModel
from tests.actors.toys import VOCABULARY, furthest, gradients, model


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()


def weights(query, key, scale, left):
    """Of each token of one sequence, what it makes of every other: [heads, tokens, tokens]."""
    apart = torch.arange(len(query))[:, None] - torch.arange(len(query))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill((apart < 0) | ((apart > left) & (left >= 0)), -torch.inf).softmax(-1)


def sequences(bounds, *parts):
    """Each part of each sequence, so that what one holds, were it NaN, reaches no other."""
    return zip(*(part.split(bounds.diff().tolist()) for part in parts), strict=True)


@torch.library.custom_op("rlinf_tests::varlen", mutates_args=())
def varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, left: int) -> Tensor:
    """A kernel that compilers do not look into, as those of CUDA are."""
    assert longest == int(bounds.diff().max())
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    found = [
        torch.einsum("hqk,khd->qhd", weights(q, k, scale, left), v) for q, k, v in sequences(bounds, query, key, value)
    ]
    return torch.cat(found).contiguous()


@torch.library.custom_op("rlinf_tests::varlen_backward", mutates_args=())
def varlen_backward(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, left: int
) -> list[Tensor]:
    """With p = softmax(s): ds = p (dp - sum of p dp)."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    found = []
    for d, q, k, v in sequences(bounds, slope, query, keys, values):
        p, dp = weights(q, k, scale, left), torch.einsum("qhd,khd->hqk", d, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        for_keys, for_values = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, d)
        shared = (part.unflatten(1, (-1, groups)).sum(2) for part in (for_keys, for_values))
        found.append((torch.einsum("hqk,khd->qhd", ds, k), *shared))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


varlen.register_fake(lambda query, *others: torch.empty_like(query))
varlen_backward.register_fake(lambda slope, *others: [torch.empty_like(part) for part in others[:3]])


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[5:]


def back(ctx, slope):
    return *varlen_backward(slope, *ctx.saved_tensors, *ctx.rest), None, None, None, None


varlen.register_autograd(back, setup_context=keep)
KERNEL = Kernel(
    "a kernel of this test", lambda q, k, v, bounds, longest, *more: varlen(q, k, v, bounds[0], longest[0], *more)
)


def rows(seed, longest=20, count=5):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, (count, 2))
    return [Row(rng.integers(2, VOCABULARY, int(a)), rng.integers(2, VOCABULARY, int(b))) for a, b in sizes]


def learned(policy, batches):
    for batch in batches:
        policy(batch)[0].sum().backward()
    found = gradients(policy)
    policy.zero_grad()
    return found


def shared(seed):
    """Answers to one prompt."""
    first = rows(seed, count=1)[0]
    return [first, *(Row(first.prompt_ids, other.response_ids) for other in rows(seed + 1))]


BATCHES = [pack(given) for given in (rows(0), rows(1, 50), shared(2), rows(3, count=1), [], shared(4), rows(5, 9, 30))]


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Graphs are run as they were traced: to make kernels of them takes half a minute."""
    monkeypatch.setattr(PolicyModel, "compiler", "aot_eager")


def with_adapters(net):
    add_adapters(net, {"r": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]})
    for parameter, _ in start_adapters(net, 0):
        torch.nn.init.normal_(parameter, std=0.1)
    return net


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kernel", "most"),
    [
        ("checkpointing", KERNEL, 5),
        pytest.param("checkpointing", False, 18, marks=pytest.mark.repeated),
        ("adapters and windows", KERNEL, 12),
        pytest.param("values", KERNEL, 5, marks=pytest.mark.repeated),
        ("plain", False, 18),
    ],
)
def test_compiled_blocks_have_the_gradients_of_uncompiled_ones_by_few_graphs(monkeypatch, way, kernel, most):
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    net = model(num_hidden_layers=2, **(windows if "windows" in way else {}))
    if "adapters" in way:
        with_adapters(net)
    kind, checkpointing = ValueModel if way == "values" else PolicyModel, way == "checkpointing"
    policy = kind(net, gradient_checkpointing=checkpointing, compiled=True)
    policy.kernel = kernel
    expected = learned(policy, BATCHES)
    monkeypatch.setattr(PolicyModel, "_at_hand", lambda *_: kernel)
    policy.settle()
    assert ("a kernel of this test" if kernel else "rectangles") in policy.words
    assert "blocks and head" in policy.words
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert furthest(learned(policy, BATCHES), expected) < 1e-5
    graphs = policy.numbers["compile/graphs"]
    assert 0 < graphs <= most
    learned(policy, [pack(rows(seed, 10 + seed, 2 + seed % 7)) for seed in range(6, 9)])
    assert policy.numbers["compile/graphs"] == graphs  # other lengths compile nothing anew


def test_the_head_of_the_first_step_is_what_the_probe_had_compiled(monkeypatch):
    monkeypatch.setattr(PolicyModel, "_at_hand", lambda *_: KERNEL)

    def forms():
        return [len(_debug_get_cache_entry_list(function.__code__)) for function in (scores, slopes_alone)]

    policy = PolicyModel(model(num_hidden_layers=1), compiled=True)
    policy.settle()
    before = forms()
    for batch in BATCHES[:2]:
        logprobs = policy(batch)[0]
        (logprobs * torch.rand(len(logprobs))).sum().backward()
    assert forms() == before
    assert all(before)


def test_without_a_compiler_a_run_says_so_and_goes_on_unless_it_must_compile(monkeypatch):
    def none(name):
        def broken(graph, inputs):
            raise RuntimeError("there is no C++ compiler")

        return broken

    monkeypatch.setattr(torch._dynamo, "lookup_backend", none)
    with pytest.raises(ValueError, match=r"trainer.compile=true:.*compiled: RuntimeError:.*compiler"):
        PolicyModel(model(), compiled=True).settle()
    policy = PolicyModel(model(), compiled=True)
    policy._compile = "auto"
    policy._compile_it(*probe_of(policy), None, refused := [])
    (reason,) = refused
    assert reason.startswith("blocks ")
    assert reason.endswith("C++ compiler")
    assert "head compiled" in policy.words  # which this compiler of the test is not asked for
    plain = PolicyModel(model())
    assert furthest(learned(policy, BATCHES[:2]), learned(plain, BATCHES[:2])) < 1e-6


def probe_of(policy):
    batch = pack(rows(0))
    return batch, policy._truth(batch, learns=True)


def test_nothing_is_compiled_on_a_cpu_unless_asked_for():
    policy = PolicyModel(model(), compiled="auto")
    policy.settle()
    assert (policy.numbers, policy.way.usual) == ({}, True)
