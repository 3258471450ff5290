"""The critic over several processes: the same values and gradients, alone and beside a trainer, wherever they are."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.actors import toys
from tests.actors.programs import critics
from tests.actors.watched import PRECISELY

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs" / "critics.py"
WORLDS = (1, 2)
PATIENCE = 150.0
"""Seconds for a job; generous, since tests share their cores."""


def ran(zygotes, world, out, scenario):
    """What a scenario wrote."""
    ranks = zygotes.run(PROGRAM, world, out, scenario)
    try:
        assert ranks.codes(PATIENCE) == [0] * world, ranks.everything()
    finally:
        ranks.end()
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def results(zygotes, tmp_path_factory):
    """What every number of ranks made of every case."""
    return {world: ran(zygotes, world, tmp_path_factory.mktemp("critic") / "out.pt", "learned") for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_gradients_are_those_of_one_process_that_goes_token_by_token(results, world, name):
    found = results[world][name]
    plain = critics.plain_model(found["began"], name)
    critics.by_a_plain_loop(plain, critics.told(toys.groups(7))).backward()
    assert toys.furthest(found["gradients"][-1], toys.gradients(plain)) < 1e-5


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_values_are_those_of_a_plain_model_and_come_in_the_order_of_prompts(results, world, name):
    found = results[world][name]
    plain = critics.plain_model(found["began"], name)
    assert found["order"] == list(range(7))
    for group, said in zip(toys.groups(7), found["values"], strict=True):
        for sample, values in zip(group.samples, said, strict=True):
            if sample.reward is None:
                assert np.isnan(values).all()
                continue
            with torch.no_grad():
                expected = critics.plain_values(plain, sample.prompt.token_ids, sample.response_ids)
            np.testing.assert_allclose(values, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", critics.CASES)
def test_two_ranks_learn_what_one_does_and_each_holds_its_part(results, name):
    one, two = results[1][name], results[2][name]
    assert two["metrics"] == pytest.approx(one["metrics"], rel=PRECISELY, abs=PRECISELY)
    assert len(two["gradients"]) == len(one["gradients"]) == 2 * one["steps"]
    for first, second in zip(one["gradients"], two["gradients"], strict=True):
        assert toys.furthest(second, first) < PRECISELY
    assert toys.furthest(two["weights"], one["weights"]) < PRECISELY
    assert abs(two["slice"] * 2 - one["slice"]) < 0.1 * one["slice"]


def test_critic_and_trainer_learn_the_same_wherever_they_are(zygotes, tmp_path):
    results = ran(zygotes, 4, tmp_path / "4.pt", "flows")
    expected, weights = results.pop("alone")
    for name, (metrics, found) in results.items():
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=PRECISELY, abs=PRECISELY), name
        assert float((found - weights).norm() / weights.norm()) < PRECISELY, name


def test_steps_that_are_cancelled_or_misfed_leave_all_ranks_able_to_go_on(zygotes, tmp_path):
    found = ran(zygotes, 2, tmp_path / "out.pt", "cancelled")
    assert found["times"] == 7
    (metrics, weights), (expected, others) = found["disturbed"], found["undisturbed"]
    assert metrics == expected
    assert torch.equal(weights, others)
