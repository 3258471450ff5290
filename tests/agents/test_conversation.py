"""Conversations: their tokens are those of the chat template, and what was generated is never encoded again."""

from __future__ import annotations

import asyncio
import gc
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.agents.chat import ChatFormat
from rlinf.agents.conversation import Conversation
from rlinf.agents.llm import Setting
from rlinf.data.rng import mix
from rlinf.data.sample import REWARDS, Prompt
from rlinf.runtime.base.errors import UserError
from tests.agents.speaking import STYLES, Speaker, Style, tokenizer_of

PLAIN = Style(None, "</s>")
TEXTS = st.text("ab x\n", min_size=1, max_size=6).map(lambda text: f"a{text}b")


def talk(style=PLAIN, says=(), *, longest=None, **more):
    tokenizer = tokenizer_of(style)
    speaker = Speaker([(encode(tokenizer, said), finish) for said, finish in says])
    setting = Setting(speaker, temperature=1.0, max_new_tokens=16, longest=longest, vocabulary=len(tokenizer))
    return Conversation(setting, ChatFormat(tokenizer), (7,), 3, **more), speaker, tokenizer


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_message_that_was_changed_after_the_model_had_read_it_is_an_error():
    conversation, _, _ = talk(says=[("a", "length"), ("b", "stop")])
    conversation.user([{"type": "text", "text": "ab"}] if conversation.chat.has_template else "ab")
    run(conversation.generate())
    conversation.messages[0]["content"] = "aa"
    with pytest.raises(UserError, match=r"messages\[0\]"):
        run(conversation.generate())


def test_what_is_written_into_a_fork_or_an_answer_reaches_nobody_else():
    conversation, speaker, tokenizer = talk(says=[("ab", "stop"), ("ba", "stop")])
    reply = run(conversation.user("ab").generate())
    conversation.user("aa")
    fork = conversation.fork()
    for messages in (fork.messages, fork.user("x").messages):
        messages[-1]["content"] = "bb"
    with pytest.raises(ValueError, match="read-only"):
        reply.ids[:] = 7
    run(conversation.generate())
    assert speaker.heard[-1][0].tolist() == encode(tokenizer, "ab") + encode(tokenizer, "ab") + encode(tokenizer, "aa")
    with pytest.raises(ValueError, match="read-only"):
        conversation.trajectory(1.0).response_ids[:] = 7


@st.composite
def scripts(draw):
    """A style, an opening, and turns: what is said, the answer, how it ends, its reward."""
    style = STYLES[draw(st.sampled_from(sorted(STYLES)))]
    roles = st.just("user") if style.alternates else st.sampled_from(["user", "tool"])
    said = st.lists(st.tuples(roles, TEXTS), min_size=1, max_size=1 if style.alternates else 3)
    turn = st.tuples(said, TEXTS, st.sampled_from(["stop", "stop", "length"]), st.none() | st.floats(-2, 2, width=16))
    system = None if style.alternates else draw(st.none() | TEXTS)
    return style, system, draw(st.lists(turn, min_size=1, max_size=4))


@settings(max_examples=150)
@given(scripts())
def test_the_tokens_are_the_templates_rendering_of_all_that_was_said(script):
    style, system, turns = script
    says = [(style.before + answer + (style.end if end == "stop" else ""), end) for _, answer, end, _ in turns]
    conversation, speaker, tokenizer = talk(style, says)
    generated = [encode(tokenizer, said) for said, _ in says]

    async def whole():
        told = []
        if system is not None:
            conversation.system(system)
            told.append({"role": "system", "content": system})
        for said, answer, end, reward in turns:
            for role, text in said:
                conversation.append(text, role=role)
                told.append({"role": role, "content": text})
            reply = await conversation.generate()
            assert reply.finish == end
            if reward is not None:
                conversation.reward(reward)
            rendered = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
            assert speaker.heard[-1][0].tolist() == encode(tokenizer, rendered)
            told.append({"role": "assistant", "content": answer})
        return conversation.trajectory()

    sample = run(whole())
    assert sample.response_ids[sample.loss_mask].tolist() == [token for said in generated for token in said]
    assert sample.logprobs[sample.loss_mask].tolist() == [-float(n) for n in range(speaker.spoken)]
    assert sample.versions[sample.loss_mask].tolist() == [10 * n for n in range(speaker.spoken)]
    heard = speaker.heard[-1][0].tolist() + generated[-1]
    assert sample.prompt.token_ids.tolist() + sample.response_ids.tolist() == heard
    rewards = [reward for *_, reward in turns]
    if all(reward is None for reward in rewards):
        assert sample.reward is None
        assert sample.per_token == {}
        return
    assert sample.reward == pytest.approx(sum(reward or 0 for reward in rewards))
    ends = np.cumsum([len(each) for each in generated]) - 1
    fallen = sample.per_token[REWARDS][sample.loss_mask]
    assert fallen[ends].tolist() == [reward or 0 for reward in rewards]
    assert np.count_nonzero(fallen) == sum(bool(reward) for reward in rewards)


