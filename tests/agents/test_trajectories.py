"""Calls of an agent as a tree of turns: exact tokens are joined, rewritten histories branch, all is learned once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.agents.agent import AgentLLM, Attempt, samples_of
from rlinf.agents.chat import ChatFormat
from rlinf.agents.llm import ContextFull, Setting
from rlinf.agents.tools.formats import call_format
from rlinf.data.sample import Group
from rlinf.engines.base import Completion
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.training.batch_metrics import show_samples
from tests.agents.speaking import STYLES, Style, tokenizer_of
from tests.agents.test_chat_tools import QWEN25

STYLED = {**STYLES, "qwen": Style(QWEN25, "<|im_end|>")}


class Parrot:
    """Answers with random letters and its end token; remembers every call, by the tokens that it read."""

    def __init__(self, tokenizer, seed=0, gate=None):
        self.tokenizer, self.rng, self.gate = tokenizer, np.random.default_rng(seed), gate
        self.calls, self.over = [], []

    async def answer(self, ids, *, seed, conversation, **sampling):
        if self.gate is not None:
            await self.gate.wait()
        letters = self.tokenizer.convert_tokens_to_ids(list("aabbxyz \n"))
        said = [*self.rng.choice(letters, self.rng.integers(1, 8)), self.tokenizer.eos_token_id]
        said = np.asarray(said, np.int64)
        self.calls.append((np.asarray(ids), said, seed, conversation))
        logprobs = np.full(len(said), -float(len(self.calls)), np.float32)
        return Completion(0, said, logprobs, np.full(len(said), 7, np.int32), "stop")

    def ended(self, conversation):
        self.over.append(conversation)


def begun(style="chatml", longest=None, **more):
    tokenizer = tokenizer_of(STYLED[style])
    parrot = Parrot(tokenizer, **more)
    numbers = itertools.count()
    setting = Setting(parrot, 1.0, 8, longest, len(tokenizer))
    attempt = Attempt(setting, call_format("hermes", tokenizer), lambda: next(numbers))
    return AgentLLM(attempt, ChatFormat(tokenizer), (1, 2)), parrot


def user(text):
    return {"role": "user", "content": text}


def learned(samples):
    """(log-prob, token) of everything that is learned: the parrot's log-probs number its calls."""
    return sorted(
        (float(logprob), int(token))
        for sample in samples
        for logprob, token in zip(sample.column("logprobs"), sample.learned(sample.response_ids), strict=True)
    )


def said(parrot):
    return sorted((-float(n), int(token)) for n, (_, ids, _, _) in enumerate(parrot.calls, 1) for token in ids)


async def test_turns_are_joined_by_exact_tokens_and_make_one_sample():
    llm, parrot = begun()
    messages = [user("Hi")]
    for _ in range(3):
        answer = await llm.chat(messages)
        messages += [answer.message, user("more")]
    (sample,) = samples_of(0.5, llm)
    for (before, ids, _, _), (after, _, _, _) in itertools.pairwise(parrot.calls):
        assert np.array_equal(after[: len(before) + len(ids)], [*before, *ids])
    assert np.array_equal(sample.prompt.token_ids, parrot.calls[0][0])
    assert learned([sample]) == said(parrot)
    assert (sample.reward, sample.weight) == (0.5, 1.0)
    assert {conversation for _, _, _, conversation in parrot.calls} == {0}
    counts = llm.counts()
    assert (counts.calls, counts.joined, counts.branches) == (3, 2, 0)


async def test_a_rewritten_history_branches_and_unchanged_answers_keep_their_tokens():
    llm, parrot = begun()
    first = await llm.chat([user("Hi")])
    second = await llm.chat([user("Hi"), first.message, user("and?")])
    await llm.chat([user("Hello"), first.message, user("and?"), second.message, user("so?")])
    read, whole = parrot.calls[2][0].tolist(), "".join(map(chr, parrot.calls[2][0]))
    for answer in (first, second):
        assert "".join(map(chr, answer.ids)) in whole  # as they were generated
    assert read[: len(parrot.calls[0][0])] != parrot.calls[0][0].tolist()
    assert llm.counts().branches == 1
    samples = samples_of(1.0, llm)
    assert len(samples) == 2
    assert learned(samples) == said(parrot)


