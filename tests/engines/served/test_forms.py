"""Forms of answers on their way to servers: in the servers' own fields, and begun anew after an interruption."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlinf.data.tokenizer import character_tokenizer
from rlinf.engines.base import EngineSetup, PartialAnswer, Request, Sampling, no_forms
from rlinf.engines.grammars import Form, specials_of
from rlinf.engines.served.engine import Row
from rlinf.engines.served.server import Chunk
from rlinf.engines.served.sglang import SGLangServer, SGLangSettings
from rlinf.engines.served.vllm import VllmServer

SPECIALS = specials_of(character_tokenizer("abc"))
FORM = Form('{"type": "integer"}', "<eos>[", "]")


def row(form=FORM.text, partial=None):
    return Row(Request(1, np.arange(3), Sampling(9, stop_ids=(1,), form=form), 5, partial), None, specials=SPECIALS)


async def sent_to(server, ask):
    sent = []

    async def events(path, body):
        sent.append(body)
        yield {
            "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 3]]},
            "ids": [3],
            "logprobs": [-1.0],
        }

    assert [chunk.tokens async for chunk in server.generate(SimpleNamespace(events=events), ask)] == [[3]]
    return sent[0]


@pytest.mark.parametrize("form", ["", FORM.text])
async def test_servers_get_our_own_grammar_in_their_own_field(form):
    grammar = FORM.grammar(SPECIALS) if form else None
    sglang = SGLangServer(SGLangSettings(schemas=True), EngineSetup("", {}, None), "-", ("cpu", 0))
    assert (await sent_to(sglang, row(form).ask("a")))["sampling_params"].get("ebnf") == grammar
    vllm = VllmServer("-", {}, 1.0, forms=True)
    assert (await sent_to(vllm, row(form).ask("a")))["grammar"] == grammar


@pytest.mark.parametrize("schemas", [False, True])
def test_a_server_reads_text_only_where_schemas_are_wanted(schemas):
    setup = EngineSetup("", {}, None)
    words = SGLangServer(SGLangSettings(schemas=schemas), setup, "-", ("cpu", 0)).command("m", "h", 1)
    assert ("--skip-tokenizer-init" in words) != schemas
    assert words[words.index("--grammar-backend") + 1] == ("llguidance" if schemas else "none")
    assert ("--forms" in VllmServer("-", {}, 1.0, forms=schemas).command("m", "h", 1)) == schemas
    for engine in ("sglang", "vllm"):
        assert ("rollout.engine_args.schemas" in str(no_forms(engine, {"schemas": schemas}))) != schemas


def test_an_interrupted_answer_of_a_form_begins_anew_and_its_mass_is_unknown():
    begun = PartialAnswer(np.array([4, 5]), np.zeros(2, np.float32), np.zeros(2, np.int32))
    one = row(partial=begun)
    ask = one.ask("a")
    assert (list(ask.ids), ask.answered, ask.sampling.max_new_tokens) == ([0, 1, 2], 0, 9)
    one.take(Chunk([7, 1], [-1.0, -2.0]), 3)
    assert one.completion.response_ids.tolist() == [7, 1]
    assert np.isposinf(one.completion.log_mass).all()
    assert row("").ask("a").grammar is None
    kept = row("", begun)
    assert list(kept.ask("a").ids) == [0, 1, 2, 4, 5]
    kept.take(Chunk([1], [-1.0]), 3)
    assert kept.completion.log_mass is None


def test_the_grammar_is_one_that_the_servers_library_knows_for_its_own():
    lark = pytest.importorskip("llguidance.gbnf_to_lark")
    for form in (FORM, Form("{}", thought="may"), Form("{}", "<tool_call>\n", "\n</tool_call>", "\n", free=True)):
        assert lark.any_to_lark(form.grammar({})) == form.grammar({})
