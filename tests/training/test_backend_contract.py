"""What every back end must do, whatever it is made of and on however many ranks; held against a plain torch loop."""

import inspect
from pathlib import Path

import pytest
import torch

from rlinf import ActorSystem
from rlinf.actors.trainer import Trainer
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.training.backend import BackEnd, back_end_of
from rlinf.training.checkpoint import STATE, load_state
from rlinf.training.fsdp import FsdpBackEnd
from rlinf.training.megatron.backend import MegatronBackEnd
from tests.actors import toys
from tests.actors.watched import PRECISELY, in_double
from tests.training.plain_backend import PlainBackEnd
from tests.training.programs.contract import OPTIMIZER, SPLIT, alone, copied, far, one_step

PROGRAM = Path(__file__).parent / "programs" / "contract.py"
RUNS = {
    1: ("plain", "megatron"),
    2: ("muon shard", "muon replicate", "shard", "replicate", "tensor", "pipeline"),
    4: ("muon hybrid", "hybrid"),
}
"""By number of ranks, what is examined; a run takes over what the run before it saved."""
EVERY = [(world, name) for world, names in RUNS.items() for name in names]
MUON = [case for case in EVERY if case[1].startswith("muon")]
CASES = [case for case in EVERY if case not in MUON]
PATIENCE = 150.0
"""Seconds for a job; generous, since tests share their cores."""
ranked = pytest.mark.parametrize(("world", "name"), CASES)
adapted = pytest.mark.parametrize(("world", "name"), [case for case in CASES if case[1] not in (*SPLIT, "megatron")])
spread = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(zygotes, tmp_path_factory):
    """What each back end answered, by number of ranks and name."""
    found, begun = {}, "-"
    for world, names in RUNS.items():
        directory = tmp_path_factory.mktemp("contract")
        ranks = zygotes.run(PROGRAM, world, directory / "out.pt", begun, *names)
        try:
            assert ranks.codes(PATIENCE) == [0] * world, ranks.everything()
        finally:
            ranks.end()
        answers = torch.load(directory / "out.pt", weights_only=False)
        found |= {(world, name): {**answers[name], "saved": directory / name / STATE} for name in names}
        begun = str(directory / names[-1])
    return found


@pytest.fixture(scope="module")
def loop():
    """Of a plain loop: weights before and after each of three steps, loss and gradient norm of each, and the smallest
    gradient that a weight had in any of them, relative to the largest of all weights."""
    net = in_double(build_model(toys.configuration(), load_tokenizer(toys.ALPHABET)).eval())
    settings = {"lr": OPTIMIZER["lr"], "betas": OPTIMIZER["betas"], "weight_decay": OPTIMIZER["weight_decay"]}
    optimizer = torch.optim.AdamW(net.parameters(), **settings)
    weights, numbers, smallest = [copied(net)], [], {}
    for seed in range(3):
        optimizer.zero_grad()
        loss = toys.by_a_plain_loop(net, toys.groups(7, seed))
        loss.backward()
        largest = max(float(parameter.grad.abs().max()) for parameter in net.parameters())
        for key, parameter in net.named_parameters():
            relative = parameter.grad.abs() / largest
            smallest[key] = torch.minimum(smallest.get(key, relative), relative)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), OPTIMIZER["grad_clip"])
        optimizer.step()
        weights.append(copied(net))
        numbers.append((float(loss.detach()), float(norm)))
    return weights, numbers, smallest


def assert_learned_alike(found, weights, smallest):
    """Log-probs are float32, so gradients are off by some 1e-7 of the largest; Adam divides each by its own size, so
    weights are off by 1e-7 / 1e-4 of the learning rate where it never was below 1e-4 of the largest."""
    compared = 0
    for key, tensor in weights.items():
        clear = smallest[key] > 1e-4
        compared += int(clear.sum())
        off = (found[key] - tensor)[clear].abs()
        assert off.numel() == 0 or float(off.max()) < 1e-2 * OPTIMIZER["lr"], key
    assert compared > 0.5 * sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize("kind", [FsdpBackEnd, MegatronBackEnd, PlainBackEnd])
def test_it_has_every_method_with_its_parameters(kind):
    for name, wanted in vars(BackEnd).items():
        if inspect.isfunction(wanted) and not name.startswith("_"):
            assert list(inspect.signature(getattr(kind, name)).parameters) == list(inspect.signature(wanted).parameters)


def test_a_back_end_is_named_by_a_short_name_or_a_dotted_path():
    assert back_end_of("fsdp") is FsdpBackEnd
    assert back_end_of("megatron") is MegatronBackEnd
    assert back_end_of("tests.training.plain_backend.PlainBackEnd") is PlainBackEnd
    with pytest.raises(ValueError, match=r"backend='nemo'.*fsdp"):
        back_end_of("nemo")


