"""Whole off-policy runs on the toy, in one process: offline and online, from pictures, and from an expert."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.actors.off_policy_trainer import DaggerTrainer, ReplaySettings, SacTrainer
from rlinf.actors.policy import DaggerPolicy
from rlinf.data.step import EmbodiedStep
from rlinf.envs.toy import expert
from rlinf.flows.embodied import embodied
from rlinf.flows.offline import offline
from rlinf.flows.record import record
from rlinf.models.policy.build import build_policy_model, save_policy
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.replay import ReplayBuffer
from tests.flows.reaching import TOY, Expert, environments, equal, policy_for, roles, steps

PIXELS = {"type": "soft_pixels", "image": [8, 8, 3], "state_size": 0, "hidden": [16], "channels": [4, 8]}
PICTURES = {"options": {"pixels": 8}}
MLP = {"type": "mlp", "hidden": [32, 32], "value_level": None}


def crooked(observation, instructions=None):
    """An expert that answers with one number too many."""
    return torch.zeros(len(observation["state"]), 1, 2)


async def shown(system, path, episodes=24):
    env = await environments(system, "shown", auto_reset=False, seed=3)
    await record(env, await system.spawn(Expert, name="expert"), path, episodes)


async def dagger(system, name="", *, expert=f"{__name__}.expert", policy=None, trainer=None, env=None):
    """Roles of a DAgger run."""
    config = policy_for({**MLP, **(policy or {})})
    env = await environments(system, f"env{name}", **(env or {}))
    acting = await system.spawn(DaggerPolicy, name=f"policy{name}", policy=config, expert=expert, beta=0.5)
    learning = {"batch": 32, "updates": 60, "lr": 3e-3, **(trainer or {})}
    learner = await system.spawn(DaggerTrainer, name=f"trainer{name}", policy=config, **learning)
    return {"env": env, "policy": acting, "trainer": learner}


async def lived(group, count, first=0):
    return [await embodied(EmbodiedStep(first + n, horizon=4, fresh=False), **group) for n in range(count)]


async def test_dagger_learns_what_the_expert_does_where_the_policy_gets():
    async with ActorSystem.local() as system:
        group = await dagger(system)
        metrics = await lived(group, 5)
        env = await environments(system, "tried", num_envs=32, auto_reset=False, seed=77)
        seen = await env[0].reset(0, 0)
        greedy = await group["policy"][0].act((0, 0), seen, greedy=True, keep=False)
    assert [each["dagger/labels"] for each in metrics] == [32.0, 64.0, 96.0, 128.0, 160.0]
    assert metrics[-1]["dagger/loss"] < metrics[0]["dagger/loss"]
    assert (greedy - expert(seen.observation)).abs().mean() < 0.15


async def test_a_saved_policy_is_an_expert_too_and_one_that_does_not_fit_is_named(tmp_path):
    expert = build_policy_model(policy_for({**MLP, "seed": 9}))
    save_policy(expert, tmp_path)
    async with ActorSystem.local() as system:
        group = await dagger(system, expert=str(tmp_path))
        seen = await group["env"][0].reset(0, 0)
        await group["policy"][0].act((0, 0), seen)
        after = await group["env"][0].step(0, torch.zeros(8, 1, 1))
        kept = (await group["policy"][0].trajectory((0, 0), after)).stored
        assert torch.equal(kept["actions"][0], expert.act(seen.observation, greedy=True).actions)
        wrong = await dagger(system, "wrong", expert=f"{__name__}.crooked")
        with pytest.raises(ValueError, match=r"dagger\.expert: it answered \[8, 1, 2\]"):
            await lived(wrong, 1)


async def test_a_resumed_dagger_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    async with ActorSystem.local() as system:
        await shown(system, tmp_path / "shown")
        begun = {"demonstrations": str(tmp_path / "shown"), "updates": 5}
        group = await dagger(system, "a", trainer=begun)
        first = await lived(group, 2)
        await group["trainer"].save(str(tmp_path / "saved"))
        state = await group["env"][0].state()
        await lived(group, 2, first=2)
        expected = await group["trainer"][0].weights()

        again = await dagger(system, "b", trainer=begun)
        assert await again["trainer"][0].restore(str(tmp_path / "saved/state")) == 2
        await again["env"][0].restore(state)
        await again["policy"].load(again["trainer"].weights())
        await lived(again, 2, first=2)
        assert equal(await again["trainer"][0].weights(), expected)
    assert first[0]["dagger/labels"] > 32  # it began with what was shown


@pytest.mark.parametrize("algorithm", ["iql", "crossq"])
async def test_learning_goes_on_by_acting_after_demonstrations_alone_bit_for_bit(tmp_path, algorithm):
    settings = {"algorithm": algorithm, "demonstrations": str(tmp_path / "shown"), "offline_updates": 6, "warmup": 16}
    policy = {"batch_norm": algorithm == "crossq"}
    async with ActorSystem.local() as system:
        await shown(system, tmp_path / "shown")
        one = await roles(system, name="a", policy=policy, **settings)
        studied = [await offline(one["policy"], one["trainer"]) for _ in range(2)]
        await one["trainer"].save(str(tmp_path / "saved"))
        metrics = await steps(one, 3)
        expected = await one["trainer"][0].weights()

        two = await roles(system, name="b", policy=policy, **settings)
        assert await two["trainer"][0].restore(str(tmp_path / "saved/state")) == 2
        await two["policy"].load(two["trainer"].weights())
        await steps(two, 3)
        assert equal(await two["trainer"][0].weights(), expected)
    assert [each["optimizer_steps"] for each in studied] == [6.0, 6.0]
    assert sum(each["optimizer_steps"] for each in metrics) == 2 * 32 - 16


class Looking(SacTrainer):
    """Says how many pictures it keeps."""

    @endpoint
    async def pictures(self):
        return self._replay.pictures, len(self._replay)


async def test_a_resumed_run_from_pictures_repeats_bit_for_bit_and_keeps_each_picture_once(tmp_path):
    learning = {
        "kind": Looking,
        "env": PICTURES,
        "policy": PIXELS,
        "capacity": 80,
        "shift": 1,
        "n_step": 2,
        "warmup": 16,
        "batch": 8,
    }
    async with ActorSystem.local() as system:
        one = await roles(system, name="a", **learning)
        await steps(one, 3)
        await one["trainer"].save(str(tmp_path))
        state = await one["env"][0].state()
        await steps(one, 1, first=3)
        expected = await one["trainer"][0].weights()
        kept, rows = await one["trainer"][0].pictures()

        two = await roles(system, name="b", **learning)
        await two["trainer"][0].restore(str(tmp_path / "state"))
        await two["env"][0].restore(state)
        await two["policy"].load(two["trainer"].weights())
        await steps(two, 1, first=3)
        assert equal(await two["trainer"][0].weights(), expected)
        assert await two["trainer"][0].pictures() == (kept, rows)
    assert rows == 80
    assert kept < 1.6 * rows


async def test_there_is_nothing_to_study_without_demonstrations():
    async with ActorSystem.local() as system:
        group = await roles(system)
        with pytest.raises(ValueError, match=r"set off_policy\.demonstrations"):
            await offline(group["policy"], group["trainer"])
        with pytest.raises(ValueError, match=r"algorithm='sacc'.*none"):
            await roles(system, name="x", algorithm="sacc")


def guide(observation, steps, *, patience=1):
    """Somebody who goes to the target after so many steps of the policy."""
    return expert(observation)[:, 0], steps >= patience


def guided(patience=1):
    """Simulators in which somebody intervenes, as settings of an `EnvActor`."""
    options = {"simulator": TOY["simulator"], "intervener": f"{__name__}.guide", "arguments": {"patience": patience}}
    return {"simulator": "rlinf.envs.interventions.Overridable", "options": options}


async def test_without_an_expert_dagger_learns_what_whoever_intervened_did_and_nothing_else():
    async with ActorSystem.local() as system:
        group = await dagger(system, expert=None, trainer={"corrections": True}, env=guided())
        metrics = await lived(group, 5)
        env = await environments(system, "tried", num_envs=32, auto_reset=False, seed=77)
        seen = await env[0].reset(0, 0)
        greedy = await group["policy"][0].act((0, 0), seen, greedy=True, keep=False)
        alone = await dagger(system, "alone", expert=None, trainer={"corrections": True})
        untouched = await lived(alone, 1)
    labels = [0.0, *(each["dagger/labels"] for each in metrics)]
    for before, after, each in zip(labels, labels[1:], metrics, strict=False):
        assert after - before == pytest.approx(each["interventions/share"] * each["env_steps"])
    assert 0.0 < metrics[0]["interventions/share"] < 1.0
    assert (greedy - expert(seen.observation)).abs().mean() < 0.15  # as where an expert answers everywhere
    assert untouched[0]["dagger/labels"] == untouched[0]["optimizer_steps"] == 0.0


async def test_what_somebody_did_is_remembered_twice_and_drawn_with_demonstrations_also_after_a_resume(tmp_path):
    async with ActorSystem.local() as system:
        await shown(system, tmp_path / "shown", episodes=2)
        begun = {"env": guided(), "demonstrations": str(tmp_path / "shown")}
        group = await roles(system, name="a", **begun)
        metrics = await steps(group, 3)
        await group["trainer"].save(str(tmp_path / "saved"))
        state = await group["env"][0].state()
        await steps(group, 2, first=3)
        expected = await group["trainer"][0].weights()

        again = await roles(system, name="b", **begun)
        await again["trainer"][0].restore(str(tmp_path / "saved/state"))
        await again["env"][0].restore(state)
        await again["policy"].load(again["trainer"].weights())
        await steps(again, 2, first=3)
        assert equal(await again["trainer"][0].weights(), expected)
    corrections = sum(each["interventions/share"] * each["env_steps"] for each in metrics)
    assert 0 < metrics[-1]["replay/corrections"] == pytest.approx(corrections)
    assert metrics[-1]["replay/rows"] == sum(each["decisions"] for each in metrics)


@given(demos=st.integers(0, 40), corrections=st.integers(0, 40), share=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_a_batch_has_its_share_of_others_and_each_of_them_equally_often(demos, corrections, share):
    trainer = SacTrainer()
    trainer._replay_settings = ReplaySettings(batch=4096, demo_share=share)

    def buffer(kind, rows):
        made = ReplayBuffer(100)
        if rows:
            made.add({"kind": torch.full((rows,), kind)})
        return made

    trainer._replay, trainer._demos, trainer._corrections = buffer(0, 9), buffer(1, demos), buffer(2, corrections)
    batch = trainer._drawn(7)
    counts = batch["kind"].bincount(minlength=3)
    assert torch.equal(batch["others"], batch["kind"] > 0)
    others = round(share * 4096) if demos + corrections else 0
    assert counts.tolist()[0] == 4096 - others
    fair = others * corrections / max(demos + corrections, 1)
    assert abs(int(counts[2]) - fair) <= 6 * 32  # six standard deviations of 4096 throws, which are at most 32
