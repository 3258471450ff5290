"""Earlier versions of the policy play against it: by their own weights, never learned from, the same after a resume."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.agents.agent import OnlyPast, samples_of
from rlinf.agents.environments.textarena import TextArena
from rlinf.agents.llm import PastSelves
from rlinf.config.load import ConfigError
from rlinf.config.text import PastConfig
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.runs.rules import load_config
from rlinf.runs.start import train
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.system import ActorSystem
from tests.actors import toys
from tests.agents.acting import begun
from tests.launching import ROOT, metrics_of

NIM = ROOT / "configs/agents/self-play-past.yaml"
SHORT = ("trace=false", "metrics.live=never", "evaluation.problems=0", "checkpoint.every=3", "log_every=1000")
SMALL = ("algorithm.prompts_per_step=6", "algorithm.group_size=4", "metrics.samples=1000")


@pytest.mark.parametrize(("size", "every"), [(1, 1), (1, 3), (3, 2), (4, 5)])
def test_the_policy_takes_the_place_of_the_oldest_every_so_many_steps(size, every):
    past, places = PastSelves(PastConfig(size, every)), [0] * size  # steps that each had learned from
    for step in range(1, 41):
        assert [past.learned(place, step) for place in range(size)] == places
        assert (past.renewed(step) is None) == bool(step % every)
        if (place := past.renewed(step)) is not None:
            assert places[place] == min(places)
            places[place] = step


def test_who_plays_is_drawn_by_task_alone_in_the_share_of_tasks_that_was_asked_for():
    past = PastSelves(PastConfig(3, 1, 0.25))
    drawn = [past.drawn(7, 1, task) for task in range(4000)]
    assert drawn == [past.drawn(7, 1, task) for task in range(4000)] != [past.drawn(8, 1, task) for task in range(4000)]
    counts = Counter(drawn)
    assert counts.keys() == {None, 0, 1, 2}
    assert counts[None] == pytest.approx(3000, abs=120)
    assert all(counts[place] == pytest.approx(333, abs=80) for place in range(3))
    assert {PastSelves(PastConfig(3, 1, 0.0)).drawn(task) for task in range(99)} == {None}
    assert None not in {PastSelves(PastConfig(3, 1, 1.0)).drawn(task) for task in range(99)}
    assert PastSelves(PastConfig(0)).drawn(1) is None


def against(name, *lines):
    """The model in an episode in which an earlier version plays, and by whose weights it was asked."""
    llm, actor = begun(*lines)
    llm._attempt.past, asked, answer = name, [], actor.answer

    async def noting(read, *, adapter=None, **how):
        asked.append(adapter)
        return await answer(read, **how)

    actor.answer = noting
    return llm, asked


async def test_nothing_that_an_earlier_version_says_is_learned_from():
    llm, asked = against("past1", "a", "b", "c")
    for one in (llm.agent("first"), llm.past("second"), llm.agent("first")):
        await one.generate("x")
    assert asked == [None, "past1", None]
    samples = samples_of({"first": 1.0, "second": -1.0}, llm)
    assert {sample.agent for sample in samples} == {"first"}
    assert sorted(sample.text for sample in samples) == ["a", "c"]
    assert llm.agents["second"].samples(1.0) == []


async def test_where_none_was_drawn_it_is_the_policy_itself():
    llm, asked = against(None, "a", "b")
    await llm.past("first").generate("x")
    await llm.past("second").generate("x")
    assert asked == [None, None]
    assert {sample.agent for sample in samples_of(1.0, llm)} == {"first", "second"}


async def test_an_agent_that_has_spoken_does_not_become_an_earlier_version():
    llm, _ = against("past0", "a")
    await llm.agent("one").generate("x")
    with pytest.raises(UserError, match="'one'"):
        llm.past("one")


async def test_an_agent_with_weights_of_its_own_is_asked_by_them_and_learned_from():
    llm, asked = against(None, "a", "b")
    llm._attempt.own = {"second": "own0"}
    await llm.agent("first").generate("x")
    await llm.agent("second").generate("x")
    assert asked == [None, "own0"]
    assert {sample.agent for sample in samples_of(1.0, llm)} == {"first", "second"}


async def test_an_episode_in_which_the_policy_said_nothing_is_told_apart():
    llm, _ = against("past0", "a")
    await llm.past("one").generate("x")
    with pytest.raises(OnlyPast):
        samples_of(1.0, llm)


@pytest.mark.parametrize("name", ["past2", None])
async def test_a_game_of_textarena_is_played_against_it_by_seats_in_turn(name):
    game = TextArena("TicTacToe-v0", opponent="past", size=2)
    for row in game.tasks():
        llm, asked = against(name, *(f"[{move}]" for move in (0, 1, 2, 3, 4, 5, 6, 7, 8)))
        scores = await game(SimpleNamespace(row=row), llm)
        assert {score.value for score in scores.values()} == {1.0, -1.0}
        turns = [name if seat != row["seat"] else None for seat in (0, 1)]
        assert asked == [turns[number % 2] for number in range(len(asked))]
        own = {f"player {row['seat']}"} if name else {"player 0", "player 1"}
        assert {sample.agent for sample in samples_of(scores, llm)} == own


async def test_its_tokens_are_those_of_the_weights_that_were_saved_then(tmp_path):
    base = build_model(toys.configuration(initializer_range=0.3), load_tokenizer(toys.ALPHABET))
    base.save_pretrained(tmp_path / "base")
    lora = {"r": 3, "alpha": 6, "target_modules": "all-linear"}
    shared = {"model": str(tmp_path / "base"), "tokenizer": toys.ALPHABET}
    prompts = [group.prompt.token_ids for group in toys.groups(5)]
    async with ActorSystem.local() as system:
        trainer = await system.spawn(Trainer, **shared, lora=lora, lr=0.05, past=2)
        rollout = await system.spawn(Rollout, name="rollout", **shared, max_new_tokens=8)

        async def told(adapter):
            await rollout.load(trainer.weights())
            how = {"temperature": 0.0, "seed": 1, "adapter": adapter}
            answers = await asyncio.gather(*(rollout[0].answer(ids, **how) for ids in prompts))
            return [answer.response_ids.tolist() for answer in answers]

        async def learn(steps, seed):
            for step in range(steps):
                await trainer.train(toys.groups(6, seed + step))

        before = await told(None)
        assert await told("past0") == await told("past1") == before, "all begin as the policy does"
        await learn(3, 0)
        await trainer.keep_past("past1")
        await trainer.save(str(tmp_path / "then"))
        then = await told(None)
        await learn(3, 10)
        await trainer.save(str(tmp_path / "now"))
        now = await told(None)
        assert (await told("past0"), await told("past1")) == (before, then)
        assert then != before != now != then
        await trainer.keep_past("past1")
        assert await told("past1") == now
        await trainer.restore(str(tmp_path / "now" / "state"))  # which has the version before
        assert await told("past1") == then
        with pytest.raises(ValueError, match="past9"):
            await trainer.keep_past("past9")
    for name, expected in (("then", then), ("now", now)):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, tmp_path / name / "adapter")
        assert [greedy(model, ids, len(answer)) for ids, answer in zip(prompts, expected, strict=True)] == expected


def greedy(model, ids, count):
    """The likeliest tokens, each by a pass of its own over all before it."""
    read = list(ids)
    for _ in range(count):
        read.append(int(model(torch.tensor([read])).logits[0, -1].argmax()))
    return read[len(ids) :]


def run(tmp_path, name, steps, *keys, resume="never"):
    train(
        load_config(NIM, [*SHORT, *SMALL, *keys, f"steps={steps}", f"name={name}", f"output_dir={tmp_path}"]),
        resume=resume,
    )
    lines = (tmp_path / name / "samples.jsonl").read_text().splitlines()
    return metrics_of(tmp_path / name), list(map(json.loads, lines))


def test_a_resumed_run_plays_against_the_same_versions_and_learns_the_same(tmp_path):
    keys = ("agent.past={size: 2, every: 2, share: 1.0}",)
    whole, said = run(tmp_path, "whole", 7, *keys)
    run(tmp_path, "half", 3, *keys)
    half, again = run(tmp_path, "half", 7, *keys, resume="auto")
    names = [name for name in set().union(*whole) if name.startswith(("past", "agent/", "reward/"))]
    assert {"past0/step", "past1/step", "past0/reward", "past1/reward", "reward/mean"} <= set(names)
    for one, other in zip(whole, half, strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
    assert [(line["past0/step"], line["past1/step"]) for line in whole] == [
        (0, 0), (0, 0), (2, 0), (2, 0), (2, 4), (2, 4), (6, 4),
    ]  # fmt: skip
    answers = [[(row["step"], row["prompt"], row["response"], row["reward"]) for row in rows] for rows in (said, again)]
    assert answers[0] == answers[1]
    learned = [row for row in said if "prompt_id" in row]
    begins = {
        seat: [row["prompt"] == f"{row['task']}=" for row in learned if row["prompt_id"] % 2 == seat] for seat in (0, 1)
    }
    assert any(begins[1])
    assert not any(begins[0]), "there an earlier version begins, and what it says is not learned"


OWN = ("agent.past.size=0", "agent.own_weights=[first, second]")


def test_a_resumed_run_of_agents_with_weights_of_their_own_learns_the_same(tmp_path):
    whole, said = run(tmp_path, "whole", 5, *OWN)
    run(tmp_path, "half", 3, *OWN)
    half, again = run(tmp_path, "half", 5, *OWN, resume="auto")
    names = [name for name in set().union(*whole) if name.startswith(("agent/", "reward/"))]
    for one, other in zip(whole, half, strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
    answers = [[(row["step"], row["prompt"], row["response"], row["reward"]) for row in rows] for rows in (said, again)]
    assert answers[0] == answers[1]
    assert whole[-1]["mismatch/max"] < 1e-3, "the trainer computes what each agent's own weights said"
    saved = tmp_path / "half" / "checkpoints" / "latest"
    first, second = (load_file(saved / f"adapter_own{n}" / "adapter_model.safetensors") for n in (0, 1))
    assert toys.furthest(first, second) > 0.001


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (("model.lora.r=0",), "agent.past.size"),
        (("rollout.engine=vllm",), "agent.past.size"),
        ((*OWN, "model.lora.r=0"), "agent.own_weights"),
        (("agent.own_weights=[first]",), "agent.own_weights"),
        (("agent.past.size=0", "agent.own_weights=[a, a]"), "agent.own_weights"),
    ],
)
def test_what_cannot_have_adapters_is_refused_by_the_key(keys, named, tmp_path):
    with pytest.raises(ConfigError) as refused:
        load_config(NIM, [*keys, f"output_dir={tmp_path}"])
    assert named in str(refused.value)


async def test_agents_with_weights_of_their_own_learn_as_trainers_of_their_own_would(tmp_path):
    base = build_model(toys.configuration(initializer_range=0.3), load_tokenizer(toys.ALPHABET))
    base.save_pretrained(tmp_path / "base")
    shared = {"model": str(tmp_path / "base"), "tokenizer": toys.ALPHABET}
    how = {**shared, "lora": {"r": 3, "alpha": 6, "target_modules": "all-linear"}, "lr": 0.02, "grad_clip": 1e9}

    def said(agent, seed):
        groups = toys.groups(4, seed)
        return [replace(one, samples=tuple(replace(sample, agent=agent) for sample in one.samples)) for one in groups]

    batches = {"a": said("a", 0), "b": said("b", 50)}
    async with ActorSystem.local() as system:
        together = await system.spawn(Trainer, name="together", **how, own_weights=("b",), micro_batch_tokens=64)
        for _ in range(2):  # of equal batches, so that each agent has the same share of both steps
            await together.train([*batches["a"], *batches["b"]])
        weights = await together.weights()
        await together.save(str(tmp_path / "together"))
        for agent, directory in (("a", "adapter"), ("b", "adapter_own0")):
            alone = await system.spawn(Trainer, name=f"alone_{agent}", **how)
            for _ in range(2):
                await alone.train(batches[agent])
            await alone.save(str(tmp_path / agent))
            one, other = (
                load_file(tmp_path / name / "adapter_model.safetensors")
                for name in (f"{agent}/adapter", f"together/{directory}")
            )
            assert one.keys() == other.keys()
            far = torch.cat([(one[name] - other[name]).abs().flatten() > 2e-4 for name in one])
            assert far.float().mean() < 0.01, (
                "but where a gradient is next to nothing, which Adam makes as large as others"
            )
        await together.restore(str(tmp_path / "together" / "state"))
        rollout = await system.spawn(Rollout, name="rollout", **shared, max_new_tokens=8)
        await rollout.load(weights)
        for adapter, directory in ((None, "a"), ("own0", "b")):
            plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
            model = PeftModel.from_pretrained(plain, tmp_path / directory / "adapter")
            for group in batches["a"]:
                ids = group.prompt.token_ids
                answer = await rollout[0].answer(ids, temperature=0.0, seed=1, adapter=adapter)
                assert answer.response_ids.tolist() == greedy(model, ids, len(answer.response_ids))
