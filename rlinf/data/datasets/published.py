"""Reads benchmarks that are published in a form of their own: several files that belong together.

In: a directory, or a name on the hub. Out: rows with a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.importing import looks_local
from rlinf.config.reading import parse_json
from rlinf.data.datasets.source import DataError, Iterated, ListRows, Row, Rows, open_rows

_BBH = [
    "boolean_expressions",
    "causal_judgement",
    "date_understanding",
    "disambiguation_qa",
    "dyck_languages",
    "formal_fallacies",
    "geometric_shapes",
    "hyperbaton",
    "logical_deduction_five_objects",
    "logical_deduction_seven_objects",
    "logical_deduction_three_objects",
    "movie_recommendation",
    "multistep_arithmetic_two",
    "navigate",
    "object_counting",
    "penguins_in_a_table",
    "reasoning_about_colored_objects",
    "ruin_names",
    "salient_translation_error_detection",
    "snarks",
    "sports_understanding",
    "temporal_sequences",
    "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects",
    "tracking_shuffled_objects_three_objects",
    "web_of_lies",
    "word_sorting",
]
"""Tasks of BIG-Bench Hard, as its authors name them."""
_STEPS = "A: Let's think step by step."
_FINISH = 'Finish with "So the answer is", the answer in the form of the question, and a full stop.'
_CALLED = ("simple_python", "simple", "multiple", "parallel", "parallel_multiple")
_LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
_UNCALLED = ("irrelevance", "live_irrelevance", "live_relevance")
_FUNCTIONS = (
    "You are an expert in composing functions.You are given a question and a set of possible functions. Based "
    "on the question, you will need to make one or more function/tool calls to achieve the purpose. If none of "
    "the functions can be used, point it out. If the given question lacks the parameters required by the "
    "function, also point it out.\n\n"
    "You should only return the function calls in your response.\n\n"
    "If you decide to invoke any of the function(s), you MUST put it in the format of "
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)].  You SHOULD "
    "NOT include any other text in the response.\n\n"
    "At each turn, you should try your best to complete the tasks requested by the user within the current "
    "turn. Continue to output functions to call until you have fulfilled the user's request to the best of your"
    " ability. Once you have no more functions to call, the system will consider the current turn complete and "
    "proceed to the next turn or task.\n\n"
    "Here is a list of functions in json format that you can invoke.\n"
)
"""How the leaderboard asks models that are not trained for calls, word for word and with its missing space."""
_PYTHON = " Note that the provided function is in Python 3 syntax."


def big_bench_hard(source: str, split: str) -> Rows:
    """The 27 tasks: `task`, `input`, `target` and `prompt`.

    With its authors' three worked problems of each task where there are, that is in a clone of their repository, which
    has `bbh/TASK.json` and `cot-prompts/TASK.txt`; elsewhere (TASK.jsonl and the like, a folder or hub subset of each)
    the problem is asked alone.

    Args:
        source: a directory, or a name on the hub.
        split: of a folder or hub subset.

    Raises:
        DataError: a task is missing or cannot be read.
    """
    place = Path(source).expanduser()
    rows: list[Row] = []
    for task in _BBH:
        worked = place / "cot-prompts" / f"{task}.txt"
        examples = worked.read_text(encoding="utf-8").partition("-----")[2].strip() if worked.is_file() else ""
        for row in _task_rows(place, source, task, split):
            _check(row, f"{source}, {task}: a row", input=str, target=str)
            alone = f"{row['input']}\n\nLet's think step by step. {_FINISH}"
            prompt = f"{examples}\n\nQ: {row['input']}\n{_STEPS}" if examples else alone
            rows.append({"task": task, "input": row["input"], "target": row["target"], "prompt": prompt})
    return ListRows(source, rows)


def _task_rows(place: Path, source: str, task: str, split: str) -> Iterator[Any]:
    if not place.is_dir():
        if place.is_file() or looks_local(source):
            raise DataError(f"{source} is no directory: name that of the 27 tasks")
        yield from _rows(f"{source}:{task}", split)
        return
    own = place / "bbh" / f"{task}.json"
    if own.is_file():
        content = _parsed(own.read_bytes(), str(own))
        _check(content, str(own), examples=list)
        yield from content["examples"]
        return
    there = sorted(each for each in place.glob(f"{task}*") if each.name.split(".")[0] == task)
    if not there:
        raise DataError(
            f"{source} has neither bbh/{task}.json, as the authors' repository has, nor {task}.jsonl, {task}.parquet "
            f"or a folder {task}"
        )
    yield from _rows(str(there[0]), split)


def _rows(source: str, split: str) -> Iterator[Row]:
    rows = open_rows(source, split=split)
    assert not isinstance(rows, Iterated)  # neither a file nor a subset is
    return (rows[index] for index in range(len(rows)))


def function_calling(source: str, split: str) -> Rows:
    """The problems of one turn and in Python of the Berkeley function-calling leaderboard, its third version or fourth:
    `id`, `category`, `prompt`, `function` and `ground_truth`.

    Args:
        source: the directory `bfcl_eval/data` of the package bfcl-eval, or one with the same files.
        split: not used, there is one.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    place, rows = Path(source).expanduser(), list[Row]()
    files = sorted(place.glob("BFCL_v*_*.json"))
    for category in (*_CALLED, *_LIVE, *_UNCALLED):
        path = next(
            (each for each in files if each.name.partition("_v")[2].partition("_")[2] == f"{category}.json"), None
        )
        if path is None and category in ("simple", "simple_python"):
            continue  # the third version's name, or the fourth's
        if path is None:
            raise DataError(
                f"{source} is no directory with a BFCL_v4_{category}.json; `pip download --no-deps bfcl-eval` brings a "
                "wheel, which unzips to it: name its bfcl_eval/data"
            )
        truths = _lines(place / "possible_answer" / path.name, id=str, ground_truth=list)
        right = {} if category in _UNCALLED else {row["id"]: row["ground_truth"] for row in truths}
        for row in _lines(path, id=str, question=list, function=list):
            truth = right.get(row["id"], [])
            if not truth and category not in _UNCALLED:
                raise DataError(f"{path}: possible_answer/{path.name} has no answer to {row['id']}")
            if not (row["question"] and row["question"][0]):
                raise DataError(f"{path}: {row['id']} asks nothing")
            own = {"id": row["id"], "category": category, "function": row["function"], "ground_truth": truth}
            rows.append({**own, "prompt": _with_functions(row["question"][0], row["function"])})
    if not any(row["category"] in _CALLED[:2] for row in rows):
        raise DataError(f"{source} has no BFCL_v4_simple_python.json")
    return ListRows(source, rows)


def _with_functions(messages: list[dict[str, str]], functions: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A conversation that begins with the functions."""
    described = [{**each, "description": each["description"] + _PYTHON} for each in functions]
    system = f"{_FUNCTIONS}{json.dumps(described, indent=4)}\n"
    if messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{system}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": system}, *messages]


def _lines(path: Path, **columns: type) -> Iterator[Any]:
    """The rows of a file with one on each line, whatever its name ends in, which have such columns."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = _parsed(line, f"{path}, line {number}")
                    _check(row, f"{path}, line {number}", **columns)
                    yield row
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _check(row: Any, where: str, **columns: type) -> None:
    for name, kind in columns.items():
        if not isinstance(row, Mapping) or not isinstance(row.get(name), kind):
            raise DataError(f"{where} has no {name}, or one that is no {kind.__name__}")


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from error


FORMS: Mapping[str, Callable[[str, str], Rows]] = {"bbh": big_bench_hard, "bfcl": function_calling}
"""Functions that read a benchmark, of where it is and which split, by the name of its form."""
