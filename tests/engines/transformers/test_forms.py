"""Answers of a form: every complete one is valid, and its log-probs are those over the tokens that the form allowed."""

import asyncio
import json
import string

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import schemas
from rlinf.data.tokenizer import character_tokenizer
from rlinf.engines.base import Request, RequestRefused, Sampling
from rlinf.engines.grammars import Form
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.sampling import DRAWS, Allowed, Rules, choose, choose_allowed
from tests.engines.transformers.rehearsed import REHEARSED

pytest.importorskip("llguidance")
TOKENIZER = character_tokenizer(string.printable)
END = TOKENIZER.eos_token_id
FLAT = {"type": "object", "properties": {"b": {"type": "boolean"}, "n": {"enum": [1, "x", None]}}}
SCHEMA = {**FLAT, "required": ["b", "n"], "additionalProperties": False}


def engine(graphs="auto", *, scale=4.0, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return TransformersEngine(model, tokenizer=TOKENIZER, graphs=graphs, **settings)


def request(number, form="", most=400, **more):
    prompt = np.array(TOKENIZER.encode(f"text {number}"), np.int64)
    return Request(number, prompt, Sampling(most, stop_ids=(END,), form=form, **more), seed=number)


async def answers(of, requests):
    return {completion.id: completion async for completion in of.generate(requests)}


def text(completion):
    ids = completion.response_ids
    return TOKENIZER.decode(ids[:-1] if completion.finish == "stop" else ids)


@pytest.mark.parametrize("graphs", ["auto", REHEARSED])
def test_answers_of_a_form_are_valid_and_others_are_as_without_them(graphs):
    form = Form(json.dumps(SCHEMA)).text
    forms = [request(number, form if number % 2 else "", 60 if number % 2 == 0 else 400) for number in range(8)]
    plain = [request(number, "", 60) for number in range(0, 8, 2)]
    mixed = asyncio.run(answers(engine(graphs, max_rows=3), forms))
    alone = asyncio.run(answers(engine(graphs, max_rows=3), plain))
    for number, completion in mixed.items():
        if number % 2:
            assert completion.finish == "stop"
            jsonschema.validate(json.loads(text(completion)), SCHEMA)
            assert len(completion.log_mass) == len(completion.response_ids)
            assert (completion.log_mass <= 0).all()
        else:
            assert completion.log_mass is None
            np.testing.assert_array_equal(completion.response_ids, alone[number].response_ids)
            np.testing.assert_allclose(completion.logprobs, alone[number].logprobs, atol=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.9}])
def test_log_probs_and_masses_add_up_to_those_of_the_model(sampling):
    of = engine()
    asked = [request(number, Form(json.dumps(SCHEMA)).text, **sampling) for number in range(4)]
    for number, completion in asyncio.run(answers(of, asked)).items():
        ids = np.concatenate([asked[number].prompt_ids, completion.response_ids])
        with torch.no_grad():
            logits = of._forward._model(input_ids=torch.from_numpy(ids)[None]).logits[
                0, -len(completion.response_ids) - 1 : -1
            ]
        whole = (logits / (sampling.get("temperature", 1.0) or 1.0)).log_softmax(-1).numpy()
        drawn = np.take_along_axis(whole, completion.response_ids[:, None], 1)[:, 0]
        np.testing.assert_allclose(completion.logprobs + completion.log_mass, drawn, atol=2e-4)
        assert completion.log_mass.min() < -0.1  # the form took something away


@pytest.mark.parametrize("graphs", ["auto", REHEARSED])
def test_an_answer_that_another_engine_began_goes_on_in_its_form(graphs):
    asked = [request(number, Form(json.dumps(SCHEMA)).text) for number in range(3)]

    async def moved():
        first, second = engine(graphs), engine(graphs)
        going = asyncio.create_task(answers(first, asked))
        while not any(one.partial for one in await first.partial(range(3))):
            await asyncio.sleep(0)
        taken = await first.take_out(range(3))
        done = {**await going, **await answers(second, taken)}
        return done, taken

    done, taken = asyncio.run(moved())
    assert any(one.answered for one in taken)
    whole = asyncio.run(answers(engine(graphs), asked))
    for number, completion in done.items():
        np.testing.assert_array_equal(completion.response_ids, whole[number].response_ids)
        np.testing.assert_allclose(completion.log_mass, whole[number].log_mass, atol=1e-5)


