"""Generated tasks."""

import pytest

from rlinf.data.datasets.prompts import Drawn
from rlinf.data.datasets.toy_tasks import make_task, prompts, rows_of, task_maker
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


@pytest.mark.parametrize("digits", [1, 4])
def test_none_are_held_out_and_none_evaluated_on_where_none_are_asked(digits):
    task = make_task("copy", digits=digits, held_out=0)
    assert (len(task.train), task.held_out) == (10**digits, ())


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


def test_training_problems_are_rows_like_any_other(sorting, tokenizer):
    rows = rows_of(sorting)
    assert len(rows) == len(sorting.train)
    problem = sorting.train[5]
    assert rows[5] == {"prompt": problem.text, "answer": problem.answer}
    (prompt,) = task_maker(tokenizer).make([Drawn(3, 5, rows[5], rows.where(5))]).prompts
    assert (prompt.id, prompt.text, prompt.answer, prompt.row) == (3, problem.text, problem.answer, {})


def test_held_out_problems_become_prompts_numbered_in_their_order(sorting, tokenizer):
    made = prompts(sorting.held_out[:3], tokenizer)
    assert [(p.id, p.text, p.answer) for p in made] == [
        (i, problem.text, problem.answer) for i, problem in enumerate(sorting.held_out[:3])
    ]
    assert tokenizer.decode(made[0].token_ids) == made[0].text
    assert prompts([], tokenizer) == []
