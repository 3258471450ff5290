"""Scores of IFEval and of the leaderboard of function calls beside those of the packages that others evaluate with.

Both packages are asked for what scores alone: what they import besides, models and clients of theirs, is stood in for.
"""

import json
import os
import random
import subprocess

import pytest

from rlinf.data.datasets.published import function_calling
from rlinf.rewards.instructions import _CHECKS
from tests.launching import ROOT

PYTHON = ROOT / ".venv-evaluations" / "bin" / "python"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no lm-eval and bfcl-eval here; `make evaluations` brings them"),
]

INSTRUCTIONS = """
import json, sys, types
from pathlib import Path
import nltk
from nltk.tokenize.punkt import PunktTrainer, save_punkt_params
cases, folder = json.load(sys.stdin)
where = Path(folder) / "tokenizers" / "punkt_tab" / "english"
where.parent.mkdir(parents=True)
trained = PunktTrainer("Dr. Roe met Mr. Poe. Dr. Poe left. Mr. Roe met Dr. Poe at 5 p.m. in Rome. " * 30)
save_punkt_params(trained.get_params(), str(where))
nltk.data.path[:] = [folder]
import importlib.util
place = Path(importlib.util.find_spec("lm_eval").submodule_search_locations[0])
for name, path in (("lm_eval", place), ("lm_eval.tasks", place / "tasks")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(path)]
import langdetect
langdetect.DetectorFactory.seed = 0
from lm_eval.tasks.ifeval.utils import process_results
from rlinf.rewards.instructions import instructions
told = []
for row, said in cases:
    theirs = process_results(row, [said])
    ours = instructions(said, row["instruction_id_list"], row["kwargs"])
    told.append([[float(theirs["prompt_level_strict_acc"]), float(theirs["prompt_level_loose_acc"])],
                 [ours.value, ours.scores["loose"]]])
print(json.dumps(told))
"""
CALLS = """
import json, sys, types
from collections import defaultdict
stub = types.ModuleType("bfcl_eval.constants.model_config")
stub.MODEL_CONFIG_MAPPING = defaultdict(lambda: types.SimpleNamespace(underscore_to_dot=False))
sys.modules[stub.__name__] = stub
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.model_handler.utils import default_decode_ast_prompting, system_prompt_pre_processing_chat_model
from bfcl_eval.utils import is_empty_output, load_dataset_entry
cases, categories = json.load(sys.stdin)
asked = {}
for category in categories:
    for entry in load_dataset_entry(category):
        said = system_prompt_pre_processing_chat_model(entry["question"][0], entry["function"], entry["id"])
        asked[entry["id"]] = said
from rlinf.rewards.function_calls import function_calls
told = []
for row, said in cases:
    try:
        calls = default_decode_ast_prompting(said)
    except Exception:
        calls = None
    if "relevance" in row["category"]:
        right = (calls is None or is_empty_output(calls)) == ("irrelevance" in row["category"])
    else:
        right = calls is not None and ast_checker(
            row["function"], calls, row["ground_truth"], Language.PYTHON, row["category"], "any")["valid"]
    told.append([float(right), function_calls(said, row["category"], row["function"], row["ground_truth"]).value])
print(json.dumps([asked, told]))
"""
WORDS = [
    "The",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "Rome",
    "was",
    "not",
    "built",
    "in",
    "a",
    "day",
    "so",
    "we",
    "went",
    "home",
    "by",
    "train",
]
FOREIGN = (
    "Der Hund schläft heute den ganzen Tag im warmen Garten hinter dem Haus.",
    "Le chat dort toute la journée dans le jardin derrière la maison.",
    "This is plainly a sentence of the English language, and nothing else.",
    "12345",
)
PIECES = (
    *("* one point", "- another point", "***", "******", "*short*", "**bold words**", "****", "** **", "[name]", "[]"),
    *("<<A title>>", "<< >>", "P.S. write soon", "p. p. s. more", "P.P.S. and more", "SECTION 1", "Section 2 of it"),
    *(
        '{"a": 1}',
        "```json\n[1, 2]\n```",
        '"',
        "My answer is no.",
        "Any other questions?",
        "NASA AND THE U.S. IN ROME",
        "",
    ),
    *("Dr. Roe left at 5 p.m. Mr. Poe stayed.", "Is it? Yes! No.", "write a poem", "'rome, again", *FOREIGN),
)


def _said(random_):
    pieces = [
        random_.choice([*PIECES, " ".join(random_.choices(WORDS, k=5)) + "."]) for _ in range(random_.randint(0, 8))
    ]
    text = random_.choice(["\n", "\n\n", " "]).join(pieces)
    turn = random_.choice(
        [str, str, str, str.upper, str.lower, lambda each: f'"{each}"', lambda each: f"Sure:\n{each}\nBye"]
    )
    return turn(text)


