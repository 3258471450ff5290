"""Reward functions written for verl or TRL, as reward functions of ours.

A function whose parameters have the other framework's names is adapted without asking; `verl(function)` and
`trl(function)` say it explicitly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlinf.rewards.score import NOT_APPLICABLE, Score, as_list, as_number

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_TRL_ONLY = ("prompts", "completions", "completion_ids", "trainer_state")


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, adapted if its parameters are verl's (`solution_str`, `ground_truth`) or TRL's (`completions`)."""
    if isinstance(function, verl | trl):
        return function
    names = inspect.signature(function).parameters
    if "solution_str" in names and "ground_truth" in names:
        return verl(function)
    return trl(function) if "completions" in names else function


class verl:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`, which returns a number or a dict.

    The ground truth is the column `reward_model.ground_truth` as it is, or else the answer. Of a dict, `score` is the
    reward, `pred` what was extracted, and the other numbers are parts of the score.

    Args:
        function: what to call.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        inner = inspect.signature(function).parameters
        self._names = set(inner)
        self._all = _takes_all(inner.values())
        more = {name: p for name, p in inner.items() if name not in ("solution_str", "ground_truth", "extra_info")}
        required = {"response": inspect.Parameter.empty, "answer": inspect.Parameter.empty, "reward_model": None}
        self.__signature__ = _signature({**required, "extra_info": None}, more.values())

    def __call__(self, response: str, answer: str, **row: Any) -> Any:
        """Call it for one sample."""
        model = row.pop("reward_model", None)
        truth = model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else answer
        given = {"extra_info": None, **row, "solution_str": response, "ground_truth": truth}
        value = self.function(**{name: item for name, item in given.items() if self._all or name in self._names})
        return self._awaited(value) if inspect.isawaitable(value) else self._score(value)

    async def _awaited(self, value: Any) -> Any:
        return self._score(await value)

    def _score(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "score" not in value:
            raise ValueError(f"reward {self.__name__} returned {value!r:.200} without `score`, which is the reward")
        others = {name: as_number(item) for name, item in value.items() if name not in ("score", "pred")}
        numbers = {name: number for name, number in others.items() if number is not None}
        predicted = value.get("pred")
        return Score(value["score"], numbers, None if predicted is None else str(predicted))


class trl:
    """`reward(prompts, completions, **columns) -> list[float]`, called with lists of one.

    Prompts and completions are texts, or lists of messages where the data set's prompts are chats. The scores may be a
    list, a tensor or an array; None among them means that the function does not apply, and the others are summed.
    Functions that compare the completions of a prompt with each other are marked by `over_group`: they get all of them.

    Args:
        function: what to call.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        inner = inspect.signature(function).parameters
        self._names = set(inner)
        self._all = _takes_all(inner.values())
        self.__over_group__ = getattr(function, "__over_group__", False)
        response = "responses" if self.__over_group__ else "response"
        own: dict[str, Any] = {response: inspect.Parameter.empty, "prompt": "", "messages": None}
        if "completion_ids" in inner:
            own["response_ids"] = ()
        self.__signature__ = _signature(own, [p for name, p in inner.items() if name not in _TRL_ONLY])

    def __call__(
        self, response: str = "", prompt: str = "", messages: Any = None, responses: Any = None, **row: Any
    ) -> Any:
        """Call it for one sample, or for a group."""
        chat, texts = messages is not None, [response] if responses is None else responses
        ids = row.pop("response_ids", [] if responses is None else [[]] * len(texts))
        given: dict[str, Any] = {name: [value] * len(texts) for name, value in row.items() if name != "truncated"}
        if "truncated" in row:
            given["truncated"] = [row["truncated"]] if responses is None else row["truncated"]
        given["prompts"] = [messages if chat else prompt] * len(texts)
        given["completions"] = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        given["completion_ids"] = [ids] if responses is None else ids
        given["trainer_state"] = None  # TRL's own state: there is none here
        value = self.function(**{name: item for name, item in given.items() if self._all or name in self._names})
        read = _first if responses is None else _of_group
        return _awaited(value, read) if inspect.isawaitable(value) else read(value)


def _takes_all(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _signature(own: Mapping[str, Any], more: Iterable[inspect.Parameter]) -> inspect.Signature:
    """Keyword parameters: `own` with their defaults, then those of the adapted function that are columns."""
    parameters = {name: inspect.Parameter(name, _KEYWORD, default=default) for name, default in own.items()}
    rest = []
    for parameter in more:
        if parameter.kind is parameter.VAR_KEYWORD:
            rest.append(parameter)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            parameters[parameter.name] = parameter.replace(kind=_KEYWORD)
    return inspect.Signature([*parameters.values(), *rest])


def _first(value: Any) -> Any:
    scores = as_list(value)
    if scores is None or len(scores) != 1:
        raise ValueError(f"expected a list of one reward for one completion, got {value!r:.200}")
    return _applicable(scores)[0]


def _applicable(scores: list[Any]) -> list[Any]:
    """TRL's scores, with `NOT_APPLICABLE` in place of its None."""
    return [NOT_APPLICABLE if score is None else score for score in scores]


def _of_group(value: Any) -> Any:
    scores = as_list(value)
    return value if scores is None else _applicable(scores)


async def _awaited(value: Any, read: Callable[[Any], Any]) -> Any:
    return read(await value)
