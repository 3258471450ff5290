"""Generated tasks and the supply of prompts."""

import numpy as np
import pytest

from rlinf.data.tasks import PromptStream, examples, make_task, prompts
from rlinf.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def sorting():
    return make_task("sort", digits=4)


@pytest.fixture(scope="module")
def tokenizer(sorting):
    return load_tokenizer(sorting.tokenizer)


def test_sorting_asks_for_the_digits_in_order(sorting):
    for problem in sorting.train[:50]:
        assert problem.text[-1] == ">"
        assert problem.answer == "".join(sorted(problem.text[:-1]))


def test_copying_asks_for_the_same():
    assert all(problem.answer == problem.text[:-1] for problem in make_task("copy", digits=3).train)


def test_held_out_problems_are_never_trained_on(sorting):
    train, held = {p.text for p in sorting.train}, {p.text for p in sorting.held_out}
    assert len(held) == 500
    assert not train & held
    assert len(train | held) == 10_000


def test_the_seed_draws_what_is_held_out(sorting):
    assert make_task("sort", digits=4).held_out == sorting.held_out
    assert make_task("sort", digits=4, seed=1).held_out != sorting.held_out


def test_a_task_too_small_to_spare_any_is_evaluated_on_itself():
    task = make_task("copy", digits=1)
    assert len(task.train) == 10
    assert task.held_out == task.train


def test_small_tasks_hold_out_a_fifth_at_most():
    task = make_task("sort", digits=2)
    assert (len(task.train), len(task.held_out)) == (80, 20)


def test_long_problems_are_drawn_and_not_enumerated():
    task = make_task("sort", digits=9)
    assert (len(task.train), len(task.held_out)) == (100_000, 500)
    assert len({p.text for p in (*task.train, *task.held_out)}) == 100_500


@pytest.mark.parametrize(("name", "digits", "text"), [("sorts", 4, "meant 'sort'"), ("sort", 0, "digits=0")])
def test_what_cannot_be_made_is_said(name, digits, text):
    with pytest.raises(ValueError, match=text):
        make_task(name, digits=digits)


def test_each_pass_shows_every_problem_once_in_another_order(tokenizer):
    task = make_task("copy", digits=2)
    stream = PromptStream(task.train, tokenizer, seed=3)
    first, second = stream.take(80), stream.take(80)
    assert {p.text for p in first} == {p.text for p in second} == {p.text for p in task.train}
    assert [p.text for p in first] != [p.text for p in second]
    assert [p.id for p in first + second] == list(range(160))


def test_a_stream_goes_on_from_its_position(sorting, tokenizer):
    stream = PromptStream(sorting.train, tokenizer, seed=5)
    stream.take(9_470)
    expected = stream.take(100)  # over the end of a pass
    resumed = PromptStream(sorting.train, tokenizer, seed=5)
    resumed.position = 9_470
    assert [(p.id, p.text) for p in resumed.take(100)] == [(p.id, p.text) for p in expected]


def test_seeds_give_different_orders(sorting, tokenizer):
    a, b = (PromptStream(sorting.train, tokenizer, seed=seed).take(20) for seed in (0, 1))
    assert [p.text for p in a] != [p.text for p in b]


def test_a_stream_of_nothing_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no problem"):
        PromptStream((), tokenizer)


def test_examples_are_the_whole_text_with_an_end_token(sorting, tokenizer):
    asked = prompts(sorting.held_out[:3], tokenizer)
    for prompt, example in zip(asked, examples(asked, tokenizer), strict=True):
        text = tokenizer.decode(np.concatenate([example.prompt_ids, example.response_ids]))
        assert text == prompt.text + prompt.answer + "<eos>"
        assert len(example.prompt_ids) == 1  # a first token cannot be predicted from anything
        assert example.response_ids.dtype == np.int64


def test_nothing_gives_nothing(tokenizer):
    assert prompts([], tokenizer) == []
    assert examples([], tokenizer) == []
