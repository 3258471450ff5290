"""Wrong calls of a session: each gets one message that names the call and says what to do."""

from __future__ import annotations

import asyncio
import math
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlinf
from rlinf import Session
from rlinf.config.load import InputError
from rlinf.runtime.base.errors import UserError
from tests.runs.library.small import MODEL, TOKENIZER, playing, small

MISTAKES = (UserError, InputError, ValueError, TypeError)


async def judged(s):
    return await s.gather_groups([1], playing(s), n=2)


def returning(s, value):
    async def episode(task):
        async with s.conversation() as c:
            await c.user("?").generate()
            return value

    return episode


async def unrewarded(s):
    (group,) = await judged(s)
    return [replace(group, samples=tuple(replace(sample, reward=None, outcome=None) for sample in group.samples))]


OPEN = {
    "an empty prompt": (lambda s: s.complete(""), "prompt '' has no token"),
    "no ids": (lambda s: s.complete([]), "has no token; give at least one"),
    "ids of another tokenizer": (
        lambda s: s.complete([3, 5000]),
        "no token 5000, its ids are from 0 to 15: .*tokenizer",
    ),
    "messages without a role": (lambda s: s.complete([{"content": "x"}]), "every message needs a `role`"),
    "a prompt that is none": (lambda s: s.complete(3.5), "3.5 is no prompt; give a text"),
    "a prompt in place of a list": (
        lambda s: s.generate("hello"),
        "generate: 'hello' is one prompt or none; give a list",
    ),
    "a setting that there is not": (
        lambda s: s.complete("1", temprature=1),
        r"no setting temprature \(did you mean temperature\?\); those of an answer are",
    ),
    "a setting out of range": (lambda s: s.complete("1", temperature=-1), "temperature=-1"),
    "no tokens": (lambda s: s.complete("1", max_new_tokens=0), "max_new_tokens=0 must be a whole number, at least 1"),
    "a seed that is none": (lambda s: s.complete("1", seed="x"), "seed='x' must be a whole number"),
    "a seed twice": (lambda s: s.conversation(seed=1).user("1").generate(seed=2), "no setting seed"),
    "too long a prompt": (lambda s: s.complete("1" * 64), "64 tokens were said and the model takes 64"),
    "n below 1": (lambda s: s.gather([1], playing(s), n=0), "session.gather: n=0 must be at least 1"),
    "n that is no number": (lambda s: s.generate(["1"], n="8"), "session.generate: n='8' must be a whole number"),
    "a group of one for grpo": (lambda s: s.gather([1], playing(s), n=1), "n=1, and grpo compares .* at least 2"),
    "one task": (lambda s: s.gather("game", playing(s)), "gather: 'game' is one task or none; give a list"),
    "no tasks": (lambda s: s.gather([], playing(s)), "the list of tasks is empty"),
    "an episode that was called": (lambda s: s.gather([1], playing(s)(1)), "pass the function itself, without"),
    "an episode that is none": (lambda s: s.gather([1], "episode"), "'episode' is no episode; pass an `async def`"),
    "an episode that is not async": (lambda s: s.gather_groups([1], lambda task: 1.0), "it is no `async def` function"),
    "no time": (lambda s: s.gather([1], playing(s), timeout=0), "timeout=0 must be seconds"),
    "a conversation returned": (
        lambda s: s.gather_groups([1], returning(s, None)),
        r"returned None; return c.trajectory",
    ),
    "a reward that is nan": (
        lambda s: s.gather_groups([1], returning(s, math.nan)),
        "the reward is nan; give a finite",
    ),
    "no reward anywhere": (lambda s: s.train(unrewarded(s)), "has samples without a reward: give the session a reward"),
    "training on nothing": (lambda s: s.train([]), "train: the list of groups is empty"),
    "training before any sample": (lambda s: s.train(None), "train: .* is no list of groups"),
    "training on texts": (lambda s: s.train(["1"]), "train: '1' is no Group; give what gather or generate returned"),
    "training on an evaluation": (lambda s: s.evaluate(["1"]), "evaluate: answers need a reward function"),
    "nothing to evaluate on": (lambda s: s.evaluate(), "evaluate: there is nothing to evaluate on; pass tasks"),
    "no problems": (lambda s: s.draw(1), "draw: the session has no problems; give it data="),
    "opened twice": (lambda s: s.__aenter__(), "it was opened before; make another one"),
    "a text to the actor": (lambda s: s.rollout.generate(["hello"]).collect(), "generate: .*Prompt"),
    "state that is no JSON": (lambda s: (s.state.update(x=np.zeros(2)), s.checkpoint())[1], "state cannot be kept"),
    "the run directory of another": (
        lambda s: small(s.run_dir.parent).__aenter__(),
        "run directory of another session",
    ),
    "training in its run directory": (
        lambda s: rlinf.train_async(MODEL, run_dir=s.run_dir, tokenizer=TOKENIZER),
        "train: .* is the run directory of another session",
    ),
}


