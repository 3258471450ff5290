"""The head's elements, compiled: what torch's operations give one after the other, compiled once for all chunks."""

import pytest
import torch

from rlinf.models.language.kernels import Compiled, FusedHead, scores
from rlinf.models.language.policy_model import token_logprobs

WIDTH, VOCABULARY = 6, 37


def given(count, dtype, *, bias, temperature, impossible=False):
    generator = torch.Generator().manual_seed(count)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator).to(dtype) for n in (count, VOCABULARY))
    shift = torch.randn(VOCABULARY, generator=generator).to(dtype) if bias else None
    if impossible:
        shift[VOCABULARY - 1] = -torch.inf
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "bias": None if shift is None else shift.requires_grad_(),
        "targets": torch.randint(0, VOCABULARY - 1, (count,), generator=generator),
        "temperature": torch.rand(count, generator=generator) + 0.5 if temperature else None,
    }


def learned(tensors, fused, *, chunk, entropy_slope):
    """Log-probs, entropies, and gradients of a sum of both."""
    logprobs, entropy = token_logprobs(**tensors, chunk=chunk, entropy_slope=entropy_slope, fused=fused)
    weights = torch.arange(1.0, len(logprobs) + 1)
    total = (logprobs * weights).sum() + ((entropy * weights.flip(0)).sum() if entropy_slope else 0.0)
    leaves = [tensors[name] for name in ("hidden", "weight", "bias") if tensors[name] is not None]
    return [logprobs, entropy, *torch.autograd.grad(total, leaves)]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """A function has room for a few compiled forms alone, and each test here makes other ones."""
    torch.compiler.reset()


SIZES = ((11, 4), (8, 8), (1, 3), (0, 5))


def compared(backend, dtype, entropy_slope, bias, temperature, impossible, sizes=SIZES):
    fused = FusedHead.make(backend, required=True)
    for count, chunk in sizes:
        tensors = given(count, dtype, bias=bias, temperature=temperature, impossible=impossible)
        compiled, plain = (learned(tensors, head, chunk=chunk, entropy_slope=entropy_slope) for head in (fused, None))
        # slopes are rounded to bfloat16 from float32 sums in another order: one unit in the last place
        bound = 1e-5 if dtype == torch.float32 else 2**-7
        for one, other in zip(compiled, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    assert fused.refused is None


@pytest.mark.parametrize(
    ("dtype", "entropy_slope", "bias", "temperature", "impossible"),
    [
        (torch.float32, False, 0, 0, 0),
        (torch.float32, True, 1, 1, 1),
        (torch.bfloat16, True, 0, 1, 0),
        (torch.bfloat16, False, 1, 0, 1),
    ],
)
def test_the_compiled_head_gives_what_the_plain_one_gives(dtype, entropy_slope, bias, temperature, impossible):
    compared("aot_eager", dtype, entropy_slope, bias, temperature, impossible)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SIZES[:1], pytest.param(SIZES, marks=pytest.mark.repeated)])
def test_so_does_the_head_that_the_real_compiler_makes(sizes):
    compared("inductor", torch.bfloat16, True, True, True, True, sizes)


def test_chunks_of_all_lengths_are_compiled_once_and_single_tokens_once_more():
    seen = []

    def counting(graph, inputs):
        seen.append(graph)
        return graph

    head = Compiled(scores, counting, required=True)
    for count in (7, 3, 64, 12, 1, 5, 1):
        tensors = given(count, torch.float32, bias=0, temperature=1)
        head(tensors["hidden"].detach() @ tensors["weight"].detach().T, tensors["targets"], tensors["temperature"])
    assert len(seen) == 2


def test_what_cannot_be_compiled_is_computed_all_the_same_and_the_cause_kept():
    def broken(graph, inputs):
        raise RuntimeError("no compiler here\nand much more")

    tensors = given(5, torch.float32, bias=1, temperature=1)
    head = FusedHead.make(broken)
    found, plain = (learned(tensors, each, chunk=2, entropy_slope=True) for each in (head, None))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)
    assert "no compiler here" in head.refused
    with pytest.raises(RuntimeError, match="no compiler here"):
        learned(tensors, FusedHead.make(broken, required=True), chunk=2, entropy_slope=True)


def test_memory_that_runs_out_while_compiling_is_no_reason_to_go_on():
    def full(graph, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    tensors = given(5, torch.float32, bias=1, temperature=1)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError), match=r"out.*memory"):
        learned(tensors, FusedHead.make(full), chunk=2, entropy_slope=True)
