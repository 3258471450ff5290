"""Benchmarks that models are compared by: where each is, how it is asked, how often, and how answers are scored.

In: `evaluation.named` of a configuration. Out: a `Benchmark` for each name, or what is wrong with it. The prompts are
ours; so are the places where answers are looked for. Whatever a benchmark of the user's own leaves open is that of
AIME.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlinf.config.importing import mistake_in
from rlinf.config.schema import CLOSED, leaves, settings

SCORED_BY = "scored_by"
"""Column of a prompt's row that names the benchmark whose function scores its answers; the run's own scores others."""
_BOXED = "put your final answer within \\boxed{}."
_LETTER = "put the letter of your final answer, A, B, C or D, within \\boxed{}."
_OPTION = "put the letter of your final answer within \\boxed{}."
_CODE = "Write the whole program in one block of Python, functions and imports included."
_MARKED = (
    r"(?:\\boxed\{\s*(?:\\text\w*\{)?|(?:[Aa]nswer|ANSWER)(?:\s+is)?\s*:?\s*)[*\s]*\(?(?P<answer>[A-J])(?![A-Za-z])"
)
"""Where the letter of an option stands: in a box, or behind "answer", "answer is" or "answer:"; the last one counts."""
_PICKED = (
    "{narrative}\n\n{question}\n\nPick one of the following choices:\n{choices}\n\nYou must pick one option. Explain "
    "your reasoning step by step before you answer. Finally, the last thing you generate should be "
    '"ANSWER: (your answer here, including the choice letter)"'
)
"""MuSR's own prompt with a chain of thought, with letters."""
_PHRASE = r"[Aa]nswer is:?\s*\**\s*(?P<answer>[^\n]*?)\s*\**\.?\**\s*(?:\n|\Z)"
"""Where an answer of BIG-Bench Hard stands: behind "answer is", up to the full stop that ends the line."""


_Count = Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True, config=CLOSED)
class Benchmark:
    """One set of problems."""

    data: str = ""
    """File, directory or hub name."""
    split: str = "test"
    """Which split of a data set that has several."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Ours to theirs, as data.columns; what is not named is found by its usual names."""
    template: str | None = f"{{prompt}}\n\nPlease reason step by step, and {_BOXED}"
    """Makes the prompt's text from columns; None takes the prompt column."""
    chat: Annotated[bool, Field(strict=True)] | None = None
    """Put into the tokenizer's chat template; None: if it has one."""
    system: str | None = None
    """System message."""
    reward: str = "rlinf.rewards.math"
    """Dotted path of the function that scores an answer."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its further arguments."""
    samples: _Count = 32
    """Answers to each problem, over which pass@1 is averaged."""
    temperature: float = Field(default=0.6, strict=True, ge=0, allow_inf_nan=False)
    """Sampling temperature; 0.6 and top_p 0.95 are what the authors of DeepSeek-R1's distilled models evaluate with."""
    top_p: float = Field(default=0.95, strict=True, gt=0, le=1)
    """The likeliest tokens that come to so much are drawn from."""
    max_new_tokens: _Count = 32768
    """Longest answer, or as long as the model has positions for."""
    k: list[_Count] = field(default_factory=list)
    """For which k to tell pass@k and maj@k, besides pass@1."""
    problems: int | None = None
    """How many the published set has; None: unknown."""
    form: str = ""
    """Form of files that belong together, as `published.FORMS` names it; "" for a table."""


def _choice(
    data: str, split: str, columns: dict[str, Any], problems: int, asks: str = _OPTION, **how: Any
) -> Benchmark:
    """Multiple choice: lettered options, and a letter as the answer."""
    template = f"{{prompt}}\n\n{{choices}}\n\nPlease reason step by step, and {asks}"
    reward: dict[str, Any] = {"reward": "rlinf.rewards.regex", "args": {"pattern": _MARKED}}
    return Benchmark(data, split, columns, template=template, problems=problems, **reward, **how)


def _program(data: str, problems: int) -> Benchmark:
    """A program that passes all tests of its row; each is answered once, greedily."""
    columns, template = {"prompt": "prompt", "answer": None}, f"{{prompt}}\n\n{_CODE}"
    return Benchmark(data, "test", columns, template, reward="rlinf.rewards.code", problems=problems, **_ONCE)


