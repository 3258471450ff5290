"""The trainer of policies that act, over one and two processes: the gradients of a plain loop, and the same weights."""

from pathlib import Path

import pytest
import torch

from rlinf.data.rng import permutation
from tests.actors.programs.control import CASES, LEARNING, policy_of
from tests.actors.programs.spread import SPREAD

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs" / "control.py"
WORLDS = (1, 2)
PATIENCE = 150.0
"""Seconds for a job; generous, since tests share their cores."""


@pytest.fixture(scope="module")
def results(zygotes, tmp_path_factory):
    """What every number of ranks made of every case."""
    found, begun = {}, []
    for world in WORLDS:
        out = tmp_path_factory.mktemp("control") / "out.pt"
        ranks = zygotes.run(PROGRAM, world, out, *begun)
        try:
            assert ranks.codes(PATIENCE) == [0] * world, ranks.everything()
        finally:
            ranks.end()
        found[world], begun = torch.load(out, weights_only=False), [out.parent]
    return found


# A plain loop --------------------------------------------------------------------------------------------------------


def surrogate(ratio, advantage, low, high, dual):
    """Of one token."""
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1.0 - low, 1.0 + high) * advantage)
    return torch.minimum(loss, dual * -advantage) if dual and advantage < 0 else loss


def huber(v, old, target):
    """Of one value, clipped at 0.2 about the old one; errors are less than 10 here."""
    return max((v - target) ** 2, (old + (v - old).clamp(-0.2, 0.2) - target) ** 2) / 2


def ppo(policy, lesson, chosen, *, dual=3.0, bonus=0.0, error=huber):
    """Decision by decision: the means over tokens and over values that count."""
    tokens, values = [], []
    for row in chosen:
        found = policy.evaluate({name: array[row : row + 1] for name, array in lesson["stored"].items()})
        for token in range(lesson["mask"].shape[1]):
            if lesson["mask"][row, token]:
                ratio = (found.logprobs.flatten()[token] - lesson["logprobs"][row, token]).exp()
                loss = surrogate(ratio, lesson["advantages"][row, token], 0.2, 0.2, dual)
                tokens.append(loss - bonus * found.entropy.flatten()[token])
        for each in range(lesson["value_mask"].shape[1]):
            if lesson["value_mask"][row, each]:
                v, old, target = found.values.flatten()[each], lesson["values"][row, each], lesson["returns"][row, each]
                values.append(error(v, old, target))
    return torch.stack(tokens).mean() + 0.5 * torch.stack(values).mean()


def ppo_of_numbers(policy, lesson, chosen):
    return ppo(policy, lesson, chosen, dual=None, bonus=0.01, error=lambda v, _, target: (v - target) ** 2)


def by_episode(policy, lesson, chosen, *, sequence_ratio=False, low=0.2, high=0.2):
    """The mean over episodes of the mean over their tokens in this minibatch."""
    episodes = {}
    for row in chosen:
        logprobs = policy.evaluate({name: array[row : row + 1] for name, array in lesson["stored"].items()}).logprobs
        for token in range(lesson["mask"].shape[1]):
            if lesson["mask"][row, token]:
                moved = logprobs.flatten()[token] - lesson["logprobs"][row, token]
                episode = int(lesson["sequences"][row, token])
                episodes.setdefault(episode, []).append((moved, lesson["advantages"][row, token]))
    losses = []
    for tokens in episodes.values():
        mean = torch.stack([moved for moved, _ in tokens]).mean()  # gspo, eq. 7
        each = [surrogate((mean if sequence_ratio else moved).exp(), a, low, high, None) for moved, a in tokens]
        losses.append(torch.stack(each).mean())
    return torch.stack(losses).mean() if losses else None


def gspo(policy, lesson, chosen):
    return by_episode(policy, lesson, chosen, sequence_ratio=True, low=3e-4, high=4e-4)


PLAIN = {"ppo": ppo, "ppo of numbers, plain": ppo_of_numbers, "grpo of episodes": by_episode, "gspo": gspo}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_that_of_a_plain_loop_over_single_decisions(results, world, name):
    found, policy, lesson = results[world][name], policy_of(name), results[1][name]["lesson"]
    steps = iter(found["steps"])
    count, compared = len(lesson["mask"]), 0
    for epoch in range(LEARNING["epochs"]):
        order = permutation(count, LEARNING["seed"], 0, epoch).tolist()
        for first in range(0, count, LEARNING["minibatch"]):
            chosen = order[first : first + LEARNING["minibatch"]]
            if not lesson["mask"][chosen].any():
                continue  # no step is taken
            step = next(steps)
            policy.load_state_dict(step["weights"])
            policy.zero_grad()
            PLAIN[name](policy, lesson, chosen).backward()
            for key, parameter in policy.named_parameters():
                expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(step["gradient"][key], expected, rtol=1e-3, atol=2e-6)
            compared += 1
    assert compared == found["metrics"]["optimizer_steps"] >= 4
    assert not torch.equal(found["steps"][0]["weights"]["log_std"], found["steps"][-1]["weights"]["log_std"])


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_ranks_does_not_matter(results, name):
    one, two = (results[world][name] for world in WORLDS)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
    assert one["continued"].keys() == two["continued"].keys()
    for key, tensor in one["continued"].items():
        torch.testing.assert_close(two["continued"][key], tensor, rtol=1e-3, atol=1e-4)