async def test_a_fork_shares_what_came_before_and_learns_it_once():
    llm, parrot = begun()
    first = await llm.chat([user("Hi")])
    for text in ("left", "right"):
        await llm.chat([user("Hi"), first.message, user(text)])
    samples = samples_of(1.0, llm)
    assert len(samples) == 2
    assert learned(samples) == said(parrot)
    shared, fork = samples
    assert len(fork.prompt.token_ids) > len(shared.prompt.token_ids)
    assert [conversation for _, _, _, conversation in parrot.calls] == [0, 0, 1]


async def test_calls_at_the_same_time_have_randomness_and_lines_of_their_own():
    llm, parrot = begun(gate=(gate := asyncio.Event()))
    calls = [asyncio.ensure_future(llm.chat([user("Hi")])) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls)
    assert len({seed for _, _, seed, _ in parrot.calls}) == 3
    assert len({conversation for _, _, _, conversation in parrot.calls}) == 3
    assert len(samples_of(1.0, llm)) == 3


async def test_token_ids_that_begin_with_an_answer_go_on_from_it():
    llm, parrot = begun()
    reply = await llm.generate([5, 6, 7])
    await llm.generate([5, 6, 7, *reply.ids, 8])
    (sample,) = samples_of(1.0, llm)
    assert np.array_equal(sample.prompt.token_ids, [5, 6, 7])
    assert learned([sample]) == said(parrot)


async def test_temperatures_make_samples_of_their_own():
    llm, parrot = begun()
    first = await llm.chat([user("Hi")], temperature=0.5)
    await llm.chat([user("Hi"), first.message, user("go")], temperature=2.0)
    samples = samples_of(1.0, llm)
    assert [sample.temperature for sample in samples] == [0.5, 2.0]
    assert learned(samples) == said(parrot)


async def test_agents_have_trajectories_rewards_and_weights_of_their_own():
    llm, _ = begun()
    await llm.agent("planner", weight=2.0).chat([user("plan")])
    await llm.agent("worker").chat([user("work")])
    await llm.agent("worker").chat([user("work too")])
    samples = samples_of({"planner": 1.0, "worker": Score(0.25, {"speed": 3.0})}, llm)
    found = [(each.agent, each.reward, each.weight, each.scores) for each in samples]
    assert found == [("planner", 1.0, 2.0, {})] + [("worker", 0.25, 1.0, {"speed": 3.0})] * 2
    with pytest.raises(UserError, match=r"'', 'planner', 'worker'"):
        samples_of({"boss": 1.0}, llm)


async def test_a_sample_has_the_trace_of_its_turns():
    llm, _ = begun()
    first = await llm.chat([user("Hi")])
    second = await llm.chat([user("Hi"), first.message, user("go")])
    llm.reward(0.5, first)
    (sample,) = samples_of(None, llm)
    early, late = sample.trace
    assert sample.response_ids[early.begin : early.end].tolist() == first.ids.tolist()
    assert sample.response_ids[late.begin : late.end].tolist() == second.ids.tolist()
    assert (early.finish, late.finish) == (first.finish, second.finish)
    assert 0 <= early.start <= early.start + early.took <= late.start
    (row,) = show_samples([Group(sample.prompt, (sample,))], [0.0], 1, llm.trajectories.chat.tokenizer)
    assert [turn["tokens"][1] for turn in row["turns"]] == [len(first.ids), len(second.ids)]
    assert [turn["reward"] for turn in row["turns"]] == [0.5, 0.0]
    assert first.text in row["turns"][0]["said"]
    assert "go" in row["turns"][1]["read"]
    assert len(row["times"]) == 2


