"""Blocks compiled one by one: the gradients of uncompiled ones, by few graphs, whatever the lengths."""

import json
import os

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from rlinf.data.packing import Row, pack
from rlinf.models.language import kernels
from rlinf.models.language.kernels import CompileTime, Kernel, scores, slopes_alone
from rlinf.models.language.lora import add_adapters, start_adapters
from rlinf.models.language.policy_model import PolicyModel, ValueModel
from rlinf.models.language.truth import Truth
from tests.actors.toys import VOCABULARY, furthest, gradients, model


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()


def weights(query, key, scale, left):
    """Of each of the last tokens of one sequence, what it makes of every other: [heads, queries, tokens]."""
    apart = torch.arange(len(key))[len(key) - len(query) :, None] - torch.arange(len(key))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill((apart < 0) | ((apart > left) & (left >= 0)), -torch.inf).softmax(-1)


def sequences(asks, bounds, *parts):
    """Each part of each sequence, so that what one holds, were it NaN, reaches no other; the last two are of all that
    it has, and those before of what asks."""
    ends = [asks] * (len(parts) - 2) + [bounds] * 2
    return zip(*(part.split(end.diff().tolist()) for part, end in zip(parts, ends, strict=True)), strict=True)


@torch.library.custom_op("rlinf_tests::varlen", mutates_args=())
def varlen(
    query: Tensor, key: Tensor, value: Tensor, asks: Tensor, bounds: Tensor, longest: int, scale: float, left: int
) -> Tensor:
    """A kernel that compilers do not look into, as those of CUDA are."""
    assert longest == int(bounds.diff().max())
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    found = [
        torch.einsum("hqk,khd->qhd", weights(q, k, scale, left), v)
        for q, k, v in sequences(asks, bounds, query, key, value)
    ]
    return torch.cat(found).contiguous()


@torch.library.custom_op("rlinf_tests::varlen_backward", mutates_args=())
def varlen_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asks: Tensor,
    bounds: Tensor,
    scale: float,
    left: int,
) -> list[Tensor]:
    """With p = softmax(s): ds = p (dp - sum of p dp)."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    found = []
    for d, q, k, v in sequences(asks, bounds, slope, query, keys, values):
        p, dp = weights(q, k, scale, left), torch.einsum("qhd,khd->hqk", d, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        for_keys, for_values = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, d)
        shared = (part.unflatten(1, (-1, groups)).sum(2) for part in (for_keys, for_values))
        found.append((torch.einsum("hqk,khd->qhd", ds, k), *shared))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


varlen.register_fake(lambda query, *others: torch.empty_like(query))
varlen_backward.register_fake(lambda slope, *others: [torch.empty_like(part) for part in others[:3]])


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[6:]


def back(ctx, slope):
    return *varlen_backward(slope, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


varlen.register_autograd(back, setup_context=keep)
KERNEL = Kernel(
    "a kernel of this test", lambda q, k, v, bounds, longest, *more: varlen(q, k, v, *bounds, longest[1], *more)
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


# Left open until it is known to pay -----------------------------------------------------------------------------------


@pytest.fixture
def times(monkeypatch, tmp_path):
    """The file of how long compiling took, in an empty cache; and this CPU is one that may be compiled for."""
    monkeypatch.setattr(kernels, "_TIMES", tmp_path / "cache" / "times.json")
    monkeypatch.setattr(PolicyModel, "_may_pay", staticmethod(lambda device: True))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return tmp_path / "cache" / "times.json"


@pytest.mark.parametrize(
    ("known", "seconds", "left", "pays"),
    [
        ({}, 1.0, 10_000, True),
        ({}, 1.0, 4, False),
        ({}, 1.0, 0, False),
        ({"toy": 1.0}, 1.0, 10, True),
        ({"toy": 3.0}, 1.0, 10, False),
        ({"another": 1.0}, 1.0, 10, False),
        ({"toy": 1.0}, 100.0, None, True),  # as many are expected as there were: 4
        ({"toy": 1.0}, 1.0, None, False),
    ],
)
def test_compiling_pays_where_a_fifth_of_the_seconds_that_are_left_is_more_than_it_took_before(
    times, known, seconds, left, pays
):
    times.parent.mkdir()
    times.write_text(json.dumps(known))
    time = CompileTime("toy")
    decided = [time.weigh(each, left) for each in (50 * seconds, *[seconds] * 3)]  # the first says nothing
    assert decided[:3] == [None] * 3
    assert decided[3].pays is pays
    assert time.weigh(seconds, left) is None
    assert time._seconds[1:] == [seconds] * 4


def test_what_was_not_worth_compiling_is_weighed_again_after_twice_as_many_steps(times):
    time = CompileTime("toy")
    asked = [number for number in range(1, 40) if time.weigh(1.0, 1) is not None]
    assert asked == [4, 8, 16, 32]


def test_a_model_is_compiled_after_its_first_steps_if_that_pays_and_computes_the_same(times):
    policy = PolicyModel(model(num_hidden_layers=1), compiled="auto")
    policy.settle()
    expected = learned(policy, BATCHES[:2])
    for _ in range(3):
        policy.weigh_compiling(100.0, 50)
        assert (policy.numbers, policy.payoff) == ({}, "")
    policy.weigh_compiling(100.0, 50)
    assert "blocks and head compiled" in policy.words
    assert policy.words.endswith("1000 s in 50 steps and takes 40 s")
    assert policy.refused == ()
    graphs = policy.numbers["compile/graphs"]
    assert graphs > 0
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert furthest(learned(policy, BATCHES[:2]), expected) < 1e-5
    (seconds,) = json.loads(times.read_text()).values()
    assert 0 < seconds < 600
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith(".cache/rlinf/inductor")
    policy.weigh_compiling(100.0, 50)
    assert len(policy.words.split("compiled")) == 2, "it is decided once"


def test_a_run_too_short_for_it_goes_on_uncompiled_and_says_why(times):
    policy = PolicyModel(model(num_hidden_layers=1), compiled="auto")
    policy.settle()
    for left in (6, 5, 4, 3):
        policy.weigh_compiling(1.0, left)
    assert policy.way.words.endswith("not compiled, as it would save about 1 s in 3 steps and takes 40 s")
    assert policy.numbers == {"compile/graphs": 0.0}
    assert not times.exists()


def test_weights_that_went_on_are_judged_as_they_are_when_it_is_compiled(times, monkeypatch):
    policy = PolicyModel(model(num_hidden_layers=1), compiled="auto")
    policy.settle()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for _ in range(4):
        policy.weigh_compiling(100.0, 50)
    assert (policy.refused, policy._blocks.on) == ((), True)
    wrong = PolicyModel(model(num_hidden_layers=1), compiled="auto")
    wrong.settle()
    monkeypatch.setattr(Truth, "refuses", lambda *_: "it is off")
    for _ in range(4):
        wrong.weigh_compiling(100.0, 50)
    assert "blocks not compiled: it is off" in wrong.way.words
    assert not wrong._blocks.on