def test_without_a_template_texts_stand_one_behind_the_other():
    async def whole():
        conversation, speaker, tokenizer = talk(says=[("no</s>", "stop"), ("ok", "length")])
        await conversation.system("ab").user("x").generate()
        await conversation.user("a").user("b").generate()
        assert [tokenizer.decode(ids) for ids, *_ in speaker.heard] == ["abx", "abxno</s>ab"]
        return conversation.trajectory(reward=1.0)

    sample = run(whole())
    assert (sample.text, sample.truncated, sample.reward) == ("no</s>abok", True, 1.0)


def test_token_ids_stand_as_they_are():
    async def whole():
        conversation, speaker, tokenizer = talk(STYLES["chatml"], [("a<|im_end|>", "stop"), ("b", "length")])
        raw = encode(tokenizer, "<|im_start|>user\nab")
        await conversation.append(np.array(raw)).generate()
        assert speaker.heard[0][0].tolist() == raw
        await conversation.append(encode(tokenizer, "xx"), role="tool").user("b").generate()
        said = tokenizer.decode(speaker.heard[1][0])
        assert (
            said
            == "<|im_start|>user\naba<|im_end|>xx<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        )

    run(whole())


def test_an_answer_that_a_limit_cut_can_be_gone_on_with():
    async def whole():
        conversation, speaker, tokenizer = talk(
            STYLES["llama"], [("ab", "length"), ("ba<|eot|>", "stop"), ("x", "text")]
        )
        await conversation.user("x").generate()
        await conversation.generate()
        assert speaker.heard[1][0].tolist() == [*speaker.heard[0][0], *encode(tokenizer, "ab")]
        assert conversation.messages[-1] == {"role": "assistant", "content": "abba"}
        await conversation.user("b").generate()
        told = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "abba"},
            {"role": "user", "content": "b"},
        ]
        rendered = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(speaker.heard[2][0]) == rendered

    run(whole())


def test_earlier_messages_may_be_of_any_role():
    async def whole():
        conversation, speaker, tokenizer = talk(STYLES["gemma"], [("b<end>", "stop")])
        conversation.begin([{"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"}])
        await conversation.generate()  # goes on with what it is made to begin with
        assert tokenizer.decode(speaker.heard[0][0]) == "<s><turn>user\nx<end>\n<turn>model\nab"
        assert conversation.messages[-1]["content"] == "abb"

    run(whole())


def test_a_fork_goes_on_alone_with_randomness_of_its_own():
    async def whole():
        conversation, speaker, _ = talk(says=[("a", "length"), ("b", "length"), ("x", "length")])
        await conversation.user("q").generate()
        conversation.reward(1.0)
        fork = conversation.fork()
        fork.number = 4
        await fork.user("f").generate()
        fork.reward(2.0)
        await conversation.user("f").generate()
        (_, first, _, _), (_, forked, _, _), (_, second, _, _) = speaker.heard
        assert len({first, forked, second}) == 3
        assert (first, second) == (mix(7, 0), mix(7, 1))
        one, other = conversation.trajectory(), fork.trajectory()
        assert (one.text, other.text) == ("afx", "afb")
        assert (one.reward, other.reward) == (1.0, 3.0)
        assert one.prompt.token_ids.tolist() == other.prompt.token_ids.tolist()

    run(whole())


def test_the_reward_of_the_whole_may_be_more_than_that_of_its_turns():
    async def whole():
        conversation, _, _ = talk(
            says=[("ab</s>", "stop"), ("b</s>", "stop")], prompt=Prompt(9, np.empty(0, np.int64), answer="y")
        )
        await conversation.user("q").generate()
        conversation.reward(0.5)
        conversation.reward(torch.tensor(0.25))
        await conversation.user("q").generate()
        return conversation.trajectory(reward=2.0)

    sample = run(whole())
    assert (sample.reward, sample.prompt.id, sample.prompt.answer) == (2.0, 9, "y")
    assert sample.per_token[REWARDS].tolist() == [0.0, 0.75, 0.0, 0.0, 0.0]


def test_what_was_said_after_the_last_answer_is_left_out():
    async def whole():
        conversation, speaker, _ = talk(says=[("ab</s>", "stop")])
        await conversation.user("q").generate()
        sample = conversation.user("over").trajectory(reward=0)
        assert speaker.over == [3]
        return sample

    assert run(whole()).text == "ab"


def test_an_answer_has_the_room_that_the_context_leaves():
    async def whole():
        conversation, speaker, _ = talk(says=[("aaa", "length")], longest=8)
        await conversation.user("x x x").generate(max_new_tokens=20)
        assert speaker.heard[0][3]["max_new_tokens"] == 3
        speaker.says.append(([1], "length"))
        await conversation.user("xxx").generate()

    with pytest.raises(UserError, match=r"generate:.*tokens.*8"):
        run(whole())