async def test_rewards_of_answers_stand_at_their_ends():
    llm, _ = begun()
    first = await llm.chat([user("Hi")])
    second = await llm.chat([user("Hi"), first.message, user("go")])
    llm.reward(0.25, first)
    llm.reward(0.5)
    (sample,) = samples_of(None, llm)
    rewards = sample.per_token["rewards"]
    assert sample.reward == 0.75
    assert rewards[len(first.ids) - 1] == 0.25
    assert rewards[-1] == 0.5
    assert np.count_nonzero(rewards) == 2
    assert len(second.ids)


async def test_rewards_of_tokens_stand_where_they_fell_beside_those_of_the_answer():
    llm, _ = begun()
    first = await llm.chat([user("Hi")])
    await llm.chat([user("Hi"), first.message, user("go")])
    each = np.arange(len(first.ids)) / 8
    llm.reward(0.25, first)
    llm.reward(each, first)
    llm.reward(each.tolist(), first)
    llm.reward(0.5, first)
    (sample,) = samples_of(None, llm)
    expected = 2 * each
    expected[-1] += 0.75
    assert sample.reward == expected.sum()
    np.testing.assert_array_equal(sample.per_token["rewards"][: len(each)], expected)
    assert not sample.per_token["rewards"][len(each) :].any()


@pytest.mark.parametrize(
    ("rewards", "error", "said"),
    [
        (lambda count: np.zeros(count + 1), ValueError, "rewards for an answer of"),
        (lambda count: [], ValueError, "0 rewards"),
        (lambda count: np.zeros((count, 2)), TypeError, "one for each token"),
        (lambda count: ["a"] * count, TypeError, "one for each token"),
        (lambda count: [0.0] * (count - 1) + [float("nan")], ValueError, "token"),
    ],
)
async def test_rewards_that_are_not_one_for_each_token_are_refused(rewards, error, said):
    llm, _ = begun()
    answer = await llm.chat([user("Hi")])
    with pytest.raises(error, match=rf"(?s)llm\.reward: .*{said}"):
        llm.reward(rewards(len(answer.ids)), answer)
    llm.reward(1.0)
    assert samples_of(None, llm)[0].reward == 1.0


async def test_the_reward_of_an_answer_is_that_of_its_own_branch():
    llm, parrot = begun()
    good, bad = await llm.chat([user("one")]), await llm.chat([user("two")])
    llm.reward(1.0, good)
    llm.reward(0.0, bad)
    samples = samples_of(None, llm)
    assert [(sample.reward, sample.per_token["rewards"].sum()) for sample in samples] == [(1.0, 1.0), (0.0, 0.0)]
    assert learned(samples) == said(parrot)
    assert [sample.reward for sample in samples_of(0.5, llm)] == [0.5, 0.5]


async def test_what_branches_share_earns_what_came_of_its_own_line():
    llm, _ = begun()
    first = await llm.chat([user("Hi")])
    left, right = [await llm.chat([user("Hi"), first.message, user(text)]) for text in ("left", "right")]
    llm.reward(0.5, first)
    llm.reward(1.0, left)
    llm.reward(-1.0, right)
    assert [sample.reward for sample in samples_of(None, llm)] == [1.5, -1.0]


async def test_temperatures_of_one_line_earn_what_comes_behind_them():
    llm, _ = begun()
    first = await llm.chat([user("Hi")], temperature=0.5)
    await llm.chat([user("Hi"), first.message, user("go")], temperature=2.0)
    llm.reward(1.0)
    assert [sample.reward for sample in samples_of(None, llm)] == [1.0, 1.0]


async def test_a_branch_that_nobody_rewarded_is_an_error_that_names_the_agent():
    llm, _ = begun()
    planner = llm.agent("planner")
    answer = await planner.chat([user("one")])
    await planner.chat([user("two")])
    planner.reward(1.0, answer)
    with pytest.raises(UserError, match=r"1.*2 branches.*'planner'"):
        samples_of(None, llm)


