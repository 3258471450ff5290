"""Which experts the engine's tokens went to: as the model chooses them when it reads the whole text."""

import numpy as np
import pytest
import torch

from rlinf.agents.episodes import KINDS
from rlinf.data.in_flight.admission import Kept
from rlinf.data.in_flight.snapshot import read_kept, write_kept
from rlinf.data.ledger import Entry
from rlinf.data.sample import Prompt
from rlinf.engines.base import PartialGroup, Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine
from tests.engines.transformers.test_engine import answers, packed, ragged, request, tiny

EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def mixture(kind="qwen3_moe", seed=0, **more):
    return tiny(kind, seed, **{**EXPERTS[kind], **more})


@torch.no_grad()
def chosen(model, tokens):
    """Sets of experts by the model's own logits, [tokens, layers, experts per token], sorted."""
    logits = model(torch.tensor(tokens)[None], output_router_logits=True).router_logits
    top = model.config.num_experts_per_tok
    return np.stack([layer.topk(top, dim=-1).indices.sort(-1).values.numpy() for layer in logits], axis=1)


def check(model, asked, done, begin=0):
    text = [*asked.prompt_ids.tolist(), *done.response_ids.tolist()]
    assert done.routes.dtype == np.uint8
    found = np.sort(done.routes, -1)
    np.testing.assert_array_equal(found[begin:], chosen(model, text[:-1])[begin:])


@pytest.mark.parametrize("kind", EXPERTS)
async def test_every_token_that_is_read_tells_where_it_went(kind):
    engine, model = TransformersEngine(mixture(kind), max_rows=5, routes=True), mixture(kind)
    assert engine.routes
    asked = ragged(12, Sampling(9, stop_ids=(0, 1, 2)))
    done = await answers(engine, [*asked, request(12, asked[0].prompt_ids, Sampling(9))])  # one prompt twice
    for one in asked:
        check(model, one, done[one.id])
    assert len({len(one.response_ids) for one in done.values()}) > 2


async def test_nothing_is_told_unless_it_is_asked_for_or_of_a_model_without_experts():
    for engine in (TransformersEngine(mixture()), TransformersEngine(tiny(), routes=True)):
        done = await answers(engine, ragged(1, Sampling(3)))
        assert (engine.routes, done[0].routes) == (False, None)


async def test_an_answer_that_another_engine_continues_keeps_the_experts_of_its_beginning(tmp_path):
    asked = Request(3, np.arange(1, 6), Sampling(8, 0.0))
    first = TransformersEngine(mixture(), routes=True)
    stream = first.generate([asked, Request(4, np.arange(2, 5), Sampling(2, 0.0))])
    assert (await anext(stream)).id == 4
    (begun,) = await first.take_out([3])
    await stream.aclose()
    count = begun.answered
    assert len(begun.partial.routes) == 5 + count - 1
    group = PartialGroup(Prompt(0, asked.prompt_ids), left={0: begun})
    write_kept(tmp_path, Kept(0, (Entry(0, group.prompt, 1, 0, partial=(group,)),)), KINDS)
    (kept,) = read_kept(tmp_path, KINDS).entries[0].partial
    other = mixture(seed=1)
    done = await TransformersEngine(mixture(seed=1), routes=True).answer(kept.left[0])
    np.testing.assert_array_equal(done.routes[: 5 + count - 1], begun.partial.routes)
    assert len(done.routes) == 5 + len(done.response_ids) - 1
    text = [*asked.prompt_ids.tolist(), *done.response_ids.tolist()]
    theirs = chosen(other, text[:-1])
    assert (np.sort(begun.partial.routes, -1) != theirs[: 5 + count - 1]).any()  # or it would show nothing
    np.testing.assert_array_equal(np.sort(done.routes, -1)[5 + count - 1 :], theirs[5 + count - 1 :])


async def test_new_weights_choose_for_the_tokens_they_make_and_for_no_other():
    engine, asked = TransformersEngine(mixture(), routes=True, reread=True), Request(0, np.arange(1, 6), Sampling(40))
    stream = engine.generate([asked, Request(1, np.arange(2, 5), Sampling(2, 0.0))])
    await anext(stream)
    (begun,) = await engine.partial([0])
    await engine.load(packed(mixture(seed=1), version=1))
    done = await anext(stream)
    before = len(begun.partial.routes)
    np.testing.assert_array_equal(done.routes[:before], begun.partial.routes)
    assert set(done.versions) == {0, 1}
    text = [*asked.prompt_ids.tolist(), *done.response_ids.tolist()]
    old = 5 + int((done.versions == 0).sum()) - 1
    np.testing.assert_array_equal(np.sort(done.routes, -1)[old:], chosen(mixture(seed=1), text[:-1])[old:])


async def test_a_turn_whose_past_is_kept_leaves_the_past_to_the_turn_before():
    engine, model = TransformersEngine(mixture(), routes=True), mixture()
    assert engine.keeps_conversations
    first = Request(0, np.arange(1, 7), Sampling(4, 0.0), conversation=1)
    done = await engine.answer(first)
    check(model, first, done)
    text = np.array([*first.prompt_ids, *done.response_ids, 7, 8])
    second = Request(1, text, Sampling(4, 0.0), conversation=1)
    again = await engine.answer(second)
    read = len(first.prompt_ids) + len(done.response_ids) - 1
    assert (again.routes[:read] == 255).all()
    check(model, second, again, begin=read)
