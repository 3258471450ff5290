"""Multiple choice."""

import pytest

from rlinf.data.datasets.source import DataError, lettered

OPTIONS = ["red", "green", "blue"]
LINES = "A) red\nB) green\nC) blue"


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (OPTIONS, 1),
        (OPTIONS, "B"),
        (OPTIONS, "green"),
        ({"A": "red", "B": "green", "C": "blue"}, "B"),
        ({"label": ["1", "2", "3"], "text": OPTIONS}, "2"),
        ({"label": ["1", "2", "3"], "text": OPTIONS}, "green"),
    ],
)
def test_options_get_letters_and_the_answer_becomes_one(options, answer):
    assert lettered(options, answer, "row 1") == (LINES, "B")


def test_an_option_that_reads_like_a_letter_is_taken_as_the_text_it_is():
    assert lettered(["B", "A", "C"], "A", "row 1")[1] == "B"


def test_shuffled_options_keep_the_right_one_right():
    letters = set()
    for key in range(30):
        lines, letter = lettered(OPTIONS, 0, "row 1", shuffle=key)
        assert f"{letter}) red" in lines.splitlines()
        assert sorted(line[3:] for line in lines.splitlines()) == sorted(OPTIONS)
        letters.add(letter)
    assert letters == {"A", "B", "C"}


@pytest.mark.parametrize(("options", "answer"), [(OPTIONS, 3), (OPTIONS, "D"), (OPTIONS, None), (["a", "a"], "a")])
def test_an_answer_that_is_none_of_the_options_is_refused(options, answer):
    with pytest.raises(DataError, match=r"1:.*answer.*none"):
        lettered(options, answer, "row 1")


def test_options_are_a_list():
    with pytest.raises(DataError, match=r"options.*list"):
        lettered("red, green", "A", "row 1")
