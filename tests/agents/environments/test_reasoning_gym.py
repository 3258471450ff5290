"""Tasks of reasoning-gym: scored as the package scores them, held-out ones never learned from, mistakes named."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import reasoning_gym

import rlinf
from rlinf.agents.environments.reasoning_gym import ReasoningGym
from rlinf.data.sample import Prompt
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import begun

GENERATORS = ("chain_sum", "letter_counting", "base_conversion", "spell_backward", "graph_color", "list_functions")
TINY = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}


def task(row):
    return SimpleNamespace(row=row, text=row["question"])


async def test_answers_are_scored_as_the_package_scores_them():
    drawn = random.Random(0)
    environment = ReasoningGym(GENERATORS, size=500, held_out=20, instructions=None)
    scores, scored_by = set(), {name: reasoning_gym.get_score_answer_fn(name) for name in GENERATORS}
    for row in environment.tasks() * 2:
        right, wrong = row["answer"] or "1", str(drawn.randint(-9, 99))
        said = drawn.choice([right, f"{right} ", f"it is {right}", wrong, "no idea"])
        llm, _ = begun(said)
        score = await environment(task(row), llm)
        entry = environment._entries[row["generator"], 0, row["entry"]]
        assert score.value == scored_by[row["generator"]](said.strip(), entry)
        scores.add(score.value)
    assert {0.0, 1.0} < scores


async def test_an_answer_stands_between_tags_where_the_instructions_ask_for_them():
    environment = ReasoningGym("chain_sum", size=8, held_out=2)
    row = environment.tasks()[0]
    for said, value in ((f"so <answer>{row['answer']}</answer>", 1.0), (row["answer"], 0.0)):
        llm, actor = begun(said)
        assert (await environment(task(row), llm)).value == value
        assert "<answer>" in actor.read[0]


@pytest.mark.parametrize("how", [{}, {"instructions": None}, {"curriculum": {}}])
async def test_its_own_player_answers_as_it_asks_for_and_is_right(how):
    names = [name for name in GENERATORS if name != "list_functions" or "curriculum" not in how]  # it has no levels
    environment = ReasoningGym(names, size=60, held_out=2, **how)
    rows = environment.tasks()
    for number, row in enumerate(rows):
        drawn = environment.draw(Prompt(number, np.zeros(1, np.int64), row["question"], "", row))
        if drawn.row["generator"] == "graph_color":  # a colouring of many: nobody says which
            with pytest.raises(UserError, match="graph_color gives no answer"):
                environment.player(drawn, [])
            continue
        llm, _ = begun(environment.player(drawn, []))
        assert (await environment(drawn, llm)).value == 1.0


def test_no_question_that_is_held_out_is_learned_from():
    settings = {"chain_sum": {"min_digits": 1, "max_digits": 1, "max_terms": 2, "weight": 3}, "letter_counting": None}
    environment = ReasoningGym(settings, size=300, held_out=30, seed=5)
    learned, held_out = environment.tasks(), environment.held_out()
    assert len(learned) == 300
    assert len({row["question"] for row in held_out}) == len(held_out) == 30
    assert {row["question"] for row in learned}.isdisjoint(row["question"] for row in held_out)
    assert 0.65 < sum(row["generator"] == "chain_sum" for row in learned) / 300 < 0.85
    assert learned == ReasoningGym(settings, size=300, held_out=30, seed=5).tasks()
    assert learned != ReasoningGym(settings, size=300, held_out=30, seed=6).tasks()


@pytest.mark.parametrize(
    ("generators", "named"),
    [("chain_sun", "chain_sum"), ({"chain_sum": {"max_term": 2}}, "chain_sum.*max_terms"),
     ({"chain_sum": {"size": 0}}, "chain_sum"), ([], "generators")],
)  # fmt: skip
def test_a_mistake_names_the_generator(generators, named):
    with pytest.raises(UserError, match=named):
        ReasoningGym(generators)


def test_a_run_takes_its_tasks_from_the_environment_that_is_named_as_its_agent(tmp_path):
    arguments = {"generators": "letter_counting", "size": 40, "held_out": 4, "instructions": None}
    characters = "".join(map(chr, range(32, 127))) + "\n"
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    result = rlinf.train(
        TINY, agent={"function": "reasoning_gym", "args": arguments}, tokenizer={"characters": characters}, steps=1,
        max_new_tokens=1, prompts_per_step=2, group_size=2, run_dir=tmp_path,
        **{"data.chat": True, "data.chat_template": template, "checkpoint.every": 0},
    )  # fmt: skip
    assert result.metrics[0]["episodes/failed"] == 0
    assert {row["episodes"] for row in result.metrics} == {4}
