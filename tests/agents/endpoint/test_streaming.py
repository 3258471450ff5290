"""Streams tell words as they come: each is what the whole answer begins with, however it ends."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlinf.agents.endpoint.requests import Applying, ModelRequest, ToolChoice, ask
from rlinf.agents.endpoint.streaming import Detokenizer, Live
from rlinf.agents.tools.formats import FORMATS, call_format
from tests.agents.endpoint.serving import CALL, THINKING, TOOLS, stand

SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def byte_level():
    """Tokens of bytes, some of several characters and some that begin or end within one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, "Ġa", "ab", "Ã¤", "âĤ", "Ĥ¬", "Ġ.", "ðŁ"]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate([*pieces, *SPECIAL])}, []))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=SPECIAL)


def byte_fallback():
    """SentencePiece's kind: words with their space before them, and bytes for what there is no token for."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁the", "ä", "€", "▁▁", "�"]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate([*pieces, *SPECIAL])}, []))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=SPECIAL)


def word_pieces():
    """Spaces before punctuation go when it comes."""
    pieces = ["[UNK]", "a", "##b", ".", ",", "'", "n't", "s", *SPECIAL]
    made = Tokenizer(models.WordPiece({token: number for number, token in enumerate(pieces)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=True)


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, word_pieces)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_pieces_of_any_tokens_are_the_beginning_of_their_whole_text(kind, data):
    tokenizer = TOKENIZERS[kind]
    pieces = data.draw(st.lists(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4), max_size=16))
    words, told, ids = Detokenizer(tokenizer), "", []
    for piece in pieces:
        ids += piece
        told += words.add(piece)
        assert tokenizer.decode(ids, skip_special_tokens=False).startswith(told)


@pytest.mark.parametrize(("kind", "text"), [("byte_level", "a ä € 😀 b"), ("byte_fallback", "a ä € 😀 b")])
def test_a_text_comes_character_by_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    names = tokenizer.get_vocab()
    if kind == "byte_level":
        ids = [id for word in text for id in _bytes(tokenizer, word)]
    else:
        ids = [
            id
            for word in text.replace(" ", "▁")
            for id in ([names[word]] if word in names else [names[f"<0x{byte:02X}>"] for byte in word.encode()])
        ]
    words = Detokenizer(tokenizer)
    pieces = [words.add([id]) for id in ids]
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert max(map(len, pieces)) <= 2  # of bytes, what follows them tells that they are whole


def _bytes(tokenizer, character):
    alphabet = {token: token for token in tokenizer.get_vocab()}
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(character)[0][0]
    return [tokenizer.convert_tokens_to_ids(alphabet[letter]) for letter in shown]


def test_broken_bytes_are_not_looked_at_again_with_every_token():
    class Counting:
        decoded = 0

        def __getattr__(self, name):
            return getattr(TOKENIZERS["byte_level"], name)

        def decode(self, ids, **more):
            self.decoded += len(ids)
            return TOKENIZERS["byte_level"].decode(ids, **more)

    tokenizer = Counting()
    words, broken = Detokenizer(tokenizer), tokenizer.convert_tokens_to_ids("ÿ")
    for _ in range(4000):
        words.add([broken])
    assert tokenizer.decoded < 20 * 4000


PARTS = st.sampled_from([
    "<think>", "</think>", "<thi", "</th", "<tool_call>", CALL, "<tool_", "<function=", "<function=add>\n</function>",
    "[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1}', "<|python_tag|>", '{"name": "add", "parameters": {}}',
    "[add(a=1)]", "[", "{", "STOP", "STO", "S", "#", " ", "\n", "  ", "ab", "a", "b.", "</tool_call>",
])  # fmt: skip


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "deepseek_v3"])
@given(
    st.lists(PARTS, min_size=1, max_size=7),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("STOP",), ("#", "STOP")]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_what_was_told_of_any_answer_is_what_it_begins_with(format, parts, thinks, always, stops, may):
    async def asked():
        async with stand("".join(parts), template=THINKING, arguments={"always": always}) as here:
            here.llm._attempt.calls = call_format(format, here.model.tokenizer)
            request = ModelRequest([{"role": "user", "content": "Hi"}], sampling={"stop": list(stops)} if stops else {})
            request = request if may else replace(request, choice=ToolChoice(may=False))

            async def answering():
                return [await ask(here.llm, request, Applying(), thinks=thinks, live=live)]

            live = Live(answering)
            (result,) = await live.task
            pieces = [*live.take(), *live.rest()]
            for kind, whole in (("reasoning", result.reasoning or ""), ("text", result.text)):
                assert "".join(piece.text for piece in pieces if piece.kind == kind) == whole
            told = dict.fromkeys(piece.call.id for piece in pieces if piece.kind == "call")
            written = {id: "".join(piece.text for piece in pieces if piece.call and piece.call.id == id) for id in told}
            assert written == {call.id: call.written for call in result.live_calls}
            half = {call.id for call in result.half_calls}
            assert {call.id: call.arguments for call in result.calls if call.id in told} == {
                id: json.loads(text) for id, text in written.items() if id not in half
            }

    asyncio.run(asked())


PATHS = {
    "/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/completions": {"prompt": "Hi"},
    "/responses": {"input": "Hi"},
    "/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100},
}


def words_of(event):
    """The words in an event of any of the protocols."""
    if "choices" in event:
        return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in event["choices"])
    delta = event.get("delta") or ""
    return delta if isinstance(delta, str) else delta.get("text", "")


async def events(response):
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


@pytest.mark.parametrize("path", PATHS)
async def test_words_come_before_the_answer_has_ended(path):
    half = asyncio.Event()
    async with stand("one two three", half=half) as here, aiohttp.ClientSession() as client:
        asked = {"model": "policy", "stream": True, **PATHS[path]}
        async with client.post(
            here.url + path, json=asked, headers={"Authorization": f"Bearer {here.key}"}
        ) as response:
            told = ""
            async for event in events(response):
                told += words_of(event)
                if told and not half.is_set():
                    assert "one two three".startswith(told)
                    assert told != "one two three"
                    half.set()
        assert told == "one two three"
        text = here.endpoint.metrics.text(0, 0)
        assert f'first_words_seconds_count{{route="/v1{path}"}} 1' in text


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_in_the_middle_ends_the_answer_and_the_record_has_it(path):
    async with stand("one two three", half=asyncio.Event()) as here, aiohttp.ClientSession() as client:
        asked = {"model": "policy", "stream": True, **PATHS[path]}
        async with client.post(
            here.url + path, json=asked, headers={"Authorization": f"Bearer {here.key}"}
        ) as response:
            async for event in events(response):
                if words_of(event):
                    break
            response.close()
        while not here.model.cancelled or here.endpoint.metrics.in_flight:
            await asyncio.sleep(0)
        assert here.endpoint.metrics.requests[f"/v1{path}", 499] == 1
        counts = here.llm.counts()
        assert (counts.calls, counts.given_up) == (0, 1)


async def test_a_stop_text_is_never_told_in_part_and_a_call_never_as_text():
    texts = ("say STOP", f"let me see {CALL}")
    async with stand(*texts, template=TOOLS) as here, aiohttp.ClientSession() as client:
        for stop in (["STOP"], []):
            asked = {"model": "policy", "stream": True, **PATHS["/chat/completions"], "stop": stop}
            headers = {"Authorization": f"Bearer {here.key}"}
            async with client.post(f"{here.url}/chat/completions", json=asked, headers=headers) as response:
                told = [event async for event in events(response)]
            words = [words_of(event) for event in told]
            assert "".join(words) == ("say " if stop else "let me see")
            assert max(map(len, words)) <= 2  # a token at a time
            calls = [call for event in told for call in event["choices"][0]["delta"].get("tool_calls") or ()]
            assert [call["function"]["name"] for call in calls if "id" in call] == ["add"] * (not stop)


async def test_what_is_recorded_is_what_was_sampled_streamed_or_not():
    async def recorded(stream):
        async with stand("one ab two aab") as here, aiohttp.ClientSession() as client:
            asked = {"model": "policy", "stream": stream, **PATHS["/chat/completions"]}
            headers = {"Authorization": f"Bearer {here.key}"}
            async with client.post(f"{here.url}/chat/completions", json=asked, headers=headers) as response:
                await response.read()
            (turn,) = here.llm.trajectories.turns
            assert turn.answer.token_ids.tolist() == here.model.calls[0][1].tolist()
            return turn.new_ids.tolist(), turn.answer.token_ids.tolist(), turn.answer.logprobs.tolist()

    assert await recorded(True) == await recorded(False)
