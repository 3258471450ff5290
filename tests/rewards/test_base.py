"""Reward functions: how they are found, how their arguments are bound, how several are summed."""

import functools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.rewards.base import OFFERED, ByValue, Reward, Score, checked, load_reward, name_in_main, trusted
from rlinf.rewards.exact import exact

ROW = {"response": "12", "answer": "12", "prompt": "21>", "truncated": True, "response_ids": [7, 8]}


def value(function, args=None, **row):
    return Reward.of(function, args)({**ROW, **row}).value


def test_a_dotted_path_or_the_function_itself():
    assert load_reward("rlinf.rewards.exact") is exact
    assert load_reward("rlinf.rewards.exact.exact") is exact
    assert load_reward(exact) is exact


@pytest.mark.parametrize("path", ["rlinf.rewards.exact.exacd", "no.such.thing", "rlinf.rewards.exact.__name__"])
def test_a_path_to_nothing_is_named(path):
    with pytest.raises(ValueError, match=path):
        load_reward(path)


def test_arguments_are_bound_by_name():
    assert value(exact) == 1
    assert value(lambda prompt, truncated: len(prompt) + truncated) == 4
    assert value(lambda level, answer="x": level * len(answer), level=3) == 6
    assert value(lambda other=5: other) == 5
    assert value(lambda *, response: len(response)) == 2


def test_a_function_that_takes_everything_gets_everything_but_token_ids():
    seen = {}

    def all_of_it(response, **row):
        seen.update(row)
        return 1

    value(all_of_it, level=3)
    assert seen == {"answer": "12", "prompt": "21>", "truncated": True, "level": 3}


def test_token_ids_are_given_to_who_names_them():
    assert value(lambda response_ids: len(response_ids)) == 2
    assert value(lambda response_ids, **row: len(row)) == 4


def test_only_what_is_wanted_is_asked_for():
    assert Reward.of(exact).wanted == {"response", "answer"}
    assert Reward.of(lambda response, **row: 1).wanted is None
    assert Reward.of({"a": exact, "b": lambda level=1: 1}).wanted == {"response", "answer", "level"}


def test_a_column_that_is_not_there_is_named():
    def graded(response, level):
        return 1.0

    reward = Reward.of(graded)
    reward.check((*OFFERED, "level"))
    with pytest.raises(ValueError, match=r"graded .*\['level'\].*'answer', 'prompt'"):
        reward.check(OFFERED)


def test_arguments_of_the_configuration_win_over_columns():
    def scaled(response, scale, **row):
        assert "scale" not in row
        return scale

    assert value(scaled, {"scale": 3}, scale=7) == 3
    assert value(lambda response, scale=1: scale, {"scale": 3}, scale=7) == 3
    Reward.of(scaled, {"scale": 3}).check(OFFERED)


def test_an_argument_that_the_function_does_not_take_is_named():
    with pytest.raises(ValueError, match=r"exact .*\['scale'\].*\['response', 'answer'\]"):
        Reward.of(exact, {"scale": 3})


def test_a_function_that_takes_arguments_by_position_only_is_refused():
    def positional(response, /, answer):
        return 1.0

    with pytest.raises(ValueError, match="by position only"):
        Reward.of(positional)


@pytest.mark.parametrize("function", [len, max])
def test_a_builtin_is_to_be_wrapped(function):
    with pytest.raises(ValueError, match=f"{function.__name__} .*lambda response: {function.__name__}"):
        Reward.of(function)


def of_script(response, scale=1.0):
    """As if the script that runs had it, so that no other process can import it."""
    return scale * len(response)


of_script.__module__ = "__main__"
cached_of_script = functools.lru_cache(maxsize=7)(of_script)


def uses_the_cache(response):
    return cached_of_script(response)


uses_the_cache.__module__ = "__main__"
OF_SCRIPT = {
    "function": (of_script, 2),
    "partial": (functools.partial(of_script, scale=3.0), 6),
    "cache": (cached_of_script, 2),
    "partial of a cache": (functools.partial(cached_of_script, scale=4.0), 8),
    "function that calls a cache": (uses_the_cache, 2),
    "cache of a closure": (functools.lru_cache(lambda response: 5.0), 5),
}


