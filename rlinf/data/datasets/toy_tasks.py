"""Generated tasks with known answers, over digits or pictures, enough to see a small model learn.

A task over digits is two disjoint sets of problems, drawn from a seed: those to train on, and those held out. `load.py`
makes streams of prompts of them, as of any other data.

The task with pictures asks how many shapes are drawn, or in which corner the one is. Its rows are those of any data
set, for `data.train: rlinf.data.datasets.toy_tasks.train` and
`evaluation.data: rlinf.data.datasets.toy_tasks.held_out`. A picture of 32 x 32 pixels has 2 x 2 fields, each empty or
with a disc, a square or a triangle of any colour, somewhere in it. No held-out picture is among those to learn from.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.data.datasets import stream
from rlinf.data.datasets.prompts import Drawn, PromptMaker
from rlinf.data.datasets.source import Columns, ListRows
from rlinf.data.rng import permutation
from rlinf.data.sample import Example, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_PROBLEMS = 100_000  # training problems of a task; of 9 digits there are more than anyone visits
_LEAST_SPACE = 100  # with fewer problems in all, holding some out leaves too little to learn the task from


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its one right answer."""

    text: str
    """Text that the model reads, such as "3142>"."""
    answer: str
    """Text that it should write, such as "1234"."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of problem, as training and held-out sets."""

    name: str
    """Kind of problem."""
    characters: str
    """Every character in a problem or answer: the alphabet of the tokenizer."""
    train: tuple[Problem, ...]
    """Problems to train on."""
    held_out: tuple[Problem, ...]
    """Problems never trained on; where a task is too small to spare any, the training problems."""

    @property
    def tokenizer(self) -> dict[str, str]:
        """Source of its tokenizer, for `load_tokenizer`."""
        return {"characters": self.characters}


def _sorted(digits: str) -> str:
    return "".join(sorted(digits))


def _same(digits: str) -> str:
    return digits


KINDS: dict[str, Callable[[str], str]] = {"sort": _sorted, "copy": _same}
"""The answer to a string of digits, by kind of task."""


def make_task(name: str, *, digits: int = 4, held_out: int = 500, seed: int = 0) -> Task:
    """Generate a task.

    Args:
        name: "sort" (`3142>` gives `1234`) or "copy" (`3142>` gives `3142`).
        digits: digits per problem, from 1.
        held_out: problems to hold out, at most a fifth of all there are; with fewer than 100 in all none is held out
            and evaluation uses the training problems. 0: there is nothing to evaluate on.
        seed: draws which problems are held out.

    Raises:
        ValueError: unknown name, or `digits` below 1.
    """
    if name not in KINDS:
        near = get_close_matches(name, KINDS, n=1)
        raise ValueError(f"task {name!r} is none of {sorted(KINDS)}" + (f"; meant {near[0]!r}?" if near else ""))
    if digits < 1:
        raise ValueError(f"task {name!r}: digits={digits} must be at least 1")
    space = 10**digits
    count = min(held_out, space // 5) if space >= _LEAST_SPACE else 0
    if space <= _MOST_PROBLEMS + count:
        numbers = permutation(space, seed)
    else:
        numbers = np.random.default_rng(seed).choice(space, _MOST_PROBLEMS + count, replace=False)
    answer = KINDS[name]
    problems = [Problem(f"{text}>", answer(text)) for text in (f"{number:0{digits}d}" for number in numbers.tolist())]
    train = tuple(problems[count:])
    return Task(name, "0123456789>", train, (tuple(problems[:count]) or train) if held_out else ())


def rows_of(task: Task) -> ListRows:
    """A task's training problems as rows of a data set."""
    return _rows(f"task {task.name}", task.train)


def task_maker(tokenizer: PreTrainedTokenizerBase) -> PromptMaker:
    """Make the `PromptMaker` for rows of a generated task."""
    return PromptMaker(tokenizer, Columns("prompt", "answer", None, None))


def prompts(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Problems as prompts, numbered in their order."""
    rows = _rows("problems", problems)
    return task_maker(tokenizer).make([Drawn(i, i, rows[i], rows.where(i)) for i in range(len(rows))]).prompts


def examples(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Prompts with their answers and an end token, for supervised training on the whole text."""
    return task_maker(tokenizer).worked(prompts, learn_prompt=True)


class PromptStream(stream.PromptStream):
    """An endless supply of a task's prompts.

    Args:
        problems: what to draw from.
        tokenizer: makes token ids.
        seed: of the orders.
    """

    def __init__(self, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, seed: int = 0):
        super().__init__(_rows("problems", problems), task_maker(tokenizer), seed=seed)


def _rows(name: str, problems: Sequence[Problem]) -> ListRows:
    return ListRows(name, [{"prompt": problem.text, "answer": problem.answer} for problem in problems])


CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?"
"""Alphabet of questions and answers: `characters+pictures:` and this is a tokenizer for them."""
SIDE, FIELDS = 32, 2
"""Pixels of a picture's side, and fields along it."""
_TRAIN, _HELD_OUT = 4000, 400
_KINDS = ("disc", "square", "triangle")


def train() -> list[Mapping[str, Any]]:
    """Problems to learn from: `images`, `problem` and `answer`."""
    return [_problem(np.random.default_rng((0, number))) for number in range(_TRAIN)]


def held_out() -> list[Mapping[str, Any]]:
    """Problems with other pictures."""
    return [_problem(np.random.default_rng((1, number))) for number in range(_HELD_OUT)]


def _problem(rng: np.random.Generator) -> Mapping[str, Any]:
    """Half of the problems ask how many shapes there are, 1 to 4; the others where the only one is, as 1 to 4 in the
    order of reading."""
    counting = bool(rng.integers(2))
    fields = rng.permutation(FIELDS**2)[: rng.integers(1, FIELDS**2 + 1) if counting else 1]
    picture = drawn(rng, fields)
    answer = len(fields) if counting else int(fields[0]) + 1
    return {
        "images": [{"bytes": picture}],
        "problem": f"<image>{'how many' if counting else 'where'}?",
        "answer": str(answer),
    }


def drawn(rng: np.random.Generator, fields: np.ndarray) -> bytes:
    """A picture, as a PNG file, with a shape in each of these fields."""
    from PIL import Image, ImageDraw  # takes time to import, and runs without pictures do not need it

    ground = tuple(int(part) for part in rng.integers(0, 40, 3))
    picture = Image.new("RGB", (SIDE, SIDE), ground)
    pen = ImageDraw.Draw(picture)
    room = SIDE // FIELDS
    for field in fields.tolist():
        size = int(rng.integers(room // 2, room - 2))
        x, top = (int(place) * room + int(rng.integers(1, room - size)) for place in (field % FIELDS, field // FIELDS))
        colour = tuple(int(part) for part in rng.integers(120, 256, 3))
        box = (x, top, x + size, top + size)
        kind = _KINDS[rng.integers(len(_KINDS))]
        if kind == "disc":
            pen.ellipse(box, fill=colour)
        elif kind == "square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(x, top + size), (x + size, top + size), (x + size // 2, top)], fill=colour)
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()
