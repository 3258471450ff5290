"""Episodes that a process leaves open go on in another: nothing that the model said is asked for again."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf import ActorSystem
from rlinf.agents.agent import AgentLLM, Attempt, samples_of
from rlinf.agents.chat import ChatFormat
from rlinf.agents.episodes import KINDS, Episodes, OpenTask
from rlinf.agents.llm import Setting
from rlinf.agents.outcome import Episode, Tally, here
from rlinf.agents.tools.formats import call_format
from rlinf.data.in_flight import Kept
from rlinf.data.in_flight.snapshot import read_kept, write_kept
from rlinf.data.ledger import Entry
from rlinf.data.rng import mix
from rlinf.data.sample import Prompt
from rlinf.engines.base import Completion, PartialAnswer
from rlinf.runtime.base.clock import run_virtual
from tests.agents.speaking import STYLES, tokenizer_of

TOKENIZER = tokenizer_of(STYLES["chatml"])
LETTERS = np.array(TOKENIZER.convert_tokens_to_ids(list("uvwxyz")), np.int64)


class Model:
    """Says a token a second; what it says is a function of what it reads and of the seed."""

    def __init__(self):
        self.made, self.under_way = 0, {}

    async def answer(self, ids, *, seed, conversation, name, begun, **sampling):
        drawn = mix(seed, *ids.tolist())
        said = LETTERS[[mix(drawn, place) % len(LETTERS) for place in range(1 + drawn % 5)]]
        count = 0 if begun is None else len(begun.response_ids)
        assert begun is None or np.array_equal(said[:count], begun.response_ids)
        self.under_way[name] = [said, count]
        try:
            while self.under_way[name][1] < len(said):
                await asyncio.sleep(1)
                self.made += 1
                self.under_way[name][1] += 1
        finally:
            del self.under_way[name]
        return Completion(0, said, np.zeros(len(said), np.float32), np.zeros(len(said), np.int32), "length")

    def answering(self):
        """How far it is, by the names of calls."""
        zeros = np.zeros(9)
        return {
            name: PartialAnswer(said[:count], zeros[:count].astype(np.float32), zeros[:count].astype(np.int32))
            for name, (said, count) in self.under_way.items()
            if count
        }

    def ended(self, conversation): ...


async def turns(task, llm, tool=lambda: "ok"):
    """Three turns, with a tool between that takes a while."""
    messages = [{"role": "user", "content": task.text}]
    for turn in range(3):
        answer = await llm.chat(messages)
        llm.reward(turn, answer)
        await asyncio.sleep(0.5)
        messages += [answer.message, {"role": "user", "content": tool()}]


async def team(task, llm):
    """Two workers at the same time, two turns each, then somebody who reads what they said."""

    async def work(number):
        worker, said = llm.agent("worker"), f"{task.text}{number}"
        for _ in range(2):
            said += (await worker.generate(said)).text
            await asyncio.sleep(number * 0.7)
        return said

    said = await asyncio.gather(work(0), work(1))
    await llm.agent("reader").generate("".join(said))
    return {"worker": 1.0, "reader": 0.5}


async def fails(task, llm):
    await llm.generate("Hi")
    if task.id % 2:
        raise OSError("no such tool")
    return 1.0


def prompts(count):
    return [Prompt(number, np.arange(2), f"task {number}") for number in range(count)]


class Process:
    """One process that plays."""

    def __init__(self, agent, n=2, at_once=4, play=None):
        self.model, self.tally, numbers = Model(), Tally(), itertools.count()
        setting = Setting(self.model, 1.0, 9, None, len(TOKENIZER))

        async def episode(task):
            record = here.get()
            calls = call_format("hermes", TOKENIZER)
            attempt = Attempt(record.recorded(setting), calls, lambda: next(numbers), task, record.index)
            record.llm = AgentLLM(attempt, ChatFormat(TOKENIZER), (task.id, record.index))
            return samples_of(await agent(task, record.llm), record.llm)

        def begin(task, index):
            return Episode(task.id, index, (0,), task, {})

        self.episodes = Episodes(
            play or episode, n, begin, (self.tally,), timeout=None, at_once=at_once, judge=self.judge
        )

    async def judge(self, group):
        await asyncio.sleep(0.2)
        return replace(group, samples=tuple(replace(sample, reward=1.0) for sample in group.samples))

    async def outcomes(self, tasks):
        return [outcome async for outcome in self.episodes.outcomes(tasks)]

    async def until(self, seconds, tasks):
        """Play so long, then die: what was over and settled, and what was open."""
        over, dead = [], asyncio.Event()

        async def playing():
            async for outcome in self.episodes.outcomes(tasks):
                over.append(outcome)
                self.episodes.settled([outcome.task])
            dead.set()

        task = asyncio.create_task(playing())
        await asyncio.sleep(seconds)
        kept, over = self.episodes.open(self.model.answering()), [*over]
        self.made = self.model.made
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return over, kept


def plain(outcomes):
    """What came of tasks, by id, in plain data."""
    return {
        outcome.task: [
            (sample.agent, sample.index, sample.response_ids.tolist(), sample.reward, sample.text, sample.weight)
            for group in outcome.groups
            for sample in group.samples
        ]
        for outcome in outcomes
    }


def on_disk(kept, directory):
    """What comes back of a checkpoint."""
    entries = tuple(Entry(task.prompt.id, task.prompt, 2, 0, partial=(task,)) for task in kept)
    write_kept(directory, Kept(0, entries), KINDS)
    return [entry.partial[0] for entry in read_kept(directory, KINDS).entries]


def played(main):
    async def whole():
        async with ActorSystem.local():
            return await main()

    return run_virtual(whole())[0]


@pytest.mark.parametrize("agent", [turns, team])
@settings(max_examples=15)
@given(cuts=st.lists(st.floats(0.1, 12.0), min_size=1, max_size=3))
def test_a_process_that_dies_costs_no_token_and_changes_nothing(agent, cuts, tmp_path_factory):
    async def main():
        alone = Process(agent)
        expected = plain(await alone.outcomes(prompts(5)))
        tasks, over, made, held = prompts(5), [], 0, 0
        for cut in cuts:
            process = Process(agent)
            found, kept = await process.until(cut, tasks)
            over += found
            made += process.made
            begun = {task.prompt.id for task in kept} | {outcome.task for outcome in over}
            tasks = [
                *on_disk(kept, tmp_path_factory.mktemp("kept")),
                *(one for one in prompts(5) if one.id not in begun),
            ]
            held = sum(task.tokens for task in kept)
            assert held + sum(sample.learned_tokens for o in over for g in o.groups for sample in g.samples) == made
        last = Process(agent)
        over += await last.outcomes(tasks)
        assert plain(over) == expected
        assert made + last.model.made == alone.model.made, "not one token was made again"
        assert (last.tally.dropped, +last.tally.anew) == (0, {})

    played(main)


def test_a_tool_that_answers_differently_ends_the_record_there():
    async def main():
        process = Process(turns, n=1)
        _, (kept,) = await process.until(9.0, prompts(1))
        assert len(kept.left[0]) >= 2
        other = Process(lambda task, llm: turns(task, llm, tool=lambda: "no"), n=1)
        await other.outcomes([kept])
        first = kept.left[0][0].tokens
        assert (other.tally.reused, other.tally.dropped) == (first, kept.tokens - first)
        (note,) = other.tally.notes()
        assert "(another prompt)" in note
        assert re.findall(r"\d+", note) == ["0", "1", str(first), str(kept.tokens - first)]

    played(main)


def test_a_task_is_over_whether_all_some_or_none_of_its_episodes_went_well():
    async def main():
        process = Process(fails, n=3)
        found = {outcome.task: outcome for outcome in await process.outcomes(prompts(2))}
        assert [len(group.samples) for group in found[0].groups] == [3]
        assert found[0].failed == {}
        assert found[1].groups == ()
        assert found[1].failed.keys() == {0, 1, 2}
        assert "OSError: no such tool" in found[1].failed[2]
        assert (found[1].tally.failures, process.tally.failures) == (3, 3)

    played(main)


def test_episodes_begin_in_the_order_of_tasks_and_are_bounded_not_tasks():
    begun = []

    async def noting(task, llm):
        begun.append(task.id)
        await llm.generate("Hi")
        return 1.0

    async def main():
        process = Process(noting, n=3, at_once=4)
        _, kept = await process.until(0.5, prompts(4))
        assert [sorted(task.left) for task in kept] == [[0, 1, 2]] * 2
        assert [len(calls) for calls in kept[1].left.values()] == [1, 0, 0], "two wait for their turn"

    played(main)
    assert begun == [0, 0, 0, 1]


def test_what_is_over_is_open_until_it_is_settled_and_comes_out_again_at_once():
    async def main():
        process = Process(fails, n=2)
        stream = process.episodes.outcomes(prompts(2))
        found = [await anext(stream), await anext(stream)]
        kept = process.episodes.open({})
        assert [(sorted(task.done), sorted(task.failed), dict(task.left)) for task in kept] == [
            ([0, 1], [], {}), ([], [0, 1], {}),
        ]  # fmt: skip
        again = Process(fails, n=7)
        assert plain(await again.outcomes(kept)) == plain(found)
        assert again.model.made == 0
        process.episodes.settled([0])
        assert [task.prompt.id for task in process.episodes.open({})] == [1]
        await stream.aclose()
        assert process.episodes.open({}) == []

    played(main)


def test_a_task_that_is_dropped_makes_room_and_nothing_comes_of_it():
    async def main():
        process = Process(turns, n=2, at_once=2)
        stream = process.episodes.outcomes(prompts(3))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        await process.episodes.drop([0, 99])
        assert [task.prompt.id for task in process.episodes.open({})] == [1, 2], "they have its place"
        found = [await first, *[outcome async for outcome in stream]]
        assert sorted(outcome.task for outcome in found) == [1, 2]
        assert process.tally.played == 4

    played(main)


def test_the_oldest_version_that_an_open_task_holds():
    assert OpenTask(prompts(1)[0]).oldest is None

    async def main():
        _, (kept,) = await Process(turns, n=1).until(9.0, prompts(1))
        assert kept.oldest == 0

    played(main)
