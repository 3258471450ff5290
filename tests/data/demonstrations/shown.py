"""Small data sets of demonstrations, and what of them each format holds."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st

from rlinf.data.demonstrations import Demonstration

LOSES_LAST = ("lerobot", "lerobot-v2.1")
"""Formats that hold nothing of what was seen after the last action."""


def episode(rows=4, seed=0, cameras=1, side=8, extra=False, **changes):
    """An episode of single actions whose numbers and pictures follow from a seed."""
    draw = torch.Generator().manual_seed(seed)
    seen = {"state": torch.randn(rows + 1, 3, generator=draw)}
    if cameras:
        seen["rgb"] = torch.randint(0, 256, (rows + 1, side, side, 3 * cameras), generator=draw, dtype=torch.uint8)
    if extra:
        seen["depth"] = torch.rand(rows + 1, 2, 2, 1, generator=draw)
    settings = {
        "observation": seen,
        "actions": torch.randn(rows, 1, 2, generator=draw),
        "rewards": torch.randn(rows, 1, generator=draw),
        "valid": torch.ones(rows, 1, dtype=torch.bool),
        "terminated": True,
        "success": True,
        "instruction": "pick up the cube",
    }
    return Demonstration(**{**settings, **changes})


@st.composite
def data_sets(draw):
    """One to three episodes with the same arrays."""
    cameras, extra = draw(st.integers(0, 2)), draw(st.booleans())
    words = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)
    return [
        episode(
            rows, draw(st.integers(0, 9)), cameras, 4, extra, terminated=draw(st.booleans()),
            success=draw(st.none() | st.booleans()), instruction=draw(words | changing(rows)),
        )
        for rows in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ]  # fmt: skip


def changing(rows):
    """What is to be done changes within an episode."""
    return st.just(("open", *["close"] * (rows - 1))) if rows > 1 else st.just("open")


def without_last(shown):
    """What is left where nothing is held of what was seen after the last action: what was seen before it stands in."""
    seen = {name: torch.cat([rows[:-1], rows[-2:-1]]) for name, rows in shown.observation.items()}
    return dataclasses.replace(shown, observation=seen)


def assert_same(found, wanted):
    assert found.observation.keys() == wanted.observation.keys()
    for name, rows in wanted.observation.items():
        assert found.observation[name].dtype == rows.dtype
        assert torch.equal(found.observation[name], rows), name
    for name in ("actions", "rewards", "valid"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("terminated", "success", "instruction"):
        assert getattr(found, name) == getattr(wanted, name), name