async def test_a_trainer_learns_the_same_whatever_trains():
    found = []
    for backend in ("fsdp", "tests.training.plain_backend.PlainBackEnd"):
        async with ActorSystem.local() as system:
            trainer = await system.spawn(
                Trainer, model=toys.configuration(), tokenizer=toys.ALPHABET, algorithm="deepseek_grpo", epochs=2,
                lora={"r": 2, "alpha": 4, "target_modules": ["q_proj"]}, reference="adapters_off", backend=backend,
                micro_batch_tokens=30, lr=0.01,
            )  # fmt: skip
            metrics = await trainer.train(toys.groups(7))
            # the plain one reads each text by itself
            metrics = {name: value for name, value in metrics.items() if not name.startswith("tokens_read/")}
            weights = await trainer.weights()
            found.append((metrics, {name: tensor.clone() for name, tensor in weights.named()}))
    (one, first), (other, second) = found
    assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    assert toys.furthest(second, first) < 1e-4


class TestOnAnyNumberOfRanks:
    pytestmark = spread

    @ranked
    def test_steps_are_those_of_a_plain_loop(self, results, loop, world, name):
        weights, numbers, smallest = loop
        found = results[world, name]
        assert toys.furthest(found["began"], weights[0]) == 0.0
        assert_learned_alike(found["exported"], weights[2], smallest)
        assert toys.furthest(found["exported"], weights[0]) > 0.005  # it learned
        for step, (loss, norm) in zip(found["steps"], numbers, strict=False):
            assert step["loss"] == pytest.approx(loss, rel=1e-5)
            assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert step["lr"] == OPTIMIZER["lr"]

    @pytest.mark.parametrize("case", MUON)
    def test_muon_in_slices_and_copies_learns_as_on_one_rank_which_goes_on_from_its_checkpoint(self, results, case):
        found = results[case]
        net, learner = alone("muon")
        began, after = copied(net), []
        for seed in range(3):
            one_step(learner, seed)
            after.append(copied(net))
        assert far(found["exported"], after[1], began) < PRECISELY
        for name in ("continued", "resumed", *(["taken over"] if "taken over" in found else [])):
            assert far(found[name], after[2], began) < PRECISELY
        assert "taken over" in found or case == MUON[0]
        kept = [value for state in learner.optimizer.state.values() for value in state.values()]
        before, parked = found["parked"]
        share = 1 if "replicate" in case[1] else 2
        assert before == parked >= sum(each.nbytes for each in (*began.values(), *kept)) / share
        assert "not both finite" in found["refused"]
        again, other = alone("muon", seed=3)
        load_state(again, other.optimizer, other.schedule, found["saved"], rank=0)
        one_step(other, 2)
        assert far(copied(again), after[2], began) < PRECISELY

    @ranked
    def test_weights_are_exported_under_the_names_of_the_checkpoint(self, results, loop, world, name):
        found = results[world, name]
        assert list(found["exported"]) == list(loop[0][0])
        for key, tensor in found["rounded"].items():
            assert torch.equal(tensor, found["exported"][key].bfloat16())

    @ranked
    def test_what_was_saved_is_resumed_whoever_saved_it(self, results, loop, world, name):
        found = results[world, name]
        assert_learned_alike(found["continued"], loop[0][3], loop[2])
        for resumed in ("resumed", "taken over"):
            if resumed in found:
                assert found[f"{resumed} as"] == (2, {"cursor": 5})
                assert toys.furthest(found[resumed], found["continued"]) < PRECISELY
        assert "taken over" in found or world == 1
        assert found["handed over"], "what a role that moves takes along is what a checkpoint has"

    @adapted
    def test_adapters_learn_and_what_is_frozen_stays(self, results, loop, world, name):
        found = results[world, name]["frozen"]
        assert torch.equal(found["before", False], found["after", False])
        assert not torch.allclose(found["before", True], found["after", True])
        assert found["names"] == list(loop[0][0])

    @ranked
    def test_a_loss_that_is_not_finite_changes_nothing(self, results, world, name):
        found = results[world, name]
        assert "not both finite" in found["refused"]
        assert toys.furthest(found["unchanged"], found["exported"]) == 0.0

    @ranked
    def test_all_that_is_held_leaves_the_device_and_comes_back(self, results, world, name):
        found = results[world, name]
        before, parked = found["parked"]
        share = {"shard": world, "hybrid": world // 2, **dict.fromkeys(SPLIT, 2.5)}.get(name, 1)  # norms, tied ends
        weights = sum(tensor.nbytes for tensor in found["exported"].values())
        assert before == parked >= 3 * weights / share * 0.9  # weights and both means of AdamW
        assert toys.furthest(found["returned"], found["exported"]) == 0.0

    @ranked
    def test_layers_are_overwritten_with_those_of_another_policy(self, results, world, name):
        found = results[world, name]
        assert toys.furthest(found["taken"], found["began"]) == 0.0
        assert found["shapes"] == {key: tuple(tensor.shape) for key, tensor in found["began"].items()}

    @ranked
    def test_it_says_which_ranks_share_data(self, results, world, name):
        assert results[world, name]["shares"] == ([0] * world if name in ("plain", *SPLIT) else [*range(world)])
