"""What steps on text share: who fills in which column, in what order, and who gets the new weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rlinf.data.step import Step
from rlinf.flows.text import annotate, publish_weights, with_one_teacher


class Named:
    """A role whose every endpoint that fills a column adds its name."""

    def __init__(self, name):
        self.name = name

    def score(self, groups):
        return [*groups, f"{self.name}.score"]

    def logprobs(self, groups):
        return [*groups, f"{self.name}.logprobs"]

    def values(self, groups):
        return [*groups, f"{self.name}.values"]


ROLES = {name: Named(name) for name in ("critic", "teacher", "reference", "reward_model")}
FILLED = ["reward_model.score", "reference.logprobs", "teacher.logprobs", "critic.values"]


def test_each_role_fills_its_column_in_an_order_of_its_own():
    assert annotate([], **ROLES) == FILLED


@pytest.mark.parametrize("missing", ROLES)
def test_a_role_that_there_is_not_fills_nothing(missing):
    assert annotate([], **{**ROLES, missing: None}) == [each for each in FILLED if not each.startswith(f"{missing}.")]


def test_several_teachers_are_one_that_asks_each():
    roles = with_one_teacher({"critic": None, "teacher_math": Named("math"), "teacher_code": Named("code")})
    assert annotate([], teacher=roles["teacher"]) == ["math.logprobs", "code.logprobs"]
    assert with_one_teacher(ROLES) == ROLES


@pytest.mark.parametrize(
    ("step", "heard"),
    [
        (Step(0, (), 2), ["loads 3"]),
        (Step(0, (), 2, moving_reference=True), ["loads 3", "follows 3"]),
        (Step(0, (), 2, moving_reference=True, publishes=False), []),
    ],
)
def test_weights_go_to_the_rollout_and_then_to_a_reference_that_moves(step, heard):
    said = []

    def takes(verb):
        async def take(weights):
            said.append(f"{verb} {weights}")

        return take

    trainer, reference = SimpleNamespace(weights=lambda: 3), SimpleNamespace(follow=takes("follows"))
    asyncio.run(publish_weights(step, trainer, SimpleNamespace(load=takes("loads")), reference))
    assert said == heard