async def test_what_cannot_be_is_said():
    llm, parrot = begun(longest=24)
    with pytest.raises(UserError, match=r"without.*anything"):
        samples_of(1.0, llm)
    with pytest.raises(TypeError, match=r"list.*messages"):
        await llm.chat("Hi")
    with pytest.raises(ContextFull, match=r"answer fits"):
        await llm.chat([user("x" * 40)])
    with pytest.raises(ValueError, match="temperature=-1"):
        await llm.generate([5], temperature=-1)
    await llm.generate([5])
    with pytest.raises(TypeError, match=r"returned 'good'"):
        samples_of("good", llm)
    llm.end()
    assert parrot.over == [0]
    with pytest.raises(UserError, match=r"episode.*over"):
        await llm.generate([5])


@settings(max_examples=60)
@given(st.data())
async def test_whatever_a_harness_sends_each_generated_token_is_learned_once_and_never_encoded_again(data):
    """A harness goes on, forks, edits earlier user turns, or drops turns; sometimes with spaces around answers."""
    llm, parrot = begun(data.draw(st.sampled_from(["chatml", "llama"])), seed=data.draw(st.integers(0, 99)))
    messages = [user("Hi")]
    for _ in range(data.draw(st.integers(1, 6))):
        answer = await llm.chat(messages)
        messages = [*messages, answer.message, user(data.draw(st.sampled_from(["go", "ab", "more"])))]
        match data.draw(st.sampled_from(["on", "on", "fork", "edit", "drop", "space"])):
            case "fork" if len(messages) > 3:
                messages = [*messages[:-3], user("other")]
            case "edit":
                messages = [user("edited"), *messages[1:]]
            case "drop" if len(messages) > 3:
                messages = [messages[0], *messages[3:]]
            case "space":
                messages[-2] = {**messages[-2], "content": f" {messages[-2]['content']} "}
    samples = samples_of(1.0, llm)
    assert learned(samples) == said(parrot)
    for sample in samples:  # every sample is something that the model really read and said
        whole = [*sample.prompt.token_ids, *sample.response_ids]
        assert any(np.array_equal(whole, [*ids, *answer]) for ids, answer, _, _ in parrot.calls)


async def _vandal(seed):
    """An agent that goes on, forks and returns samples, and writes into whatever it is given on the way."""
    rng = random.Random(seed)
    llm, parrot = begun(rng.choice(["chatml", "llama", "qwen"]), seed=seed)
    messages, answers = [user("Hi")], []
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.2:
            read = np.asarray(parrot.tokenizer.convert_tokens_to_ids(list("abxy")))
            answer = await llm.generate(read)
            read[:] = 7
        else:
            answer = await llm.chat(messages)
            messages = [*messages, answer.message, {"role": "user", "content": [{"type": "text", "text": "go"}]}]
        answers.append(answer)
        _spoil(rng, llm, messages, answers)
    if rng.random() < 0.3:
        with contextlib.suppress(ValueError):
            llm.samples(0.0)[0].response_ids[:] = 9
    return samples_of(1.0, llm), parrot


def _spoil(rng, llm, messages, answers):
    """Write into some of the things that are at hand."""
    answer, turn = rng.choice(answers), rng.choice(llm.trajectories.turns)
    arrays = [answer.ids, answer.logprobs, answer.versions, turn.new_ids, turn.answer.token_ids, turn.answer.logprobs]
    for array in rng.sample(arrays, rng.randint(0, 6)):
        with contextlib.suppress(ValueError):
            array[:] = 7
        with contextlib.suppress(ValueError):
            array.setflags(write=True)
            array += 1
    message = rng.choice(messages)
    match rng.choice(["content", "nested", "calls", "turns", "nothing"]):
        case "content":
            message["content"] = rng.choice(["edited", "", "ab"])
        case "nested" if isinstance(message["content"], list):
            message["content"][0]["text"] = "edited"
        case "calls" if message["role"] == "assistant":
            message["tool_calls"] = [{"function": {"name": "other", "arguments": {}}}]
        case "turns":
            with contextlib.suppress(AttributeError):
                llm.trajectories.turns.clear()


