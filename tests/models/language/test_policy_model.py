"""Log-probs of packed sequences, for models that can be packed and for those that cannot; and their memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.packing import Row, pack
from rlinf.models.language.attention import ARGUMENT, Layout, packed_attention
from rlinf.models.language.lora import add_adapters, start_adapters, using
from rlinf.models.language.policy_model import PolicyModel, ValueModel, logprobs_of_logits, token_logprobs
from tests.actors.toys import VOCABULARY, furthest, gradients, model

RNG = np.random.default_rng(3)
ROWS = [
    Row(RNG.integers(2, VOCABULARY, prompt), RNG.integers(2, VOCABULARY, answer), None, 0.0, temperature)
    for prompt, answer, temperature in [(2, 3, 1.0), (5, 1, 0.7), (1, 30, 1.0), (3, 0, 1.0), (1, 6, 2.0)]
]


def one_by_one(net):
    """Log-probs, entropies and the log-probs of every token, each sequence alone, by the model's own forward with plain
    attention."""
    net.set_attn_implementation("eager")
    logprobs, entropies, every = [], [], []
    for row in ROWS:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        places = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1)
        spread = torch.log_softmax(net(ids).logits[0, places].float() / row.temperature, dim=-1)
        logprobs.append(spread.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0])
        entropies.append(-(spread.exp() * spread).sum(-1))
        every.append(spread.detach())
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(every)


@pytest.mark.parametrize(
    ("kind", "more", "packs", "plain_head"),
    [
        ("qwen2", {}, True, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, True, True),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}, True, True),
        ("gemma2", {"head_dim": 8}, True, False),  # bounds its scores and its logits
        ("cohere", {}, True, False),  # scales its logits
        ("bloom", {"n_layer": 2, "n_head": 4}, False, True),  # takes no attention but its own
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}, True, True),  # has attention sinks
    ],
)
def test_a_model_is_run_as_far_apart_from_its_own_way_as_gives_the_same(kind, more, packs, plain_head):
    net = model(kind, **more)
    policy = PolicyModel(net, chunk=7)
    policy.settle()
    assert (policy.packs, policy.plain_head) == (packs, plain_head)
    weights = torch.randn(sum(len(row.response_ids) for row in ROWS), generator=torch.Generator().manual_seed(0))
    logprobs, entropy = policy(pack(ROWS))
    (logprobs * weights).sum().backward()
    found = gradients(net)
    net.zero_grad()
    with torch.no_grad():
        tokens, scores = policy(pack(ROWS), likeliest=3)
    expected, spread, every = one_by_one(net)
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, spread, atol=2e-6, rtol=1e-5)
    assert furthest(found, gradients(net)) < 1e-5
    torch.testing.assert_close(scores, every.sort(descending=True).values[:, :3], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(scores, every.gather(1, tokens), atol=2e-6, rtol=1e-5)


def forked(seed, forks):
    """Rows of which each goes on from within an earlier one, at two temperatures."""
    rng, texts = np.random.default_rng(seed), [RNG.integers(2, VOCABULARY, 9)]
    for other, kept, more in forks:
        texts.append(np.concatenate([texts[other % len(texts)][: 2 + kept], rng.integers(2, VOCABULARY, more)]))
    prompts = [int(rng.integers(1, len(text))) for text in texts]
    return [Row(text[:n], text[n:], temperature=1.0 + n % 2) for text, n in zip(texts, prompts, strict=True)]


FORKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(1, 25)), min_size=1, max_size=7)
KINDS = [("qwen2", {}), ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
         ("gemma2", {"head_dim": 8})]  # fmt: skip


@pytest.mark.parametrize(("kind", "more"), KINDS)
@given(seed=st.integers(0, 99), forks=FORKS)
@settings(max_examples=8)
def test_a_tree_has_the_log_probs_and_gradients_of_its_rows(kind, more, seed, forks):
    rows, net = forked(seed, forks), model(kind, **more).double()
    policy, critic = PolicyModel(net, chunk=7), ValueModel(model(kind, **more)).double()
    torch.nn.init.ones_(critic.head.weight)
    for each in (policy, critic):
        found = []
        for shares in (True, False):
            batch = pack(rows, shares=shares)
            outputs = each(batch, entropy_slope=True) if each is policy else each(batch)
            weights = torch.linspace(0.1, 1, len(batch.targets), dtype=torch.float64)
            sum(output.reshape(len(weights), -1).sum(1) @ weights for output in outputs[:2]).backward()
            found.append(([output.detach() for output in outputs[:2]], gradients(each)))
            each.zero_grad()
        # transformers' norms and turns are in float32 whatever comes
        torch.testing.assert_close(*(outputs for outputs, _ in found), atol=1e-6, rtol=1e-6)
        assert furthest(*(gradient for _, gradient in found)) < 1e-6


def test_dropout_is_off():
    policy = PolicyModel(model("qwen2", attention_dropout=0.5), gradient_checkpointing=True)
    one, other = (policy(pack(ROWS))[0] for _ in range(2))
    assert torch.equal(one, other)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
def test_no_token_sees_another_sequence_or_what_comes_after_it(lengths, heads, window):
    total, head = sum(lengths), 4
    generator = torch.Generator().manual_seed(total)
    query, key, value = (torch.randn(1, n, total, head, generator=generator) for n in (heads[0], heads[1], heads[1]))
    layout = Layout.of(lengths, torch.device("cpu"))
    found, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, **{ARGUMENT: layout}
    )
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    apart = torch.arange(total)[:, None] - torch.arange(total)
    visible = (sequence[:, None] == sequence) & (apart >= 0) & (apart < (window or total + 1))
    repeats = heads[0] // heads[1]
    scores = 0.3 * query @ key.repeat_interleave(repeats, 1).transpose(-1, -2)
    attended = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value.repeat_interleave(repeats, 1)
    torch.testing.assert_close(found, attended.transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_attention_that_would_be_wrong_is_refused():
    part = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="does not hand"):
        packed_attention(torch.nn.Identity(), part, part, part, None)
    layout = {ARGUMENT: Layout.of([3], torch.device("cpu"))}
    for odd in ({"position_bias": part}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match="wants"):
            packed_attention(torch.nn.Identity(), part, part, part, None, **odd, **layout)


@given(
    count=st.integers(0, 12),
    chunk=st.integers(1, 15),
    with_bias=st.booleans(),
    with_temperature=st.booleans(),
)
def test_log_probs_in_chunks_have_the_gradient_of_all_at_once(count, chunk, with_bias, with_temperature):
    generator = torch.Generator().manual_seed(count)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).float().requires_grad_()
        for shape in ((count, 5), (11, 5), (11,))
    )
    targets = torch.randint(0, 11, (count,), generator=generator)
    temperature = torch.rand(count, generator=generator) + 0.5 if with_temperature else None
    upstream = torch.randn(count, generator=generator)

    logprobs, entropy = token_logprobs(hidden, weight, bias if with_bias else None, targets, temperature, chunk=chunk)
    found = torch.autograd.grad((logprobs * upstream).sum(), [hidden, weight, *([bias] if with_bias else [])])
    logits = hidden.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    spread = torch.log_softmax(logits if temperature is None else logits / temperature[:, None], dim=-1)
    expected = spread.gather(1, targets[:, None])[:, 0]
    plain = torch.autograd.grad((expected * upstream).sum(), [hidden, weight, *([bias] if with_bias else [])])
    torch.testing.assert_close(logprobs, expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(spread.exp() * spread).sum(-1).float(), atol=1e-5, rtol=1e-5)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@given(
    count=st.integers(0, 5),
    chunk=st.integers(1, 6),
    with_bias=st.booleans(),
    with_temperature=st.booleans(),
    impossible=st.booleans(),
)
@settings(max_examples=15)
def test_log_probs_and_entropies_have_the_slopes_of_their_differences(
    count, chunk, with_bias, with_temperature, impossible
):
    generator = torch.Generator().manual_seed(count)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((count, 3), (7, 3), (7,))
    )
    targets = torch.randint(0, 6, (count,), generator=generator)
    temperature = torch.rand(count, generator=generator, dtype=torch.float64) + 0.5 if with_temperature else None
    never = torch.zeros(7, dtype=torch.float64)
    never[6] = -torch.inf if impossible else 0.0

    def by_chunks(hidden, weight, bias):
        shift = bias + never if with_bias or impossible else None
        return token_logprobs(hidden, weight, shift, targets, temperature, chunk=chunk, entropy_slope=True)

    def by_logits(hidden, weight, bias):
        logits = hidden @ weight.T + (bias + never if with_bias or impossible else 0.0)
        return logprobs_of_logits(logits, targets, temperature, entropy_slope=True)

    assert torch.autograd.gradcheck(by_chunks, (hidden, weight, bias), atol=1e-6)
    assert torch.autograd.gradcheck(by_logits, (hidden, weight, bias), atol=1e-6)
    for one, other in zip(by_chunks(hidden, weight, bias), by_logits(hidden, weight, bias), strict=True):
        torch.testing.assert_close(one, other)


def test_entropies_have_no_slope_unless_asked_for():
    policy = PolicyModel(model())
    assert not policy(pack(ROWS))[1].requires_grad
    assert policy(pack(ROWS), entropy_slope=True)[1].requires_grad


def test_without_its_adapters_a_model_is_what_it_was_and_they_still_learn():
    net = model()
    expected = PolicyModel(net)(pack(ROWS))[0].detach()
    add_adapters(net, {"r": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]})
    for parameter, _ in start_adapters(net, 0):
        torch.nn.init.normal_(parameter)
    policy = PolicyModel(net)
    learning = [parameter.requires_grad for parameter in policy.parameters()]
    with torch.no_grad(), using(policy, None):
        assert torch.equal(policy(pack(ROWS))[0], expected)
    adapted = policy(pack(ROWS))[0]
    assert float((adapted.detach() - expected).abs().max()) > 0.01
    assert [parameter.requires_grad for parameter in policy.parameters()] == learning
    adapted.sum().backward()
    assert all(parameter.grad is not None for name, parameter in policy.named_parameters() if ".lora_" in name)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_no_tensor_is_as_large_as_tokens_times_vocabulary():
    tokens, vocabulary, chunk = 64, 500, 8
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    with Largest() as seen:
        logprobs, _ = token_logprobs(hidden, weight, None, torch.zeros(tokens, dtype=torch.int64), None, chunk=chunk)
        logprobs.sum().backward()
    assert seen.elements == chunk * vocabulary
