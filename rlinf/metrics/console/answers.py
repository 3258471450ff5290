"""Format held-out evaluations: as a sentence, as a before/after table, and as rows of samples.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlinf.data.sample import Evaluation, Group
from rlinf.data.tokenizer import shown_prompt

ACCURACY = "accuracy"
SHOWN = 5
"""Problems whose answers are printed at the end of a run."""
CELL = 32
"""Characters of a problem or an answer that are printed, the last ones; the rest is in samples.jsonl."""
KEPT = 24
"""Problems whose answers are kept of every evaluation."""


def rows(
    evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase | None = None, count: int = KEPT
) -> list[dict[str, Any]]:
    """The first answers of an evaluation as rows of samples.jsonl; of every evaluation the same problems.

    Args:
        evaluation: judged.
        tokenizer: the model's; with it `prompt` is what the model read, see `shown_prompt`.
        count: at most so many problems.
    """
    firsts = [group.samples[0] for group in evaluation.groups[:count]]
    return [
        {
            "kind": "held-out",
            "prompt": sample.prompt.text,
            "response": sample.text,
            "answer": sample.prompt.answer,
            "reward": sample.reward,
            "outcome": sample.outcome,
            "length": sample.learned_tokens,
            **({"remark": sample.remark} if sample.remark else {}),
            **({} if tokenizer is None else shown_prompt(sample.prompt, tokenizer)),
        }
        for sample in firsts
    ]


def compared(before: Evaluation, after: Evaluation, temperature: float) -> Iterator[str]:
    """What came of a run: accuracy or mean reward, and a few problems with their answers then and now; those that
    changed first, since they say most.

    Args:
        before, after: of the same problems; of others, after a change of the configuration, only `after` is told.
        temperature: at which they were answered.
    """
    then, now = problems_of(before), problems_of(after)
    if [group.prompt.text for group in then] != [group.prompt.text for group in now]:
        yield f"{in_words(after, temperature)}; before the first step it answered other ones"
        return
    name, style = measure_of(before, after)
    change = f"{before.accuracy:{style}} -> {after.accuracy:{style}}"
    yield f"{name} on {len(now)} held-out problems{_how(temperature)}: {change}"
    pairs = [(old.samples[0], new.samples[0]) for old, new in zip(then, now, strict=True)]
    pairs.sort(key=lambda pair: pair[0].text == pair[1].text)  # stable: otherwise in the order of the problems
    table: list[tuple[str, ...]] = [("problem", "before", "after", "right answer")]
    problem = own_parts([group.prompt.text for group in now])
    shown = [(problem[new.prompt.text], old.text, new.text, new.prompt.answer) for old, new in pairs[:SHOWN]]
    table += [tuple(map(_cell, texts)) for texts in shown]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def in_words(evaluation: Evaluation, temperature: float) -> str:
    """One evaluation by itself."""
    name, style = measure_of(evaluation)
    value, problems = f"{evaluation.accuracy:{style}}", f"{len(problems_of(evaluation))} held-out problems"
    if name == ACCURACY:
        return f"{value} of {problems} answered right{_how(temperature)}"
    return f"{name} {value} on {problems}{_how(temperature)}"


def measure_of(*evaluations: Evaluation) -> tuple[str, str]:
    """What the `accuracy` of evaluations is, and its format: a share of right answers only where each reward is 0 or 1.

    Args:
        evaluations: that are told together.
    """
    rewards = (reward for evaluation in evaluations for group in evaluation.groups for reward in group.rewards)
    return (ACCURACY, ".1%") if all(reward in (0, 1) for reward in rewards) else ("mean reward", ".3f")


def problems_of(evaluation: Evaluation) -> list[Group]:
    """A group for each problem: where several agents work on one, that of the first."""
    firsts: dict[int, Group] = {}
    for group in evaluation.groups:
        firsts.setdefault(group.prompt.id, group)
    return [*firsts.values()]


def _how(temperature: float) -> str:
    return ", greedily" if temperature == 0 else f", at temperature {temperature:g}"


def own_parts(texts: Sequence[str]) -> dict[str, str]:
    """The part of each text that the others do not have, where they are too long for a cell: of chats what the user
    says, without the system prompt before it and the marks of the template behind it."""
    if len({*texts}) < 2 or max(map(len, texts)) <= CELL:
        return {text: text for text in texts}
    first = re.sub(r"[^\n>\]]*$", "", _beginning(texts))  # back to a mark or a new line, which begins a message
    rest = [text[len(first) :] for text in texts]
    last = re.sub(r"^[^\n<\[]*", "", _beginning([text[::-1] for text in rest])[::-1])
    return {text: part.removesuffix(last) for text, part in zip(texts, rest, strict=True)}


def _beginning(texts: Sequence[str]) -> str:
    """The characters that all texts begin with."""
    return "".join(column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False)))


def _cell(text: str) -> str:
    """A text on one line, in characters that do nothing to a terminal; its end if it is long, where answers come to
    their point and chats to the last message."""
    plain = "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
    return plain if len(plain) <= CELL else f"…{plain[1 - CELL :]}"