MORE = [pytest.param(range(first, first + 1000), marks=pytest.mark.repeated) for first in range(300, 10_300, 1000)]


@pytest.mark.parametrize("seeds", [range(300), *MORE])
async def test_whatever_an_agent_writes_into_what_is_trained_is_what_was_sampled(seeds):
    for seed in seeds:
        samples, parrot = await _vandal(seed)
        assert learned(samples) == said(parrot), seed
        for sample in samples:
            whole = [*sample.prompt.token_ids, *sample.response_ids]
            assert any(np.array_equal(whole, [*ids, *answer]) for ids, answer, _, _ in parrot.calls), seed


async def test_an_answer_that_was_edited_in_place_is_read_as_it_was_edited():
    llm, parrot = begun()
    answer = await llm.chat([user("Hi")])
    answer.message["content"] = "edited"
    await llm.chat([user("Hi"), answer.message, user("go")])
    assert "edited" in parrot.tokenizer.decode(parrot.calls[1][0])
    assert llm.counts().branches == 1


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [("name", "ann", "bob"), ("tool_call_id", "1", "2"), ("content", " ab", "ab"), ("content", "ab", "ab\n")],
)
async def test_messages_of_others_are_the_same_only_with_every_field(field, one, other):
    llm, _ = begun()
    answer = await llm.chat([{**user("ab"), field: one}])
    await llm.chat([{**user("ab"), field: other}, answer.message, user("go")])
    assert llm.counts().branches == 1
    await llm.chat([{**user("ab"), field: one, "cache": None}, answer.message, user("go")])
    assert llm.counts().joined == 1


async def test_equal_calls_of_several_answers_have_ids_of_their_own():
    llm, _ = begun("qwen")
    say(llm, '<tool_call>{"name": "add", "arguments": {"a": [1], "b": 2}}</tool_call>')
    messages, ids = [user("Hi")], []
    for agent in (llm, llm, llm, llm.agent("other")):
        answer = await agent.chat(messages, tools=[add], seed=5)
        (call,) = answer.calls
        ids.append(call.id)
        assert answer.message["tool_calls"][0]["id"] == call.id
        call.arguments["a"].append(7)
        assert answer.message["tool_calls"][0]["function"]["arguments"]["a"] == [1]
    assert len({*ids}) == 4
    assert all(len(id) == 9 and id.isalnum() for id in ids)


def say(llm, text):
    """Have a model say a text from now on."""
    tokenizer, model = llm.trajectories.chat.tokenizer, llm._attempt.setting.llm

    async def answer(ids, *, seed, conversation, **sampling):
        said = np.append(tokenizer(text)["input_ids"], tokenizer.eos_token_id)
        model.calls.append((ids, said, seed, conversation))
        return Completion(0, said, np.full(len(said), -1.0, np.float32), np.zeros(len(said), np.int32), "stop")

    model.answer = answer


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_a_tool_is_called_and_its_result_is_read_and_not_learned():
    llm, parrot = begun("qwen")
    tokenizer = parrot.tokenizer
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    wrong = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    says = [call, wrong, "it is 3"]

    async def answer(ids, *, seed, conversation, **sampling):
        said = np.append(tokenizer(says[len(parrot.calls)])["input_ids"], tokenizer.eos_token_id)
        parrot.calls.append((ids, said, seed, conversation))
        return Completion(0, said, np.full(len(said), -float(len(parrot.calls))), np.zeros(len(said), np.int32), "stop")

    parrot.answer = answer
    messages = [user("1 + 2?")]
    told = []
    while (reply := await llm.chat(messages, tools=[add])).calls:
        results = await reply.results()
        told += [message["content"] for message in results]
        messages += [reply.message, *results]
    assert told[0] == "3"
    assert "b" in told[1]
    assert len(told) == 2
    assert reply.content == "it is 3"
    (sample,) = samples_of(1.0, llm)
    assert learned([sample]) == said(parrot)
    assert llm.counts().branches == 0
    with pytest.raises(TypeError, match=r"list.*tools"):
        await llm.chat([user("Hi")], tools=add)
