"""The trainer of policies that act, on one rank: when it stops, what it refuses, what it keeps."""

import dataclasses
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.demonstrations import Demonstration, write_demonstrations
from rlinf.models.policy.build import load_policy
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.weight_sync import LoadError
from tests.actors.programs.control import MLP, collected

LEARNING = {"lr": 0.03, "epochs": 4, "minibatch": 8, "seed": 4}


async def trainer_of(system, name="trainer", **settings):
    return await system.spawn(PolicyTrainer, name=name, **{"policy": MLP, **LEARNING, **settings})


async def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in (await trainer.weights()).named()}


def changed(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


async def test_a_policy_that_has_moved_too_far_is_left_where_it_is():
    async with ActorSystem.local() as system:
        trajectories = await collected(system, MLP, 4)
        free = await (await trainer_of(system, "free")).train(trajectories)
        held = await (await trainer_of(system, "held", kl_stop=free["approx_kl"] / 4)).train(trajectories)
        never = await (await trainer_of(system, "never", kl_stop=1e9)).train(trajectories)
    assert (free["optimizer_steps"], free["stopped_early"]) == (16, 0)
    assert 0 < held["optimizer_steps"] < 16
    assert held["stopped_early"] == 1
    assert never == free


async def test_the_critic_warms_up_alone_for_some_batches_and_a_resumed_run_does_not_begin_again(tmp_path):
    async with ActorSystem.local() as system:
        trajectories = await collected(system, MLP, 4)
        trainer = await trainer_of(system, critic_warmup=2)
        versions = [await weights_of(trainer)]
        for _ in range(3):
            await trainer.train(trajectories)
            versions.append(await weights_of(trainer))
            await trainer.save(str(tmp_path / str(len(versions))))
        again = await trainer_of(system, "again", critic_warmup=2)
        await again.restore(str(tmp_path / "3"))
        await again.train(trajectories)
        assert changed(await weights_of(again), versions[3]) == []
    learned = [{name.split(".")[0] for name in changed(*pair)} - {"norm"} for pair in pairwise(versions)]
    assert learned == [{"critic"}, {"critic"}, {"critic", "actor", "log_std"}]


async def test_a_reward_that_is_no_number_is_refused_before_anything_changes():
    """Also where it would come into one of the last minibatches only: without whitening it stays where it is."""
    algorithm = {"name": "ppo", "overrides": {"advantage": {"whiten": False}}}
    async with ActorSystem.local() as system:
        trajectories = await collected(system, MLP, 4)
        trainer = await trainer_of(system, algorithm=algorithm, minibatch=1)
        before = await weights_of(trainer)
        (part,) = trajectories
        rewards = part.chunks.rewards.clone()
        rewards[0, 3] = torch.nan
        broken = dataclasses.replace(part, chunks=dataclasses.replace(part.chunks, rewards=rewards))
        with pytest.raises(FloatingPointError, match=r"reward.*finite"):
            await trainer.train([broken])
        assert changed(before, await weights_of(trainer)) == []
        after = await trainer.train(trajectories)
        expected = await (await trainer_of(system, "other", algorithm=algorithm, minibatch=1)).train(trajectories)
    assert after == expected


async def test_where_all_did_alike_nothing_is_learned_and_the_run_goes_on():
    free = {**MLP, "value_level": None}
    async with ActorSystem.local() as system:
        trajectories = await collected(system, free, 6, group_size=2)
        (part,) = trajectories
        alike = dataclasses.replace(part, success=torch.ones_like(part.success))
        trainer = await trainer_of(system, policy=free, algorithm="grpo", group_size=2)
        before = await weights_of(trainer)
        metrics = await trainer.train([alike])
        assert changed(before, await weights_of(trainer)) == []
        assert (metrics["optimizer_steps"], metrics["learned_from"], metrics["env_steps"]) == (0, 0, 48)
        weights = await trainer.weights()
    assert weights.version == 1


async def test_without_one_action_there_is_nothing_to_learn_from():
    async with ActorSystem.local() as system:
        (part,) = await collected(system, MLP, 2)
        nothing = dataclasses.replace(part.chunks, valid=torch.zeros_like(part.chunks.valid))
        trainer = await trainer_of(system)
        with pytest.raises(ValueError, match=r"action.*done"):
            await trainer.train([dataclasses.replace(part, chunks=nothing)])
        with pytest.raises(ValueError, match="not one trajectory"):
            await trainer.train([])


async def test_a_resumed_trainer_goes_on_bit_for_bit_and_its_policy_is_for_everybody(tmp_path):
    async with ActorSystem.local() as system:
        trajectories = await collected(system, MLP, 4)
        trainer = await trainer_of(system)
        await trainer.train(trajectories)
        saved = await weights_of(trainer)
        await trainer.save(str(tmp_path))
        metrics = await trainer.train(trajectories)
        again = await trainer_of(system, "again")
        await again.restore(str(tmp_path))
        assert changed(saved, await weights_of(again)) == []
        assert await again.train(trajectories) == metrics
        assert changed(await weights_of(trainer), await weights_of(again)) == []
        other = await trainer_of(system, "other", lr=1e-12)  # settings are those given, not the checkpoint's
        await other.restore(str(tmp_path))
        await other.train(trajectories)
        apart = await weights_of(other)
        learned = [name for name in saved if not name.startswith("norm.")]  # statistics of what was seen
        assert max(float((apart[name] - saved[name]).abs().max()) for name in learned) < 1e-9
    assert changed(saved, load_policy(tmp_path / "policy").state_dict()) == []


async def test_scales_of_rewards_and_returns_and_schedules_go_on_with_a_checkpoint(tmp_path):
    how = {
        "policy": {**MLP, "normalise_values": True}, "reward_scaling": True, "fresh": False, "schedule": "cosine",
        "entropy_schedule": "linear", "total_steps": 4, "algorithm": {"name": "ppo", "overrides": {"entropy_bonus": 1}},
    }  # fmt: skip
    async with ActorSystem.local() as system:
        trajectories = await collected(system, MLP, 4)
        trainer = await trainer_of(system, **how)
        first = await trainer.train(trajectories)
        await trainer.save(str(tmp_path))
        metrics = await trainer.train(trajectories)
        again = await trainer_of(system, "again", **how)
        await again.restore(str(tmp_path))
        assert await again.train(trajectories) == metrics
        assert changed(await weights_of(trainer), await weights_of(again)) == []
    assert first["lr"] == pytest.approx(0.03)
    assert metrics["lr"] == pytest.approx(0.03 * 0.5 * (1 + 0.5**0.5))
    assert metrics["reward/scale"] != first["reward/scale"]


async def test_a_reward_that_is_no_number_does_not_come_into_the_scale():
    async with ActorSystem.local() as system:
        (part,) = await collected(system, MLP, 4)
        trainer, other = [await trainer_of(system, name, reward_scaling=True) for name in ("one", "other")]
        broken = dataclasses.replace(part.chunks, rewards=torch.full_like(part.chunks.rewards, torch.nan))
        with pytest.raises(FloatingPointError, match=r"reward.*finite"):
            await trainer.train([dataclasses.replace(part, chunks=broken)])
        assert await trainer.train([part]) == await other.train([part])


async def test_what_cannot_be_gone_on_from_is_said(tmp_path):
    async with ActorSystem.local() as system:
        trainer = await trainer_of(system)
        with pytest.raises(FileNotFoundError):
            await trainer.restore(str(tmp_path))
        await trainer.save(str(tmp_path))
        other = await trainer_of(system, "other", policy={**MLP, "hidden": [9]})
        with pytest.raises(ValueError, match="does not fit"):
            await other.restore(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"minibatch": 0}, "minibatch=0"),
        ({"schedule": "linear"}, "total_steps"),
        ({"micro_batch": 0}, "micro_batch=0"),
        (
            {"critic_warmup": 1, "policy": {**MLP, "value_level": None}, "algorithm": "grpo", "group_size": 2},
            r"policy.*critic",
        ),
        ({"algorithm": "pppo"}, "pppo"),
        ({"algorithm": "rloo"}, r"take.*grpo"),
        ({"algorithm": "grpo"}, "env.group_size"),
        ({"policy": {**MLP, "value_level": None}}, r"needs.*critic"),
        ({"policy": {**MLP, "hiden": [8]}}, r"mean hidden"),
    ],
)
async def test_a_bad_setting_is_named(settings, said):
    async with ActorSystem.local() as system:
        with pytest.raises(ValueError, match=said):
            await trainer_of(system, **settings)