def _asks(kind, random_):
    """What an instruction asks for, so low that about as many answers do it as do not."""
    few, sides = random_.randint(1, 4), random_.choice(["less than", "at least"])
    words = random_.sample(["cat", "rome", "train", "the", "was"], 2)
    return {
        "keywords:existence": {"keywords": words[: random_.randint(1, 2)]},
        "keywords:frequency": {"keyword": words[0], "frequency": few, "relation": sides},
        "keywords:forbidden_words": {"forbidden_words": words},
        "keywords:letter_frequency": {"letter": "o", "let_frequency": 2 * few, "let_relation": sides},
        "language:response_language": {"language": random_.choice(["de", "fr", "en"])},
        "length_constraints:number_sentences": {"num_sentences": few, "relation": sides},
        "length_constraints:number_paragraphs": {"num_paragraphs": few},
        "length_constraints:number_words": {"num_words": 5 * few, "relation": sides},
        "length_constraints:nth_paragraph_first_word": {
            "num_paragraphs": few,
            "nth_paragraph": random_.randint(1, few),
            "first_word": random_.choice(["the", "Rome"]),
        },
        "detectable_content:number_placeholders": {"num_placeholders": 1},
        "detectable_content:postscript": {"postscript_marker": random_.choice(["P.S.", "P.P.S"])},
        "detectable_format:number_bullet_lists": {"num_bullets": 1},
        "detectable_format:number_highlighted_sections": {"num_highlights": random_.randint(1, 3)},
        "detectable_format:multiple_sections": {
            "section_spliter": random_.choice(["Section", "SECTION"]),
            "num_sections": 1,
        },
        "combination:repeat_prompt": {"prompt_to_repeat": "Write a poem"},
        "startend:end_checker": {"end_phrase": random_.choice(["Any other questions?", "No."])},
        "change_case:capital_word_frequency": {"capital_frequency": few, "capital_relation": sides},
    }.get(kind, {})


FITTING = {
    "length_constraints:nth_paragraph_first_word": "Rome was.\n\nRome? no\n\n'rome, again",
    "combination:two_responses": "one\n******\ntwo",
    "combination:repeat_prompt": "write a POEM\nRome",
    "detectable_format:json_format": '```json\n{"a": [1]}\n```',
    "change_case:english_capital": FOREIGN[2].upper(),
    "change_case:english_lowercase": FOREIGN[2].lower(),
    "startend:end_checker": "Well. Any other questions? ",
}
"""Answers that are seldom made of random pieces."""


def _beside(program, *data):
    """Run a program where the packages are; what it prints, as JSON."""
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, "-c", program], input=json.dumps(data), capture_output=True, text=True, cwd="/", env=where
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_kind_of_instruction_is_followed_where_the_harness_says_so(tmp_path):
    random_, cases = random.Random(0), []
    for kind in _CHECKS:
        for number in range(60):
            row = {"key": number, "prompt": "?", "instruction_id_list": [kind], "kwargs": [_asks(kind, random_)]}
            if number % 6 == 5:  # two of them, and the keys that a table fills with None
                other = random_.choice([*_CHECKS])
                row["instruction_id_list"].append(other)
                row["kwargs"].append({"num_words": None, "language": None, **_asks(other, random_)})
            fitting = FITTING.get(kind)
            cases.append((row, fitting if fitting and number % 4 == 0 else _said(random_)))
    told = _beside(INSTRUCTIONS, cases, str(tmp_path / "nltk"))
    assert [(case, each) for case, each in zip(cases, told, strict=True) if each[0] != each[1]] == []
    assert len(told) >= 1500
    seen = {(*row["instruction_id_list"], strict) for (row, _), ((strict, _), _) in zip(cases, told, strict=True)}
    assert [kind for kind in _CHECKS if not {(kind, 0.0), (kind, 1.0)} <= seen] == [], (
        "the answers tell nothing of them"
    )


def _written(call, random_):
    """A call as a model may write it, right or nearly so."""
    ((name, right),) = call.items()
    given = {}
    for each, values in right.items():
        if not values:  # nothing is right of it, by an oversight of the leaderboard's
            continue
        value = random_.choice(values)
        if value == "" and random_.random() < 0.9:
            continue
        given[each] = _spoilt(value, random_) if random_.random() < 0.15 else _shown(value, random_)
    if random_.random() < 0.05:
        given["more"] = "1"
    if given and random_.random() < 0.05:
        given.pop(next(iter(given)))
    arguments = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"{name if random_.random() < 0.95 else name + '_x'}({arguments})"


def _shown(value, random_):
    """A right value in Python's notation; those of mappings are lists of which one is taken."""
    if isinstance(value, dict):
        chosen = {key: random_.choice(items) for key, items in value.items() if isinstance(items, list) and items}
        return "{" + ", ".join(f"{key!r}: {_shown(item, random_)}" for key, item in chosen.items() if item != "") + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(item, random_) for item in value) + "]"
    if isinstance(value, str) and random_.random() < 0.3:
        value = random_.choice([value.upper(), value.replace(" ", ", "), value.replace("-", " "), f"{value}."])
    return repr(value)


def _spoilt(value, random_):
    return random_.choice(
        [repr(str(value)), "None", "[1, 'a']", "{'a': 1}", "3 + 4", "-2.5", "(1, 2)", "name", "f(x)", f"[{value!r}]"]
    )


def test_calls_are_right_where_the_leaderboard_says_so_and_asked_for_in_its_words():
    source = next(PYTHON.parents[1].glob("lib/*/site-packages/bfcl_eval/data"))
    rows = function_calling(str(source), "test")
    random_, cases = random.Random(0), []
    rows = [rows[index] for index in range(len(rows))]
    for row in rows:
        calls = [_written(call, random_) for call in row["ground_truth"]] or [
            "f(a=1)" if random_.random() < 0.5 else ""
        ]
        if random_.random() < 0.3:
            random_.shuffle(calls)
        if random_.random() < 0.05:
            calls.append(calls[0])
        said = ", ".join(calls)
        said = random_.choice(
            [f"[{said}]", said, f"```\n[{said}]\n```", f"['{said}']", f"I call [{said}]", "None fits."][
                : 3 if random_.random() < 0.9 else 6
            ]
        )
        cases.append(({key: value for key, value in row.items() if key != "prompt"}, said))
    asked, told = _beside(CALLS, cases, sorted({row["category"] for row in rows}))
    assert {row["id"]: row["prompt"] for row in rows} == asked
    different = [(case, each) for case, each in zip(cases, told, strict=True) if each[0] != each[1]]
    assert different == []
    right = sum(theirs for theirs, _ in told) / len(told)
    assert 0.2 < right < 0.8, "the answers tell little"
