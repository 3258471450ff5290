"""Vision-language models packed, beside transformers' own forward of each sequence alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.data.packing import Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec, build_model, build_module, pictures_of
from tests.pictured import MODELS, TOKENIZER, asked, pictures

SIZES = (16, 16), (16, 24), (16, 16)


def policy_of(kind):
    spec = ModelSpec(MODELS[kind], seed=1)
    return build_module(spec, load_tokenizer(TOKENIZER))


def rows_of(kind):
    """Sequences of which two share their prompt, one has two pictures, one has none, and the last asks what the first
    does about another picture of its size."""
    shown = pictures(*SIZES)
    sets = [
        (shown[:1], [3, 4, 5]),
        (shown[:1], [5, 4]),
        (shown[1::-1], [3, 6, 7, 7]),
        ((), [4, 4]),
        (shown[2:], [3, 3]),
    ]
    return [Row(asked(kind, images), np.array(answer), images=images) for images, answer in sets]


def one_by_one(kind, rows):
    """Log-probs of answers by the model's own forward, and its parameters' gradients of their mean."""
    tokenizer = load_tokenizer(TOKENIZER)
    net, shows = build_model(MODELS[kind], tokenizer, seed=1).eval(), pictures_of(MODELS[kind], tokenizer)
    found = []
    for row in rows:
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]))[None]
        types = {"mm_token_type_ids": (ids == shows.placeholder).int()} if kind != "internvl" else {}
        given = {"attention_mask": torch.ones_like(ids), **shows.inputs(row.images), **types}
        logits = net(input_ids=ids, **given).logits[0, len(row.prompt_ids) - 1 : -1]
        logits[:, shows.placeholder] = -torch.inf
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0])
    logprobs = torch.cat(found)
    logprobs.mean().backward()
    return logprobs.detach(), {name: one.grad for name, one in net.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_packed_and_padded_log_probs_and_gradients_are_those_of_the_model_itself(kind):
    rows = rows_of(kind)
    expected, slopes = one_by_one(kind, rows)
    policy, batch = policy_of(kind), pack(rows)
    assert (policy.packs, policy.plain_head, batch.places is not None) == (True, True, True)
    for packs, plain_head in ((False, False), (False, True), (True, True)):
        policy._use(packs=packs, plain_head=plain_head)
        policy.zero_grad()
        logprobs, _ = policy(batch)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    logprobs.mean().backward()
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, slopes[name], atol=1e-6, rtol=0)
    other = pack([Row(rows[0].prompt_ids, rows[0].response_ids, images=rows[4].images)])
    assert (policy(other)[0] - expected[:3]).abs().max() > 1e-3  # it matters which picture it is


@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_without_pictures_runs_what_reads_them(kind):
    rows = rows_of(kind)
    policy = policy_of(kind)
    alone, _ = policy(pack(rows[3:4]))
    policy.keeps_step = True
    for packs in (True, False):
        policy._use(packs=packs, plain_head=True)
        policy.zero_grad()
        logprobs, _ = policy(pack(rows[3:4]))
        torch.testing.assert_close(logprobs, alone, atol=1e-6, rtol=0)
        logprobs.sum().backward()
        tower = [one.grad for name, one in policy.model.named_parameters() if "visual" in name or "vision" in name]
        assert all(grad is not None and not grad.any() for grad in tower)
    logprobs, _ = policy(pack([]))
    assert logprobs.shape == (0,)


def test_a_frozen_tower_learns_nothing_and_the_rest_what_it_would_have():
    kind = "qwen2_5_vl"
    rows = rows_of(kind)
    _, slopes = one_by_one(kind, rows)
    spec = ModelSpec(MODELS[kind], seed=1, freeze=["visual"])
    policy = build_module(spec, load_tokenizer(TOKENIZER))
    policy(pack(rows))[0].mean().backward()
    for name, parameter in policy.model.named_parameters():
        if "visual" in name:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, slopes[name], atol=1e-6, rtol=0)
    for wrong, told in (["tower"], "no module 'tower'"), (["model", "lm_head"], "nothing that learns"):
        with pytest.raises(ValueError, match=told):
            build_module(replace(spec, freeze=wrong), load_tokenizer(TOKENIZER))


def test_an_answer_with_a_placeholder_is_an_error_and_has_no_probability():
    kind = "qwen2_5_vl"
    (row, *_) = rows_of(kind)
    policy = policy_of(kind)
    placeholder = policy.pictures.placeholder
    said = Row(row.prompt_ids, np.array([3, placeholder, 4]), images=row.images)
    with pytest.raises(ValueError, match=r"sequences.*5"):
        policy(pack([said]))
    last = Row(row.prompt_ids, np.array([3, placeholder]), images=row.images)  # predicted, and not read
    assert policy(pack([last]))[0][1] == -torch.inf