def test_policies_are_trained_without_importing_language_models():
    """They take seconds to import, in every process of a run; and rank 0 needs nothing of agents and engines either."""
    program = (
        "import sys, rlinf.actors.policy_trainer, rlinf.actors.off_policy_trainer; print(*sys.modules)\n"
        "import rlinf.runs.start, rlinf.runs.embodied; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    actors, run = (line.split() for line in done.stdout.splitlines())
    assert "rlinf.training.optimizer" in actors
    assert [name for name in actors if name.startswith(("transformers", "rlinf.models.language"))] == []
    of_text = ("transformers", "rlinf.agents", "rlinf.engines.", "rlinf.flows.session", "rlinf.flows.grpo")
    assert [name for name in run if name.startswith(of_text)] == []


FROZEN = {"train": ["actor.*", "critic.*"]}


async def test_a_policy_that_is_new_is_never_left_with_what_it_was_made_with(tmp_path):
    other = {**MLP, "seed": 8}  # as where a run goes on from a checkpoint of another first policy
    async with ActorSystem.local() as system:
        trajectories = await collected(system, MLP, 4)
        saved = await trainer_of(system, "saved", policy=other, **FROZEN)
        await saved.train(trajectories)
        await saved.save(str(tmp_path))
        trainer = await trainer_of(system, "trainer", **FROZEN)
        await trainer.restore(str(tmp_path))
        policy = await system.spawn(PolicyActor, name="taught", policy=MLP)
        await policy.load(trainer.weights())
        await trainer.train(trajectories)
        part = await trainer.weights()
        assert set(part.left_out) == {"log_std"}
        assert await policy.load(part) == 2
        moved = await system.spawn(PolicyActor, name="moved", policy=MLP)
        with pytest.raises(LoadError, match=r"1 tensors.*log_std.*trainer\.weights\(whole=True\)"):
            await moved.load(trainer.weights())
        await moved.load(trainer.weights(whole=True))
        assert await moved.load(trainer.weights()) == 2
        lacking = dataclasses.replace(part, layout=part.layout[1:])
        with pytest.raises(LoadError, match="missing actor"):
            await moved.load(lacking)


async def test_a_policy_made_alike_needs_not_be_told_what_never_changes():
    async with ActorSystem.local() as system:
        trainer = await trainer_of(system, **FROZEN)
        await trainer.weights()  # a flow that works ahead may replace these before anybody has loaded them
        alike, other = [
            await system.spawn(PolicyActor, name=name, policy={**MLP, "seed": seed})
            for name, seed in (("alike", 3), ("other", 4))
        ]
        assert await alike.load(trainer.weights()) == 0
        with pytest.raises(LoadError, match=r"never.*those"):
            await other.load(trainer.weights())


async def test_schedules_count_batches_and_not_what_was_imitated_before(tmp_path):
    settings, numbers = {"schedule": "linear", "total_steps": 4}, torch.zeros(1, 1)
    shown = Demonstration({"state": torch.zeros(2, 2)}, torch.zeros(1, 1, 1), numbers, numbers == 0, True, True, None)
    async with ActorSystem.local() as system:
        trajectories = await collected(system, MLP, 4)
        write_demonstrations(tmp_path, [shown])
        trainer = await trainer_of(system, **settings)
        await trainer.imitate(str(tmp_path), steps=2)
        rates = [(await trainer.train(trajectories))["lr"] for _ in range(2)]
    assert rates == pytest.approx([0.03, 0.03 * 0.75])