def test_a_cut_answer_says_so_and_one_whose_tokens_cannot_spell_the_form_is_ended():
    short, strange = request(0, Form(json.dumps(SCHEMA)).text, 3), request(1, Form('{"const": "é"}').text)
    done = asyncio.run(answers(engine(), [short, strange]))
    assert [done[0].finish, done[1].finish] == ["length", "abort"]


@pytest.mark.parametrize(
    ("schema", "keyword"), [({"not": {}}, "not"), ({"type": "array", "uniqueItems": True}, "uniqueItems")]
)
def test_what_cannot_be_enforced_is_refused_by_its_keyword(schema, keyword):
    async def asked():
        await engine().answer(request(0, Form(json.dumps(schema)).text))

    with pytest.raises(RequestRefused, match=keyword):
        asyncio.run(asked())


@given(st.data())
@settings(max_examples=60)
def test_drawing_among_allowed_tokens_is_drawing_from_a_model_that_has_no_others(data):
    rows, vocabulary = 4, 9
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    logits = torch.randn(rows, vocabulary, generator=generator) * data.draw(st.sampled_from([1.0, 60.0]))
    tokens = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=2, max_size=2)))
    tokens[:, data.draw(st.integers(0, 8))] = True
    some = np.array(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True)))
    drawn = np.array([(n, t, k, 0.9, 0.0) for n, (t, k) in enumerate([(1, 0), (0.5, 2), (0, 0), (2, 0)])], DRAWS)
    rules, first = Rules.of(drawn, torch.device("cpu")), torch.zeros(rows, dtype=torch.int64)
    allowed = Allowed.of(some, tokens, torch.device("cpu"))
    ids, logprobs, log_mass = choose_allowed(logits.clone(), rules, first, allowed)
    free, whole = choose(logits, rules, first)
    for row in range(rows):
        if row not in some:
            assert (ids[row], logprobs[row], log_mass[row]) == (free[row], whole[row], 0)
            continue
        mine = tokens[list(some).index(row)]
        assert mine[ids[row]]
        scaled = logits[row].double() / (drawn["temperature"][row] or 1.0)
        inside = scaled.masked_fill(torch.from_numpy(~mine), -torch.inf).log_softmax(0)[ids[row]]
        assert logprobs[row] == pytest.approx(float(inside), abs=1e-4)
        assert logprobs[row] + log_mass[row] == pytest.approx(float(scaled.log_softmax(0)[ids[row]]), abs=1e-3)


def test_every_complete_answer_of_fifty_random_schemas_is_valid():
    tokenizer = character_tokenizer(string.printable + "éößα")
    tally = schemas.valid(schemas.of_random_weights(tokenizer, len(tokenizer)), tokenizer, 50, 300)
    assert tally["valid"] >= 35, tally
    assert set(tally) <= {"valid", "not complete: length"}, tally


@pytest.fixture(scope="module")
def shared():
    return engine(max_rows=3)


@given(st.lists(st.tuples(st.sampled_from(["", "flat", "call", "list"]), st.integers(1, 60)), min_size=1, max_size=6))
@settings(max_examples=12, deadline=None)
def test_whoever_joins_and_leaves_each_row_keeps_to_its_own_form(shared, asked):
    forms = {
        "": "",
        "flat": Form(json.dumps(SCHEMA)).text,
        "call": Form(json.dumps(SCHEMA), "<call>", "</call>", "\n").text,
        "list": Form(json.dumps({"type": "array", "items": SCHEMA, "maxItems": 2})).text,
    }
    requests = [request(number, forms[form], most) for number, (form, most) in enumerate(asked)]
    together = asyncio.run(answers(shared, requests))
    for number, one in enumerate(requests):
        (alone,) = asyncio.run(answers(shared, [one])).values()
        done = together[number]
        np.testing.assert_array_equal(done.response_ids, alone.response_ids)
        assert done.finish == alone.finish
        assert (done.log_mass is None) == (asked[number][0] == "")
        if asked[number][0] == "flat" and done.finish == "stop":
            jsonschema.validate(json.loads(text(done)), SCHEMA)
    assert shared._batch._slots.constraints == {}  # nothing is held when nothing is asked