_ONCE: dict[str, Any] = {"samples": 1, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 4096}
_FOUR: dict[str, Any] = {"samples": 4}
_GPQA = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
_ANSWER_KEY = {"choices": "choices", "answer": "answerKey"}
KNOWN: Mapping[str, Benchmark] = {
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", problems=30),
    "aime25": Benchmark("math-ai/aime25", problems=30),
    "hmmt-feb25": Benchmark("MathArena/hmmt_feb_2025", "train", problems=30),
    "amc23": Benchmark("math-ai/amc23", problems=40),
    "math-500": Benchmark("HuggingFaceH4/MATH-500", problems=500, **_FOUR),
    "minerva-math": Benchmark("math-ai/minervamath", problems=272, **_FOUR),
    "gsm8k": Benchmark("openai/gsm8k:main", problems=1319, **_ONCE),
    "gpqa-diamond": _choice(
        "Idavidrein/gpqa:gpqa_diamond",
        "train",
        {"prompt": "Question", "answer": None, "choices": _GPQA},
        198,
        _LETTER,
    ),
    "mmlu": _choice("cais/mmlu:all", "test", {"choices": "choices"}, 14042, **_ONCE),
    "mmlu-pro": _choice("TIGER-Lab/MMLU-Pro", "test", {"choices": "options", "answer": "answer_index"}, 12032, **_ONCE),
    "arc-challenge": _choice("allenai/ai2_arc:ARC-Challenge", "test", _ANSWER_KEY, 1172, **_ONCE),
    "openbook-qa": _choice("allenai/openbookqa:main", "test", {"prompt": "question_stem", **_ANSWER_KEY}, 500, **_ONCE),
    "commonsense-qa": _choice("tau/commonsense_qa", "validation", _ANSWER_KEY, 1221, **_ONCE),
    "medqa": _choice(
        "GBaker/MedQA-USMLE-4-options", "test", {"choices": "options", "answer": "answer_idx"}, 1273, **_ONCE
    ),
    "humaneval-plus": _program("evalplus/humanevalplus", 164),
    "mbpp-plus": _program("evalplus/mbppplus", 378),
    "ifeval": Benchmark(
        "google/IFEval",
        "train",
        {"prompt": "prompt", "answer": None},
        None,
        reward="rlinf.rewards.instructions",
        args={"sentences": "trained"},
        problems=541,
        **_ONCE,
    ),
    "bbh": Benchmark(
        "lukaemon/bbh",
        columns={"prompt": "prompt", "answer": "target"},
        template=None,
        reward="rlinf.rewards.regex",
        args={"pattern": _PHRASE},
        problems=6511,
        form="bbh",
        **_ONCE,
    ),
    "musr": Benchmark(
        "TAUR-Lab/MuSR",
        "murder_mysteries+object_placements+team_allocation",
        {"prompt": "question", "choices": "choices", "answer": "answer_index"},
        _PICKED,
        reward="rlinf.rewards.regex",
        args={"pattern": _MARKED},
        problems=756,
        **_ONCE,
    ),
    "bfcl": Benchmark(
        "gorilla-llm/Berkeley-Function-Calling-Leaderboard",
        columns={"prompt": "prompt", "answer": None},
        template=None,
        chat=True,
        reward="rlinf.rewards.function_calls",
        problems=3491,
        form="bfcl",
        **_ONCE,
    ),
    "simpleqa": Benchmark(
        "basicv8vc/SimpleQA",
        columns={"prompt": "problem", "answer": "answer"},
        template=None,
        reward="rlinf.rewards.exact.facts",
        problems=4326,
        **_ONCE,
    ),
}
"""Benchmarks by name. Options of GPQA stand in an order drawn from the number of their row."""
_KEYS = {each.key for each in leaves(Benchmark)} - {"problems", "form"}


def benchmark_of(name: str, entry: Any) -> Benchmark:
    """The benchmark of an entry of `evaluation.named`.

    Args:
        name: of the entry.
        entry: what differs, by field; or where the data are; or None. Without mistakes.
    """
    changed = {"data": entry} if isinstance(entry, str) else dict(entry or {})
    if changed.get("reward") and "args" not in changed:
        changed["args"] = {}
    return replace(KNOWN.get(name, Benchmark()), **changed)


def benchmarks_of(named: Mapping[str, Any]) -> dict[str, Benchmark]:
    """All entries of `evaluation.named`, in their order."""
    return {name: benchmark_of(name, entry) for name, entry in named.items()}


def benchmark_mistakes(named: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake in `evaluation.named`.

    Args:
        named: as it was written.
    """
    for name, entry in named.items():
        key = f"evaluation.named.{name}"
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", str(name)):
            yield key, "this names metrics: write it with letters, digits, - and _ alone"
        elif isinstance(entry, str | None):
            if entry is None and name not in KNOWN:
                yield key, f"there is no benchmark of that name, which are {', '.join(KNOWN)}; give a set of yours data"
        elif not isinstance(entry, Mapping):
            yield key, f"write a file, or a mapping of any of {', '.join(sorted(_KEYS))}"
        else:
            yield from ((key, advice) for advice in _wrong(str(name), entry))


def _wrong(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    if unknown := sorted(map(str, entry.keys() - _KEYS)):
        yield f"it has no {unknown[0]}; its keys are {', '.join(sorted(_KEYS))}"
    if name not in KNOWN and not entry.get("data"):
        yield f"there is no benchmark of that name, which are {', '.join(KNOWN)}; give a set of yours data"
    values = {each: value for each, value in entry.items() if each in _KEYS}
    try:
        settings(Benchmark, values, name)
    except ValueError as error:
        yield str(error).removeprefix(f"{name}: ")
    if isinstance(path := entry.get("reward"), str) and (advice := mistake_in(path)) is not None:
        yield f"reward: {advice}"
    samples, k = entry.get("samples", KNOWN.get(name, Benchmark()).samples), entry.get("k", [])
    if isinstance(samples, int) and samples > 1 and entry.get("temperature", 1) == 0:
        yield "temperature: at 0 all answers to a problem are equal; take samples: 1"
    counts = [one for one in k if isinstance(one, int)] if isinstance(k, list | tuple) else []
    if isinstance(samples, int) and any(one > samples for one in counts):
        yield f"k: more than the {samples} answers to a problem; raise samples"
