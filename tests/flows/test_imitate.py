"""From a script's demonstrations to a policy that solves the toy, and to learning that starts from them."""

import pytest
import torch

from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import ImitationTrainer, PolicyTrainer
from rlinf.data.demonstrations import DemonstrationSet, decisions, read_demonstrations
from rlinf.flows.evaluate import trials
from rlinf.flows.imitate import imitate
from rlinf.flows.record import record
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.system.system import ActorSystem
from tests.flows.reaching import SOFT, Expert, environments, equal, policy_for, roles, steps


async def recorded(system, path, episodes=24, **settings):
    """Demonstrations of the script."""
    env = await environments(system, "shown", auto_reset=False, seed=3, **settings)
    expert = await system.spawn(Expert, name="expert")
    return await record(env, expert, path, episodes)


async def share_solved(system, policy, name="trials", **settings):
    """Of 32 trials that nobody learned from."""
    env = await environments(system, name, num_envs=32, auto_reset=False, seed=77, **settings)
    return sum(episode.success_once for episode in await trials(env, policy, 32)) / 32


async def test_what_is_recorded_is_what_was_done(tmp_path):
    async with ActorSystem.local() as system:
        assert await recorded(system, tmp_path, 12) == 16  # two rounds of 8, of which 12 are kept
    found = read_demonstrations(tmp_path)
    assert len(found) == 12
    for shown in found:
        point, target = shown.observation["state"].T
        assert (target == target[0]).all()
        torch.testing.assert_close(point[1:], point[:-1] + shown.actions[:, 0, 0] * 0.25)
        torch.testing.assert_close(shown.rewards[:, 0], -(point[1:] - target[1:]).abs())
        assert shown.terminated
        assert shown.success
        assert shown.valid.all()


async def test_episodes_that_fail_are_not_recorded(tmp_path):
    async with ActorSystem.local() as system:
        played = await recorded(system, tmp_path, 8, max_steps=3)  # too short for targets that are far away
        assert played > 8
        env = await environments(system, "idle", auto_reset=False)
        idle = await system.spawn(PolicyActor, name="idle policy", policy=policy_for({"type": "mlp"}))
        with pytest.raises(RuntimeError, match=r"8 episodes"):
            await record(env, idle, tmp_path, 1)
    assert all(shown.success and len(shown.actions) <= 3 for shown in read_demonstrations(tmp_path))


@pytest.mark.parametrize("config", [{"type": "mlp", "chunk": 3}, SOFT], ids=["mlp, chunks", "soft"])
async def test_a_policy_that_imitates_an_expert_solves_its_task(tmp_path, config):
    config = policy_for({"hidden": [32, 32], **config}, dims=2)
    toy = {"options": {"dims": 2}}
    async with ActorSystem.local() as system:
        await recorded(system, tmp_path, 32, **toy)
        policy = await system.spawn(PolicyActor, name="policy", policy=config)
        if config["type"] == "mlp":
            trainer = await system.spawn(PolicyTrainer, name="trainer", policy=config)
        else:
            trainer = (await roles(system, name=" of soft", policy=config))["trainer"]
        before = await share_solved(system, policy, "before", **toy)
        metrics = await imitate(policy, trainer, tmp_path, steps=300, lr=3e-3)
        after = await share_solved(system, policy, "after", **toy)
        assert await policy[0].version() == 1
    assert metrics["imitation/decisions"] == len(decisions(read_demonstrations(tmp_path), 1))
    assert metrics["imitation/last"] < metrics["imitation/loss"]
    assert before < 0.4
    assert after > 0.9


async def test_imitating_leaves_the_spread_that_exploration_needs(tmp_path):
    config = policy_for({"type": "mlp", "hidden": [8]})
    async with ActorSystem.local() as system:
        await recorded(system, tmp_path)
        trainer = await system.spawn(PolicyTrainer, name="trainer", policy=config)
        before = dict((await trainer[0].weights()).named())
        await trainer.imitate(str(tmp_path), steps=3)
        kept = dict((await trainer[0].weights()).named())
        await trainer.imitate(str(tmp_path), steps=3, fixed=())
        free = dict((await trainer[0].weights()).named())
    assert torch.equal(before["log_std"], kept["log_std"])
    assert not torch.equal(before["log_std"], free["log_std"])
    assert kept["norm.count"] > 0  # states come at their scale
    assert all(torch.equal(before[name], free[name]) for name in before if name.startswith("critic."))


class Showing(SacTrainer):
    """Shows a batch."""

    @endpoint
    async def batch(self):
        return self._drawn(7)


async def test_demonstrations_are_half_of_each_batch_and_learning_goes_on_with_them(tmp_path):
    async with ActorSystem.local() as system:
        await recorded(system, tmp_path, 32)
        group = await roles(
            system, kind=Showing, policy={"critics": 4, "layer_norm": True}, subset=2, warmup=16, utd=4.0,
            actor_every=2, demonstrations=str(tmp_path),
        )  # fmt: skip
        metrics = await steps(group, 4)
        batch = await group["trainer"][0].batch()
        solved = await share_solved(system, group["policy"])
    shown = decisions(read_demonstrations(tmp_path), 1)
    known = {tuple(row) for row in torch.cat([shown.observation["state"], shown.following["state"]], 1).tolist()}
    theirs = [tuple(row) in known for row in torch.cat([batch["seen.state"], batch["following.state"]], 1).tolist()]
    assert len(theirs) == 32
    assert all(theirs[16:])
    assert not any(theirs[:16])  # a beginner does not go as the expert does
    assert sum(each["optimizer_steps"] for each in metrics) == 4 * (3 * 32 - 16)
    assert solved > 0.9


async def test_demonstrations_of_another_task_are_refused(tmp_path):
    async with ActorSystem.local() as system:
        await recorded(system, tmp_path, 8)
        trainer = await system.spawn(PolicyTrainer, name="trainer", policy=policy_for({"type": "mlp"}, dims=2))
        before = await trainer[0].weights()
        with pytest.raises(ValueError, match="another environment"):
            await trainer.imitate(str(tmp_path), steps=1)
        with pytest.raises(FileNotFoundError, match="nothing"):
            await trainer.imitate(str(tmp_path / "nothing"), steps=1)
        assert equal(before, await trainer[0].weights())


async def test_a_run_of_imitation_learns_the_same_however_its_steps_and_batches_are_cut(tmp_path):
    config = policy_for({"type": "mlp", "hidden": [8]})

    async def learned(system, cuts, micro_batch=None):
        trainer = await system.spawn(
            ImitationTrainer,
            name=f"trainer {len(cuts)} {micro_batch}",
            policy=config,
            demonstrations=DemonstrationSet.at(tmp_path),
            batch=20,
            micro_batch=micro_batch,
            lr=1e-2,
        )
        metrics = [await trainer.imitate_steps(*cut) for cut in cuts]
        return metrics, dict((await trainer[0].weights()).named())

    async with ActorSystem.local() as system:
        await recorded(system, tmp_path)
        _, whole = await learned(system, [(0, 6)])
        (first, *_), parts = await learned(system, [(0, 2), (2, 2), (4, 2)])
        (small, *_), _ = await learned(system, [(0, 2)], micro_batch=7)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for name in ("loss", "grad_norm"):  # means over two steps of float32 sums in another order
        assert small[name] == pytest.approx(first[name], rel=1e-4)
    assert first["imitation/epochs"] > 0
