"""A generated task with pictures: say how many shapes are drawn, or in which corner the one is.

In: nothing. Out: rows as those of any data set, for `data.train: rlinf.data.pictures.shapes.train` and
`evaluation.data: rlinf.data.pictures.shapes.held_out`. A picture of 32 x 32 pixels has 2 x 2 fields, each empty or
with a disc, a square or a triangle of any colour, somewhere in it. No held-out picture is among those to learn from.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

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
        left, top = (
            int(place) * room + int(rng.integers(1, room - size)) for place in (field % FIELDS, field // FIELDS)
        )
        colour = tuple(int(part) for part in rng.integers(120, 256, 3))
        box = (left, top, left + size, top + size)
        kind = _KINDS[rng.integers(len(_KINDS))]
        if kind == "disc":
            pen.ellipse(box, fill=colour)
        elif kind == "square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=colour)
    kept = io.BytesIO()
    picture.save(kept, format="PNG")
    return kept.getvalue()
