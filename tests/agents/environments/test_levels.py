"""Difficulty follows the solve rate: the rule itself, questions of a level, and a run that goes on from its levels."""

from __future__ import annotations

import json
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlinf
from rlinf.agents.environments import Levels, Rule
from rlinf.agents.environments.reasoning_gym import ReasoningGym, _kept_out
from rlinf.data.sample import Prompt
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import begun, ids
from tests.launching import metrics_of

TENTHS = st.integers(0, 10).map(lambda tenth: tenth / 10)
OUTCOMES = st.tuples(st.sampled_from("ab"), st.integers(0, 3), TENTHS)
STEPS = st.lists(st.lists(OUTCOMES, max_size=12), max_size=12)
RULES = st.builds(
    lambda up, down, tasks, start: Rule(up=max(up, down + 0.1), down=down, tasks=tasks, start=start),
    TENTHS.filter(bool), st.integers(0, 9).map(lambda tenth: tenth / 10), st.integers(1, 9), st.integers(0, 5),
)  # fmt: skip


def level_by_the_book(rule, steps, kind, highest):
    """A kind's level after some steps, by fractions and without sums."""
    level, counted = min(rule.start, highest), []
    for step in steps:
        counted += [Fraction(str(reward)) for name, at, reward in step if (name, at) == (kind, level)]
        if len(counted) >= rule.tasks:
            mean = sum(counted) / len(counted)
            level += (mean >= Fraction(str(rule.up))) - (mean <= Fraction(str(rule.down)))
            level, counted = min(max(level, 0), highest), []
    return level


@given(RULES, STEPS)
def test_levels_are_those_of_the_rule_in_any_order_and_across_a_checkpoint(rule, steps):
    highest = {"a": 3, "b": 1}
    levels, shuffled, resumed = (Levels(rule, highest) for _ in range(3))
    for at, step in enumerate(steps):
        shown = levels.learn(step)
        shuffled.learn(reversed(step))
        resumed.learn(step)
        saved, resumed = json.dumps(resumed.state_dict()), Levels(rule, highest)
        resumed.load_state_dict(json.loads(saved))
        expected = {kind: level_by_the_book(rule, steps[: at + 1], kind, most) for kind, most in highest.items()}
        assert shown == {f"curriculum/{kind}/level": float(level) for kind, level in expected.items()}
        assert levels.state_dict() == shuffled.state_dict() == resumed.state_dict()


def made(**more):
    settings = {"chain_sum": {"min_terms": 2}, "letter_counting": None}
    return ReasoningGym(settings, size=50, held_out=20, instructions=None, curriculum={"tasks": 2}, **more)


def drawn(environment, count, first=0):
    rows = environment.tasks()
    return [environment.draw(Prompt(at, ids("?"), row=rows[at % len(rows)])) for at in range(first, first + count)]


async def test_a_task_is_of_its_generators_level_and_is_scored_as_the_package_does():
    environment = made()
    easy = drawn(environment, 40)
    levels = environment.learn([(task, 1.0) for task in easy])
    assert levels == {"curriculum/chain_sum/level": 1.0, "curriculum/letter_counting/level": 1.0}
    hard = drawn(environment, 40)
    assert all(len(task.text.split("problem: ")[1].split()) == 4 for task in easy if "sum" in task.row["generator"])
    assert any(len(task.text.split("problem: ")[1].split()) == 6 for task in hard if "sum" in task.row["generator"])
    for task in (*hard, *drawn(environment, 3, first=40)):
        llm, actor = begun(task.answer)
        assert (await environment(task, llm)).value == 1.0
        assert task.text in actor.read[0]


def test_a_question_of_no_level_is_both_learned_from_and_evaluated_on():
    environment = made()
    held_out = environment.held_out()
    assert len(held_out) == 20
    assert len({row["level"] for row in held_out if row["generator"] == "letter_counting"}) >= 4
    for _ in range(3):
        tasks = drawn(environment, 60)
        assert not any(_kept_out({"question": task.text}) for task in tasks)
        environment.learn([(task, 1.0) for task in tasks])
    again = made()
    again.load_state_dict(environment.state_dict())
    assert [task.row for task in drawn(again, 9)] == [task.row for task in drawn(environment, 9)]


@pytest.mark.parametrize(
    ("generators", "curriculum", "named"),
    [("list_functions", {}, "list_functions"), ("chain_sum", {"up": 0.1, "down": 0.5}, "down"),
     ("chain_sum", {"upp": 1}, "curriculum.upp"), ("knight_swap", {}, "knight_swap"),
     ({"chain_sum": {"max_terms": 0}}, {}, "chain_sum")],
)  # fmt: skip
def test_a_curriculum_that_cannot_be_names_its_cause(generators, curriculum, named):
    with pytest.raises(UserError, match=named):
        ReasoningGym(generators, curriculum=curriculum)


def test_levels_that_the_package_itself_refuses_are_left_out():
    environment = ReasoningGym("caesar_cipher", curriculum={"tasks": 1}, instructions=None)
    for at in range(4):
        environment.learn([(SimpleNamespace(row=task.row), 1.0) for task in drawn(environment, 1, first=at)])
    assert environment.state_dict()["caesar_cipher"][0] == 1


TINY = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}


def test_a_run_goes_on_with_its_levels_bit_for_bit(tmp_path):
    rule = {"start": 3, "tasks": 4, "down": 0.5}
    arguments = {"generators": "letter_counting", "size": 40, "held_out": 0, "instructions": None, "curriculum": rule}
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    for name, steps, resume in (("whole", 4, "never"), ("half", 2, "never"), ("half", 4, "auto")):
        rlinf.train(
            TINY, agent={"function": "reasoning_gym", "args": arguments}, steps=steps, resume=resume,
            tokenizer={"characters": "".join(map(chr, range(32, 127))) + "\n"},
            max_new_tokens=1, prompts_per_step=4, group_size=2, run_dir=tmp_path / name,
            **{"data.chat": True, "data.chat_template": template, "checkpoint.every": 2},
        )  # fmt: skip
    whole, half = (metrics_of(tmp_path / name) for name in ("whole", "half"))
    assert [line["curriculum/letter_counting/level"] for line in whole] == [2, 1, 0, 0]
    for one, other in zip(whole, half, strict=True):
        for name in ("curriculum/letter_counting/level", "loss", "reward/mean", "response/length/mean"):
            assert one.get(name) == other.get(name)
    questions = {
        name: [json.loads(line)["prompt"] for line in (tmp_path / name / "samples.jsonl").open()]
        for name in ("whole", "half")
    }
    assert questions["whole"] == questions["half"]