def test_sampling_is_the_conversations_unless_a_turn_says_otherwise():
    async def whole():
        conversation, speaker, _ = talk(
            says=[("a", "length"), ("a", "length")], sampling={"temperature": 0.5, "top_p": 0.9}
        )
        await conversation.user("x").generate()
        await conversation.user("x").generate(temperature=0.7, max_new_tokens=2)
        assert [heard[3] for heard in speaker.heard] == [
            {"temperature": 0.5, "max_new_tokens": 16, "top_p": 0.9},
            {"temperature": 0.7, "max_new_tokens": 2, "top_p": 0.9},
        ]
        conversation.trajectory(reward=1)

    with pytest.raises(UserError, match=r"different temperatures"):
        run(whole())


def answered(conversation):
    asyncio.get_running_loop()
    return conversation.user("x").generate()


WRONG = {
    "generate before anything was said": (lambda c: c.generate(), "generate: nothing was said yet"),
    "generate twice": (lambda c: c.generate(), "generate: the model had the last word", True),
    "a text of the assistant": (lambda c: c.append("x", role="assistant"), "not what the model generated"),
    "neither text nor ids": (lambda c: c.user(3.5), "user: 3.5 is neither a text nor"),
    "ids that are none": (lambda c: c.append([0.5]), "append: .* no sequence of token ids"),
    "another tokenizer's ids": (lambda c: c.append([5, 99_999]), "append: the model has no token 99999"),
    "a reward before an answer": (lambda c: c.reward(1), "reward: the model has not answered"),
    "a reward that is no number": (lambda c: c.reward(math.nan), "reward: the reward is nan", True),
    "a reward that is a text": (
        lambda c: c.trajectory(reward="good"),
        "trajectory: the reward 'good' is no number",
        True,
    ),
    "trajectory without an answer": (lambda c: c.user("x").trajectory(1), "trajectory: the model has not answered"),
    "a seed for one turn": (
        lambda c: c.user("x").generate(seed=1),
        "generate: there is no setting seed; .*conversation",
    ),
    "OpenAI's name of a setting": (
        lambda c: c.user("x").generate(max_tokens=1),
        r"no setting max_tokens \(did you mean max_new_tokens\?\); those",
    ),
    "a setting misspelt": (lambda c: c.user("x").generate(temprature=1), r"did you mean temperature\?"),
    "no tokens": (lambda c: c.user("x").generate(max_new_tokens=0), "max_new_tokens=0 must be"),
    "with instead of async with": (lambda c: c.__enter__(), "write `async with"),
    "used after trajectory": (lambda c: (c.trajectory(reward=1), c.user("x")), r"ended with trajectory\(\)", True),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_told_what_to_do(name):
    wrong, message, *after = WRONG[name]

    async def whole():
        conversation, *_ = talk(says=[("a</s>", "stop")])
        if after:
            await answered(conversation)
        result = wrong(conversation)
        if asyncio.iscoroutine(result):
            await result

    with pytest.raises((UserError, ValueError, TypeError), match=message) as caught:
        run(whole())
    assert caught.value.__cause__ is None


def test_one_answer_at_a_time():
    async def whole():
        conversation, speaker, _ = talk(says=[("a</s>", "stop")])
        speaker.gate = asyncio.Event()
        first = asyncio.create_task(conversation.user("x").generate())
        await asyncio.sleep(0)
        with pytest.raises(UserError, match=r"generate:.*answering"):
            await conversation.generate()
        with pytest.raises(UserError, match=r"model.*answering"):
            conversation.user("y")
        speaker.gate.set()
        assert (await first).text == "a"

    run(whole())


def test_a_cancelled_answer_leaves_the_conversation_as_it_was():
    async def whole():
        conversation, speaker, _ = talk(says=[("a</s>", "stop")])
        speaker.gate = asyncio.Event()
        first = asyncio.create_task(conversation.user("x").generate())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        speaker.gate.set()
        assert (await conversation.generate()).text == "a"
        assert speaker.heard[0][0].tolist() == speaker.heard[1][0].tolist()

    run(whole())


def test_a_template_that_refuses_is_named():
    async def whole(style, role):
        conversation, *_ = talk(STYLES[style])
        await conversation.append("x", role=role).generate()

    for style, role in (("gemma", "system"), ("mistral", "tool")):
        with pytest.raises(UserError, match=f"template.*messages.*{role}: .*data.chat_template"):
            run(whole(style, role))


def test_an_answer_that_was_not_awaited_says_so():
    async def whole():
        conversation, *_ = talk(says=[("a</s>", "stop")])
        pending = conversation.user("x").generate()
        with pytest.raises(UserError, match=r"write `await c.generate\(…\)`"):
            _ = pending.text
        assert (await asyncio.create_task(pending)).text == "a"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            held = [conversation.user("x").generate()]
            held.append(held)  # as the frames of an agent that failed are
            with pytest.raises(UserError):
                _ = held[0].text
            del held
            gc.collect()
        assert warned == [], "it was told, so Python need not"

    run(whole())
