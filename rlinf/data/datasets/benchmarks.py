"""Benchmarks that models are compared by: where each is, how it is asked, how often, and how answers are scored.

In: `evaluation.named` of a configuration. Out: a `Benchmark` for each name, or what is wrong with it. The prompts are
ours; so are the places where answers are looked for. Whatever a benchmark of the user's own leaves open is that of
AIME.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rlinf.config.importing import mistake_in

SCORED_BY = "scored_by"
"""Column of a prompt's row that names the benchmark whose function scores its answers; the run's own scores others."""
_BOXED = "put your final answer within \\boxed{}."
_LETTER = "put the letter of your final answer, A, B, C or D, within \\boxed{}."
_MARKED = r"(?:\\boxed\{\s*(?:\\text\w*\{)?|[Aa]nswer(?:\s+is)?\s*:?\s*)[*\s]*\(?(?P<answer>[A-D])(?![A-Za-z])"
"""Where the letter of an option stands: in a box, or behind "answer", "answer is" or "answer:"; the last one counts."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One set of problems."""

    data: str = ""
    """File, directory or hub name."""
    split: str = "test"
    """Which split of a data set that has several."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Ours to theirs, as data.columns; what is not named is found by its usual names."""
    template: str | None = f"{{prompt}}\n\nPlease reason step by step, and {_BOXED}"
    """Makes the prompt's text from columns; None takes the prompt column."""
    chat: bool | None = None
    """Put into the tokenizer's chat template; None: if it has one."""
    system: str | None = None
    """System message."""
    reward: str = "rlinf.rewards.math"
    """Dotted path of the function that scores an answer."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Its further arguments."""
    samples: int = 32
    """Answers to each problem, over which pass@1 is averaged."""
    temperature: float = 0.6
    """Sampling temperature; 0.6 and top_p 0.95 are what the authors of DeepSeek-R1's distilled models evaluate with."""
    top_p: float = 0.95
    """The likeliest tokens that come to so much are drawn from."""
    max_new_tokens: int = 32768
    """Longest answer, or as long as the model has positions for."""
    k: tuple[int, ...] = ()
    """For which k to tell pass@k and maj@k, besides pass@1."""
    problems: int | None = None
    """How many the published set has; None: unknown."""


KNOWN: Mapping[str, Benchmark] = {
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", problems=30),
    "aime25": Benchmark("math-ai/aime25", problems=30),
    "gpqa-diamond": Benchmark(
        "Idavidrein/gpqa:gpqa_diamond",
        "train",
        {
            "prompt": "Question",
            "answer": None,
            "choices": ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"],
        },
        template=f"{{prompt}}\n\n{{choices}}\n\nPlease reason step by step, and {_LETTER}",
        reward="rlinf.rewards.regex",
        args={"pattern": _MARKED},
        problems=198,
    ),
}
"""Benchmarks by name. Options of GPQA stand in an order drawn from the number of their row."""
_KEYS = {each.name for each in fields(Benchmark)} - {"problems"}
_TEXTS = ("data", "split", "reward")
_OPTIONAL_TEXTS = ("template", "system")


def benchmark_of(name: str, entry: Any) -> Benchmark:
    """The benchmark of an entry of `evaluation.named`.

    Args:
        name: of the entry.
        entry: what differs, by field; or where the data are; or None. Without mistakes.
    """
    changed = {"data": entry} if isinstance(entry, str) else dict(entry or {})
    if "k" in changed:
        changed["k"] = tuple(changed["k"])
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
    for each, value in entry.items():
        wanted = _wanted(str(each), value)
        if wanted is not None:
            yield f"{each}: {value!r}: write {wanted}"
    if isinstance(path := entry.get("reward"), str) and (advice := mistake_in(path)) is not None:
        yield f"reward: {advice}"
    samples, k = entry.get("samples", KNOWN.get(name, Benchmark()).samples), entry.get("k", [])
    if isinstance(samples, int) and samples > 1 and entry.get("temperature", 1) == 0:
        yield "temperature: at 0 all answers to a problem are equal; take samples: 1"
    counts = [one for one in k if isinstance(one, int)] if isinstance(k, list | tuple) else []
    if isinstance(samples, int) and any(one > samples for one in counts):
        yield f"k: more than the {samples} answers to a problem; raise samples"


def _wanted(name: str, value: Any) -> str | None:
    """Describe the values that a field takes, if this one is something else; None if it fits."""
    if name == "k":
        return None if isinstance(value, list | tuple) and all(map(_count, value)) else "a list of whole numbers"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    takes = {
        **dict.fromkeys(_TEXTS, ("a text", isinstance(value, str))),
        **dict.fromkeys(_OPTIONAL_TEXTS, ("a text or null", isinstance(value, str | None))),
        **dict.fromkeys(("columns", "args"), ("a mapping", isinstance(value, Mapping))),
        **dict.fromkeys(("samples", "max_new_tokens"), ("a whole number from 1 on", _count(value))),
        "chat": ("true, false or null", isinstance(value, bool | None)),
        "temperature": ("a number from 0 on", number and 0 <= value < math.inf),
        "top_p": ("a number above 0, at most 1", number and 0 < value <= 1),
    }
    wanted, fits = takes.get(name, ("", True))
    return None if fits else wanted


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