def test_a_policy_that_is_too_small_to_divide_its_minibatches_learns_the_same_bits_on_any_number_of_ranks(results):
    one, two = (results[world]["not divided"] for world in WORLDS)
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_what_is_resumed_ends_where_the_uninterrupted_training_does_bit_for_bit(results, world, name):
    found = results[world][name]
    assert found["version"] == 1
    assert all(torch.equal(tensor, found["resumed"][key]) for key, tensor in found["continued"].items())
    last = found["steps"][-1]["weights"]
    assert not torch.equal(found["continued"]["log_std"], last["log_std"])


def test_running_statistics_are_learned_once_whatever_the_number_of_ranks(results):
    for world in WORLDS:
        lesson, found = results[world]["ppo"]["lesson"], results[world]["ppo"]["continued"]
        assert found["norm.count"] == 2 * int(lesson["mask"].any(1).sum())


# Large policies ------------------------------------------------------------------------------------------------------

sliced = pytest.mark.parametrize("name", [name for name in SPREAD if name != "whole"])


def gradient(results, world, name):
    return results[world]["spread"][name]["gradient"]


def assert_same_gradient(found, expected, tolerance):
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0.0, atol=tolerance * largest)


@pytest.mark.parametrize("name", SPREAD)
def test_a_gradient_is_the_same_on_one_rank_and_on_two(results, name):
    """In bfloat16 each rank adds up its own rows, and rounds to 8 bits what it has of the gradient."""
    one, two = gradient(results, 1, name), gradient(results, 2, name)
    assert_same_gradient(two, one, 2.0**-7 if name == "bfloat16" else 1e-5)
    ours, theirs = (results[world]["spread"][name]["metrics"] for world in (1, 2))
    assert theirs == pytest.approx(ours, rel=2e-2 if name == "bfloat16" else 1e-4, abs=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_slices_micro_batches_and_checkpointed_blocks_give_the_gradient_of_the_whole(results, world):
    assert_same_gradient(gradient(results, world, "sliced"), gradient(results, 1, "whole"), 1e-5)
    part = gradient(results, world, "part")
    assert_same_gradient(part, {name: gradient(results, 1, "whole")[name] for name in part}, 1e-5)
    assert {name.split(".")[0] for name in part} == {"body", "exit", "log_std", "critic"}
    assert not any(name.startswith("body.0") for name in part)
    largest = max(float(each.abs().max()) for each in gradient(results, 1, "whole").values())
    for name, each in gradient(results, world, "bfloat16").items():  # of 8 bits, through five layers
        exact = gradient(results, 1, "whole")[name]
        torch.testing.assert_close(each, exact, rtol=0.0, atol=5 * 2.0**-7 * largest)


@sliced
def test_over_two_ranks_weights_lie_in_slices_but_for_those_that_stay_in_float32(results, name):
    there = results[2]["spread"][name]["slices"]
    assert {each for each in there if ".up." in each} != set()
    stay = {each for each in there if ".norm." in each or each.startswith("critic.")}
    assert bool(stay) == (name != "bfloat16")
    assert results[2]["spread"]["whole"]["slices"] == set()


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("world", WORLDS)
def test_those_who_act_compute_what_the_trainer_computes(results, world, name):
    found = results[world]["spread"][name]
    torch.testing.assert_close(found["decided"], found["evaluated"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("world", WORLDS)
def test_only_what_learns_changes_and_parking_changes_nothing(results, world, name):
    found = results[world]["spread"][name]
    changed = {each for each in found["before"] if not torch.equal(found["before"][each], found["after"][each])}
    learning = {each.partition(".lora_")[0] for each in found["gradient"]}
    assert changed != set()
    assert {each for each in changed if each not in learning and each.rpartition(".")[0] not in learning} == set()
    assert all(torch.equal(found["back"][each], found["after"][each]) for each in found["after"])


@pytest.mark.parametrize("name", SPREAD)
def test_a_checkpoint_of_one_rank_is_gone_on_from_by_two(results, name):
    one, two = results[1]["spread"][name], results[2]["spread"][name]
    assert one["before"].keys() == two["restored"].keys()
    assert all(torch.equal(two["restored"][each], one["after"][each]) for each in one["after"])
    moved = {each for each in one["after"] if not torch.equal(two["continued"][each], one["after"][each])}
    assert moved != set()
