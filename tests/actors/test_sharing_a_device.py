"""Roles that do not fit on their device together take turns: never more bytes than it has, and nothing changes."""

import asyncio

import pytest
import torch

from rlinf import ActorSystem, Stream
from rlinf.data.sample import Example
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.models.offload import Parking, bytes_of
from rlinf.training.checkpoint import held
from tests.actors import toys
from tests.actors.programs import sharing

SIZES = sharing.declared(1)


@pytest.fixture(autouse=True)
def forgotten():
    """What other tests had on the device."""
    sharing.device.__init__()


def opened(memory=None):
    sharing.device.limit = memory or 0
    return ActorSystem.local(1, device_memory=None if memory is None else {0: memory})


def shared(role, memory):
    return {} if memory is None else {"hosts": [0], "devices": [0], "resident_bytes": SIZES[role]}


async def learned(memory=None):
    async with opened(memory) as system:
        return await sharing.learned(system, 1, None if memory is None else SIZES)


@pytest.fixture(scope="module")
def alone():
    """What is learned where devices are not shared."""
    sharing.device.__init__()
    return asyncio.run(learned())


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("beside", [(), ("rollout",), ("rollout", "reference")])
async def test_a_device_never_has_more_than_it_holds_and_what_is_learned_is_the_same_to_the_last_bit(alone, beside):
    memory = SIZES["trainer"] + sum(SIZES[role] for role in beside)
    assert memory < sum(SIZES.values())
    found = await learned(memory)
    assert found["metrics"] == alone["metrics"]
    assert found["said"] == alone["said"]
    assert same(found["weights"], alone["weights"])
    *_, (_, highest, looks, moves) = found["weighed"]
    assert memory / 2 < highest <= memory < alone["weighed"][-1][1]
    assert looks > 50
    assert {"trainer[0]", "critic[0]"} <= {move[1:] for move in moves}
    if not beside:
        assert {"rollout[0]", "reference[0]"} <= {move[1:] for move in moves}


@pytest.mark.parametrize("supervised", [False, True], ids=["train", "sft"])
async def test_what_has_gathered_of_a_batch_is_parked_with_the_weights(supervised):
    """A trainer that waits for groups gives its device to who makes them: gradients, what it found out about the first
    groups, and the state of an optimizer that only this call has, wait with it."""
    groups = toys.groups(9)
    examples = [Example(s.prompt.token_ids, s.response_ids) for group in groups for s in group.samples]

    async def run(memory):
        sharing.device.__init__()
        async with opened(memory) as system:
            settings = {**sharing.LEARNING, "algorithm": "grpo_tis"}
            trainer = await system.spawn(
                sharing.WeighedTrainer, name="trainer", **shared("trainer", memory), **settings
            )
            reference = await system.spawn(
                sharing.WeighedReference, name="reference", **shared("reference", memory), **sharing.MODEL
            )

            async def given(things):
                for number, thing in enumerate(things):
                    yield thing
                    if number >= 2:
                        before = await trainer.micro_batches()
                        _ = [group async for group in reference.logprobs(groups[:1])]
                        assert before

            if supervised:
                found = await trainer.sft(Stream.of(given([examples[k : k + 12] for k in range(0, 36, 12)] * 2)))
            else:
                found = await trainer.train(Stream.of(given(groups)))
            weights = {name: tensor.clone() for name, tensor in (await trainer.weights()).named()}
            return found, weights, (await trainer[0].weighs())[-1]

    (expected, weights, _), (found, after, moves) = await run(None), await run(SIZES["trainer"])
    assert found == expected
    assert same(after, weights)
    assert moves.count("+trainer[0]") > 1
    assert supervised or "/trainer[0]" in moves


async def test_weights_go_from_a_trainer_to_those_who_share_its_device():
    """Whoever is to load them must not hold the device that making them needs."""
    async with opened(SIZES["trainer"]) as system, asyncio.timeout(60):
        trainer, critic = [
            await system.spawn(kind, name=name, **shared(name, 1), **sharing.LEARNING)
            for name, kind in (("trainer", sharing.WeighedTrainer), ("critic", sharing.WeighedCritic))
        ]
        reference = await system.spawn(
            sharing.WeighedReference, name="reference", **shared("reference", 1), **sharing.MODEL, decay=0.5
        )
        weights = trainer.weights()
        loaded = await asyncio.gather(
            reference.load(trainer.weights()), critic.load(trainer.weights()), reference.follow(weights)
        )
        assert loaded == [0, 0, 0]


async def test_a_role_that_is_parked_is_brought_back_to_be_saved_and_restored(tmp_path):
    async with opened(SIZES["reference"]) as system:
        one, other = [
            await system.spawn(
                sharing.WeighedReference, name=name, **shared("reference", 1), **sharing.MODEL, seed=seed
            )
            for seed, name in enumerate(("one", "other"))
        ]
        for role in (one, other, one):
            await role.save(tmp_path / role[0]._name)
        await other.restore(tmp_path / "one[0]")
        said = [[group async for group in role.logprobs(toys.groups(2))] for role in (one, other)]
    columns = [[s.per_token["ref_logprobs"].tolist() for g in groups for s in g.samples] for groups in said]
    assert columns[0] == columns[1]


async def test_weights_reach_a_role_while_a_trainer_in_the_middle_of_a_batch_waits_on_the_same_device():
    async with opened(SIZES["trainer"]) as system, asyncio.timeout(60):
        trainer = await system.spawn(
            sharing.WeighedTrainer, name="trainer", **shared("trainer", 1), **{**sharing.LEARNING, "algorithm": "grpo"}
        )
        reference = await system.spawn(
            sharing.WeighedReference, name="reference", **shared("reference", 1), **sharing.MODEL
        )
        weights = await trainer.weights()
        loaded = []

        async def groups():
            for group in toys.groups(3):
                yield group
                loaded.append(await reference.load(weights))

        await trainer.train(Stream.of(groups()))
    assert loaded == [0, 0, 0]


async def test_an_endpoint_that_needs_parked_weights_and_takes_no_lease_is_told_to():
    async with opened(SIZES["trainer"]) as system:
        first, second = [
            await system.spawn(sharing.WeighedTrainer, name=name, **shared("trainer", 1), **sharing.LEARNING)
            for name in ("first", "second")
        ]
        assert await second[0].careless() != 0  # it happens to be there
        with pytest.raises(RuntimeError, match=r"needs tensors.*parked.*device=True"):
            await first[0].careless()


def test_a_model_that_was_read_from_mapped_files_can_be_parked(tmp_path):
    tokenizer = load_tokenizer(toys.ALPHABET)
    toys.model().save_pretrained(tmp_path)
    model = build_model(str(tmp_path), tokenizer)
    before = [parameter.clone() for parameter in model.parameters()]
    parking = Parking(lambda: held(model))
    parking.park()
    assert bytes_of(held(model)) == 0
    parking.unpark()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))
