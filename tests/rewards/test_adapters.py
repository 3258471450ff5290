"""Reward functions as other frameworks write them."""

import numpy
import pytest
import torch

from rlinf.rewards import base
from rlinf.rewards.base import OFFERED, Reward, Score, Scorer, over_group

ROW = {"response": "12", "answer": "12", "prompt": "21>", "truncated": False, "response_ids": [7, 8]}


def score(function, args=None, **row):
    return Reward.of(function, args)({**ROW, **row})


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    bonus = (extra_info or {}).get("bonus", 0)
    return float(solution_str == ground_truth) + bonus + (data_source == "gsm8k")


def test_verl_s_signature_is_recognised():
    assert score(compute_score, data_source="math").value == 1
    assert score(compute_score, data_source="gsm8k", extra_info={"bonus": 3}).value == 5


def test_verl_s_ground_truth_stays_as_it_is_in_the_data():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return solution_str in ground_truth

    assert score(compute_score, data_source="d", reward_model={"ground_truth": ["11", "12"]}).value == 1


def test_a_column_that_verl_s_function_needs_is_missed_at_once():
    with pytest.raises(ValueError, match=r"compute_score takes \['data_source'\]"):
        Reward.of(compute_score).check(OFFERED)


def test_verl_s_dict_becomes_a_score_with_parts():
    def compute_score(solution_str, ground_truth, **kwargs):
        assert kwargs["level"] == 2
        return {"score": 0.5, "acc": True, "pred": "12", "note": "text"}

    assert score(compute_score, level=2) == Score(0.5, {"acc": 1.0}, "12")


async def test_verl_s_async_function_with_arguments_of_its_own():
    async def compute_score(solution_str, ground_truth, scale):
        return {"score": scale}

    reward = Reward.of(compute_score, {"scale": 3})
    assert reward.is_async
    assert (await reward(ROW)).value == 3


def test_trl_s_signature_gets_lists_of_one():
    def reward(prompts, completions, level, **kwargs):
        assert prompts == ["21>"]
        assert kwargs["answer"] == ["12"]
        return [level[0] * len(c) for c in completions]

    assert score(reward, level=4).value == 8


def test_trl_s_chats_are_lists_of_messages():
    messages = [{"role": "user", "content": "sort 21"}]

    def reward(completions, prompts, completion_ids, trainer_state=None):
        assert prompts == [messages]
        assert completions == [[{"role": "assistant", "content": "12"}]]
        return [len(completion_ids[0])]

    assert score(reward, messages=messages).value == 2


def test_a_column_that_trl_s_function_needs_is_missed_at_once():
    def reward(completions, solution):
        return [0.0]

    with pytest.raises(ValueError, match=r"takes \['solution'\]"):
        Reward.of(reward).check(OFFERED)


def test_trl_s_arguments_of_the_configuration_are_no_columns():
    def reward(completions, scale, **kwargs):
        assert "scale" not in kwargs
        return [scale]

    assert score(reward, {"scale": 3}, scale=5).value == 3


async def test_trl_s_async_function():
    async def reward(completions, **kwargs):
        return [0.25]

    assert (await score(reward)).value == 0.25


@pytest.mark.parametrize(
    "made", [list, tuple, torch.tensor, numpy.array, lambda scores: torch.tensor(scores)[:, None][:, 0]]
)
def test_trl_s_scores_may_be_a_tensor_or_an_array(made):
    assert score(lambda completions: made([0.5])).value == 0.5
    both = Scorer(over_group(lambda completions, **_: made([0.5, 1.5])))
    verdict = both.one({**ROW, "responses": ["1", "2"], "truncated": [False, False], "response_ids": [[7], [8]]})
    assert [member.value for member in verdict.members] == [0.5, 1.5]


def test_none_of_a_trl_function_leaves_the_sum_to_the_others():
    parts = {"maths": lambda completions: [None], "form": {"function": lambda completions: [0.5], "weight": 2}}
    assert score(parts) == Score(1.0, {"form": 0.5})
    with pytest.raises(ValueError, match=r"\+.*returned None.*nothing"):
        score({"maths": lambda completions: [None], "code": lambda completions: [None]})
    group = Scorer({"maths": over_group(lambda completions, **_: [None, 2.0]), "form": lambda response: 1.0})
    members = group.one(
        {**ROW, "responses": ["1", "2"], "truncated": [False, False], "response_ids": [[7], [8]]}
    ).members
    assert [member.value for member in members] == [1.0, 3.0]


def test_none_of_a_function_of_ours_is_a_forgotten_return():
    with pytest.raises(ValueError, match=r"returned None.*finite"):
        score({"judge": lambda response: None, "form": lambda response: 1.0})


def test_verl_s_dict_without_a_score_is_told_as_that():
    def graded(solution_str, ground_truth):
        return {"acc": 1.0}

    with pytest.raises(ValueError, match=r"\{'acc': 1.0\}.*`score`"):
        score(graded)


def test_parts_of_verl_s_dict_may_be_numpy_s_or_torch_s():
    parts = {"acc": numpy.float32(1), "n": numpy.int64(3), "t": torch.tensor(2), "note": "12", "all": [1]}
    given = score(lambda solution_str, ground_truth: {"score": numpy.float32(0), **parts})
    assert given == Score(0.0, {"acc": 1.0, "n": 3.0, "t": 2.0})


@pytest.mark.parametrize("returned", [[None], [1.0, 2.0], 1.0, "1", ["1.0"], torch.ones(1, 1)])
def test_what_trl_s_function_may_not_return(returned):
    with pytest.raises(ValueError, match=r"finite number|list of"):
        score(lambda completions: returned)


def test_adapters_can_be_named_explicitly():
    assert score(base.verl(lambda solution_str: len(solution_str))).value == 2
    assert score(base.trl(lambda prompts: [len(prompts[0])])).value == 3
