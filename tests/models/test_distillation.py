"""A student's divergence from a teacher's distributions, chunk by chunk, against plain forwards of both models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.algos.algorithms import Divergence
from rlinf.data.packing import Row, pack
from rlinf.models.distillation import HIDDEN, TOP, TeacherHead
from rlinf.models.language.build import output_embedding
from rlinf.models.language.policy_model import PolicyModel
from tests.actors.toys import VOCABULARY, furthest, gradients, model
from tests.algos.test_divergences import by_formula

RNG = np.random.default_rng(5)
ROWS = [
    Row(RNG.integers(2, VOCABULARY, prompt), RNG.integers(2, VOCABULARY, answer), None, 0.0, temperature)
    for prompt, answer, temperature in [(2, 3, 1.0), (5, 1, 0.7), (1, 20, 1.0), (1, 6, 2.0)]
]
TEACHER = {"hidden_size": 48, "intermediate_size": 64, "seed": 7}


def plain(net, rows=ROWS):
    """Log-probs of the whole vocabulary at each token, each sequence alone."""
    net.set_attn_implementation("eager")
    whole = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        places = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1)
        whole.append((net(ids).logits[0, places].float() / row.temperature).log_softmax(-1))
    return torch.cat(whole)


def with_column(name, column, rows=ROWS):
    """The rows with what the teacher said."""
    ends = np.cumsum([row.learned for row in rows])[:-1]
    parts = np.split(column.numpy(), ends)
    return [
        Row(row.prompt_ids, row.response_ids, None, 0.0, row.temperature, {name: part})
        for row, part in zip(rows, parts, strict=True)
    ]


def student_side(net, part, column, heads=(), chunk=4):
    policy = PolicyModel(net, chunk=chunk)
    policy.settle()
    policy.teacher = TeacherHead(part, chunk, heads)
    *_, divergences = policy(pack(with_column(policy.teacher.column, column)))
    return divergences


@pytest.fixture
def teacher():
    net = PolicyModel(model("llama", tie_word_embeddings=False, **TEACHER), chunk=4)
    net.settle()
    return net


@pytest.mark.parametrize(
    ("kind", "student"), [("reverse", "qwen2"), ("forward", "qwen2"), ("jsd", "qwen2"), ("reverse", "gemma2")]
)
def test_over_the_whole_vocabulary_value_and_gradients_are_those_of_plain_forwards(teacher, kind, student):
    net = model(student, **({"head_dim": 8} if student == "gemma2" else {}))
    with torch.no_grad():
        logprobs, hidden = teacher.distributions(pack(ROWS), None)
        said = plain(teacher.model)
    ids = torch.from_numpy(np.concatenate([row.response_ids for row in ROWS]))[:, None]
    torch.testing.assert_close(logprobs, said.gather(1, ids).squeeze(1), atol=2e-6, rtol=1e-5)
    column = torch.nn.functional.pad(hidden, (1, 3))  # as beside a wider teacher
    head = (teacher.model.get_output_embeddings().weight.detach(), None)
    found = student_side(net, Divergence(kind, 0.3), column, [head])
    weights = torch.arange(1.0, len(found) + 1)
    (found * weights).sum().backward()
    ours = gradients(net)
    net.zero_grad()
    expected = by_formula(said, plain(net), kind, 0.3)
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-4)
    assert furthest(ours, gradients(net)) < 2e-5


def test_over_all_tokens_as_the_likeliest_it_is_the_same(teacher):
    net = model()
    with torch.no_grad():
        _, top = teacher.distributions(pack(ROWS), VOCABULARY)
        said = plain(teacher.model)
    found = student_side(net, Divergence("jsd", 0.3, VOCABULARY), top)
    torch.testing.assert_close(found, by_formula(said, plain(net), "jsd", 0.3), atol=5e-6, rtol=1e-4)


def test_each_token_is_held_against_the_teacher_that_was_asked():
    net, teachers = model(), [model("llama", seed=seed, tie_word_embeddings=False) for seed in (3, 4)]
    columns, said = [], []
    for number, each in enumerate(teachers):
        policy = PolicyModel(each, chunk=4)
        policy.settle()
        with torch.no_grad():
            columns.append(torch.nn.functional.pad(policy.distributions(pack(ROWS), None)[1], (1, 0), value=number))
            said.append(plain(each))
    second = (torch.arange(len(said[0])) % 3 == 0)[:, None]
    heads = [(each.get_output_embeddings().weight.detach(), None) for each in teachers]
    found = student_side(net, Divergence("reverse"), torch.where(second, columns[1], columns[0]), heads)
    expected = by_formula(torch.where(second, said[1], said[0]), plain(net), "reverse", 0.5)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-4)


def test_no_more_than_a_chunk_of_either_distribution_exists(monkeypatch, teacher):
    seen = []
    first = torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda x, dim: seen.append(len(x)) or first(x, dim))
    with torch.no_grad():
        _, top = teacher.distributions(pack(ROWS), 3)
    student_side(model(), Divergence("reverse", top_k=3), top).sum().backward()
    assert max(seen) == 4
    assert len(seen) == 2 * -(-len(top) // 4)  # again for the gradient


def test_a_batch_without_the_column_is_scored_as_ever(teacher):
    policy = PolicyModel(model(), chunk=4)
    policy.teacher = TeacherHead(Divergence(top_k=2), 4)
    assert policy.teacher.column == TOP
    assert TeacherHead(Divergence(), 4).column == HIDDEN
    assert len(policy(pack(ROWS))) == 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_models_output_embedding_is_read_without_the_rest(tmp_path, tied):
    net = model("qwen2", tie_word_embeddings=tied)
    net.save_pretrained(tmp_path)
    weight, bias = output_embedding(str(tmp_path))
    assert torch.equal(weight, net.get_output_embeddings().weight)
    assert bias is None


def test_a_model_that_bounds_its_logits_has_no_such_embedding(tmp_path):
    model("gemma2", head_dim=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="top_k"):
        output_embedding(str(tmp_path))