@pytest.mark.parametrize("name", OF_SCRIPT)
def test_a_script_s_function_goes_to_other_processes_as_its_code_however_it_is_wrapped(name):
    function, expected = OF_SCRIPT[name]
    if "closure" not in name:
        assert name_in_main([function]) is not None
    sent = pickle.loads(pickle.dumps(ByValue.of(function)))
    assert value(sent) == expected
    assert sent.function is not function


def test_the_process_that_has_a_function_goes_on_to_use_it_itself():
    assert ByValue.of(of_script).function is of_script
    assert name_in_main(functools.partial(Scaled(2.0))) is None


class Scaled:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, response):
        return self.scale * len(response)


def test_a_class_is_made_once_with_the_arguments_and_its_object_is_called():
    assert value(Scaled, {"scale": 4}) == 8
    assert value(Scaled) == 2
    with pytest.raises(ValueError, match=r"Scaled.*\['sale'\]"):
        Reward.of(Scaled, {"sale": 4})


def test_what_a_class_takes_is_known_without_making_it():
    class Costly:
        def __init__(self):
            raise AssertionError("made")

        def __call__(self, response, level):
            return 1

    assert Reward.of(Costly, make=False).needed == {"response", "level"}


@pytest.mark.parametrize(
    "returned", [None, "a", "1.0", b"1", math.nan, math.inf, [], Score(math.nan), Score(1, {"part": math.nan})]
)
def test_only_finite_numbers_are_rewards(returned):
    with pytest.raises(ValueError, match=r"reward.*number"):
        checked("exact", returned)


def test_whatever_converts_to_a_number_is_one():
    numpy = pytest.importorskip("numpy")
    assert checked("r", True) == Score(1.0)
    assert checked("r", numpy.float32(0.5)) == Score(0.5)
    assert checked("r", Score(numpy.int64(2), {"p": numpy.float32(0.5)}, 7)) == Score(2.0, {"p": 0.5}, "7")


def test_async_functions_and_objects_are_recognised():
    class Slow:
        async def __call__(self, response):
            return 1.0

    async def slow(response):
        return 1.0

    assert Reward.of(slow).is_async
    assert Reward.of(Slow()).is_async
    assert Reward.of(Slow).is_async
    assert Reward.of(slow, {}).is_async
    assert not Reward.of(exact).is_async


async def test_async_and_plain_parts_are_summed_together():
    async def slow(response):
        return 3

    score = await Reward.of({"slow": slow, "exact": {"function": exact, "weight": 0.5}})(ROW)
    assert score == Score(3.5, {"slow": 3.0, "exact": 1.0})


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1))
def test_several_rewards_are_a_weighted_sum_with_parts_by_name(parts):
    source = {name: {"function": lambda x=v: x, "weight": w} for name, (v, w) in parts.items()}
    score = Reward.of(source)(ROW)
    assert score.value == pytest.approx(math.fsum(v * w for v, w in parts.values()), abs=1e-9)
    assert score.scores == {name: v for name, (v, _) in parts.items()}


def test_parts_of_parts_and_the_first_extracted_answer_are_kept():
    def two(response):
        return Score(1, {"units": 0.5}, "x")

    score = Reward.of({"exact": "rlinf.rewards.exact", "two": two})(ROW)
    assert score == Score(2.0, {"exact": 1.0, "two": 1.0, "two/units": 0.5}, "x")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({}, "no part"),
        ({"a": {"weight": 1}}, r"names.*`function`"),
        ({"a": {"function": exact, "wieght": 1}}, "wieght"),
        ({"a": {"function": exact, "weight": "1"}}, "weight '1'"),
        ({"a": {"function": exact, "weight": math.nan}}, "weight nan"),
        ({"a": "no.such"}, "no.such"),
    ],
)
def test_a_sum_that_is_said_wrongly_is_refused(source, text):
    with pytest.raises(ValueError, match=text):
        Reward.of(source)


def test_arguments_belong_to_a_part_and_not_to_the_sum():
    with pytest.raises(ValueError, match=r"each part"):
        Reward.of({"a": exact}, {"b": 1})


def test_a_sum_is_trusted_if_all_parts_are():
    @trusted
    def sure(response):
        return 1

    assert Reward.of(sure).trusted
    assert Reward.of({"a": exact, "b": sure}).trusted
    assert not Reward.of({"a": exact, "b": lambda response: 1}).trusted
    assert not Reward.of("rlinf.rewards.regex", {"pattern": "a"}).trusted
