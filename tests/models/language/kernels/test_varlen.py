"""Attention by a kernel whose arguments differ between releases: stand-ins take theirs, and compute what is right."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen

from rlinf.data.packing import pack
from rlinf.models.language import kernels
from rlinf.models.language.attention import ARGUMENT, Layout, packed_attention
from rlinf.models.language.kernels import kernel_of
from rlinf.models.language.policy_model import PolicyModel
from rlinf.runs.rules import ConfigError, load_config
from tests.actors.toys import furthest, gradients, model
from tests.models.language.test_policy_model import ROWS

CPU = torch.device("cpu")
HEADS, KEY_HEADS = 4, 2


def plain(query, key, value, bounds, longest, scale, left):
    """Causal attention of each sequence, one after the other, whose last tokens ask; a window of `left` tokens before
    oneself, -1 for all."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert [int(each.diff().max()) for each in bounds] == list(longest)
    done, ends = [], [each.tolist() for each in bounds]
    for asks, end_of_asks, start, end in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        one, other, third = (
            part[slice(*where)].transpose(0, 1)
            for part, where in zip((query, key, value), ((asks, end_of_asks), (start, end), (start, end)), strict=True)
        )
        every = torch.arange(end - start)
        apart = every[len(every) - (end_of_asks - asks) :, None] - every
        seen = (apart >= 0) & ((apart <= left) | (left < 0))
        scores = (one @ other.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        done.append((scores.softmax(-1) @ third).transpose(0, 1))
    return torch.cat(done)


def shared(query, key, value):
    return (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))


def of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert (return_aux, window_size[1], cu_seq_q.dtype) == (None, 0, torch.int32)
    return plain(query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k), scale, window_size[0])


def of_torch_2_13(query, key, value, *others, enable_gqa=False, seqused_k=None, **more):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return of_torch_2_11(query, *shared(query, key, value), *others, **more)


def of_flash_attention_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
):  # fmt: skip
    assert (causal, dropout_p, window_size[1]) == (True, 0.0, 0 if window_size[0] >= 0 else -1)
    bounds, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return plain(q, *shared(q, k, v), bounds, longest, softmax_scale, window_size[0])


def of_flash_attention_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    assert causal
    bounds, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return plain(q, *shared(q, k, v), bounds, longest, softmax_scale, window_size[0]), torch.empty(())


def module(name, **members):
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


@pytest.fixture(params=["torch 2.11", "torch 2.13", "FlashAttention 2", "FlashAttention 3"])
def kernel(request, monkeypatch):
    """A kernel of each kind, which a stand-in computes."""
    monkeypatch.setattr(kernels, "_torch_kernel", kernels._torch_kernel.__wrapped__)
    monkeypatch.setattr(kernels, "_flash_kernel", kernels._flash_kernel.__wrapped__)
    monkeypatch.setattr(kernels, "_hopper", lambda device: request.param == "FlashAttention 3")
    two = module("flash_attn", flash_attn_varlen_func=of_flash_attention_2, __version__="2.8.3")
    three = module("flash_attn_interface", flash_attn_varlen_func=of_flash_attention_3)
    monkeypatch.setitem(sys.modules, "flash_attn", two)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", three)
    monkeypatch.setattr(torch_varlen, "varlen_attn", of_torch_2_11 if "2.11" in request.param else of_torch_2_13)
    return kernel_of("varlen" if "torch" in request.param else "flash", CPU)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_a_kernel_gives_what_rectangles_give(kernel, window):
    lengths = [3, 9, 1, 4]
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(1, n, sum(lengths), 8, generator=generator, requires_grad=True)
        for n in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weights = torch.randn(1, sum(lengths), HEADS, 8, generator=generator)
    found = []
    for chosen in (kernel, False):
        layout = Layout.of(lengths, CPU, kernel=chosen)
        attended, _ = packed_attention(
            torch.nn.Identity(), *parts, None, scaling=0.3, sliding_window=window, **{ARGUMENT: layout}
        )
        found.append((attended, torch.autograd.grad((attended * weights).sum(), parts)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_a_whole_model_learns_alike_by_a_kernel_and_by_rectangles(kernel):
    net = model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    found = []
    for chosen in (kernel, False):
        policy = PolicyModel(net, chunk=7)
        policy.kernel = chosen
        policy(pack(ROWS + ROWS[1:3]))[0].sum().backward()  # two prompts are shared
        found.append(gradients(net))
        net.zero_grad()
    assert furthest(*found) < 1e-5
    policy.kernel = kernel
    assert kernel.words in policy.words


def test_a_package_that_is_missing_is_told_before_a_run_and_where_there_is_none():
    with pytest.raises(ConfigError, match=r"trainer.attention.*flash_attn_interface is installed"):
        load_config(None, ["trainer.attention=flash"])
    policy = PolicyModel(model(), attention="flash")
    with pytest.raises(ValueError, match=r"trainer.attention=flash: Qwen2.*no FlashAttention:.*module.*'flash_a"):
        policy.settle()


@pytest.mark.parametrize(("attention", "packs"), [("auto", False), ("any", False), ("padded", False), ("packed", None)])
def test_a_kernel_that_refuses_is_passed_over_and_the_reason_kept(monkeypatch, attention, packs):
    def refuses(*_):
        raise TypeError("no such argument")

    monkeypatch.setattr("rlinf.models.language.attention._by_rectangles", refuses)
    policy = PolicyModel(model(), attention=attention)
    if packs is None:
        with pytest.raises(ValueError, match=r"Qwen2Attention:.*such argument. Padded"):
            policy.settle()
        return
    policy.settle()
    assert policy.packs is packs
    assert policy.refused == (() if attention == "padded" else ("Qwen2Attention: no such argument",))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("illegal memory access"),
        RuntimeError("CUDA error: device-side assert"),
    ],
)
def test_memory_that_runs_out_and_faults_of_devices_are_no_refusals(monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr("rlinf.models.language.attention._by_rectangles", fails)
    with pytest.raises(type(error)) as caught:
        PolicyModel(model(), attention="any").settle()
    assert caught.value is error