def ours(error):
    """How many lines of a traceback are no business of the program's."""
    package = str(Path(rlinf.__file__).parent)
    return sum(frame.filename.startswith(package) for frame in traceback.extract_tb(error.__traceback__))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A session for all of them: a wrong call leaves it as it was."""
    with asyncio.Runner() as runner:
        session = runner.run(small(tmp_path_factory.mktemp("misuse")).__aenter__())
        yield session, runner
        session.state.clear()
        runner.run(session.close())


@pytest.mark.parametrize("name", OPEN)
def test_a_wrong_call_gets_one_message(name, opened):
    session, runner = opened
    wrong, message = OPEN[name]

    async def called():
        result = wrong(session)
        return await result if hasattr(result, "__await__") else result

    with pytest.raises(MISTAKES, match=message) as caught:
        runner.run(called())
    assert "\n" not in str(caught.value).replace("\n  ", " "), "one message"
    if "actor" not in name:
        assert ours(caught.value) <= 3
    assert runner.run(session.complete("1", max_new_tokens=1)).text is not None  # it still works


@pytest.mark.parametrize("name", ["complete", "gather_groups", "train"])
def test_what_was_not_awaited_says_so(name, opened):
    session, runner = opened

    async def called():
        given = {"complete": ("1",), "gather_groups": ([1], playing(session)), "train": (iter([1]),)}[name]
        pending = getattr(session, name)(*given)
        assert not hasattr(pending, "text")
        for wrong in (lambda: pending.text, lambda: pending[0], lambda: list(pending)):
            with pytest.raises(UserError, match=rf"write `await session.{name}\(…\)`"):
                wrong()
        pending.close()

    runner.run(called())


async def entered(session):
    async with session:
        pass


def local(**given):
    return lambda directory: entered(Session.local(run_dir=directory / "run", **given))


NEW = {
    "no model": (local(), "model = None: give a directory, a hub name"),
    "no tokenizer": (local(model=MODEL), "tokenizer = None: a new model needs one"),
    "a model that is none": (local(model=3), "model = a int: give a directory"),
    "a directory that is not there": (local(model="./nowhere"), "model.path = ./nowhere: there is no such directory"),
    "a tokenizer that is none": (local(model=MODEL, tokenizer=["a"]), "tokenizer = a list: give a directory"),
    "a character twice": (local(model=MODEL, tokenizer={"characters": "aa"}), "every character stands once"),
    "an unknown setting": (local(model=MODEL, tokenizer=TOKENIZER, learning_rate=1), "no such setting"),
    "given texts": (
        local(model=MODEL, tokenizer=TOKENIZER, algorithm="sft"),
        r"algorithm = sft: .* rlinf.train\(model, data=…, algorithm='sft'\)",
    ),
    "an unknown algorithm": (
        local(model=MODEL, tokenizer=TOKENIZER, algorithm="grppo"),
        "algorithm.name = grppo: .*did you mean grpo",
    ),
    "a value out of range": (local(model=MODEL, tokenizer=TOKENIZER, lr=-1.0), "optimizer.lr"),
    "a reward that is none": (
        local(model=MODEL, tokenizer=TOKENIZER, rewards=3),
        "rewards = a int: a reward is a function",
    ),
    "a schedule without an end": (local(model=MODEL, tokenizer=TOKENIZER, schedule="cosine"), "set steps too"),
    "no path": (local(model=MODEL, tokenizer=TOKENIZER, resume=True), "resume = True: give 'auto', 'never', or"),
    "no rows": (local(model=MODEL, tokenizer=TOKENIZER, evaluation=3), "evaluation: a int holds no rows"),
    "TRL's name": (local(model=MODEL, tokenizer=TOKENIZER, num_generations=4), "here it is group_size"),
    "nothing to resume": (
        local(model=MODEL, tokenizer=TOKENIZER, resume="nowhere"),
        "resume=nowhere: no checkpoint there",
    ),
    "without async with": (
        lambda directory: small(directory).complete("1"),
        "session.complete: the session is not open",
    ),
    "with in place of async with": (lambda directory: small(directory).__enter__(), "write `async with"),
    "no system": (lambda directory: Session.connect(None, model=MODEL), "None is no ActorSystem"),
}


@pytest.mark.parametrize("name", NEW)
def test_a_session_that_cannot_be_opened_says_why(name, tmp_path):
    wrong, message = NEW[name]

    async def called():
        await wrong(tmp_path)

    with pytest.raises(MISTAKES, match=message):
        asyncio.run(called())
    assert not (tmp_path / "run").exists(), "nothing was made"


def test_a_closed_session_says_so(tmp_path):
    async def called():
        async with small(tmp_path) as s:
            pass
        await s.complete("1")

    with pytest.raises(UserError, match=r"session\.complete:.*session"):
        asyncio.run(called())


def test_two_steps_at_once_are_refused(tmp_path):
    async def called():
        async with small(tmp_path) as s:
            first = asyncio.create_task(s.train(s.gather([1], playing(s))))
            await asyncio.sleep(0)
            try:
                await s.train(s.gather([1], playing(s)))
            finally:
                await first

    with pytest.raises(UserError, match=r"under.*await"):
        asyncio.run(called())
