"""Conversations: what the model only read changes no gradient, except as context.

The reference is always the same: log-probs of the whole conversation by the model's own forward, one after the other,
and an algorithm that is shown the learned tokens alone. On our side everything that is said of the other tokens is NaN.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf import ActorSystem
from rlinf.actors.reference import Reference
from rlinf.algos import recipes
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, cut, pack
from rlinf.data.sample import Example, Group
from rlinf.models.language.build import build_model
from rlinf.models.language.policy_model import PolicyModel
from rlinf.training.batch_metrics import describe, rescue
from rlinf.training.fsdp import Learner
from rlinf.training.policy import advantage_rows, learn_answers, learn_policy
from tests.actors import toys
from tests.actors.programs import critics
from tests.actors.watched import Watched

BATCH = toys.conversations(critics.told(toys.told(toys.groups(6))))
ALGORITHMS = toys.ALGORITHMS | {
    "ppo": recipes.get("ppo", {"advantage": {"gamma": 0.9, "lam": 0.8}}),
    "ppo, kl in the reward": recipes.get("ppo", {"kl": {"place": "reward", "kind": "k1", "beta": 0.2}}),
}
LATER = frozenset({"proximal_logprobs"})
MASKED = [sample for judged in BATCH for sample in judged.scored if sample.loss_mask is not None]


def test_the_batch_has_what_it_is_to_test():
    assert set(recipes.NAMES) <= set(ALGORITHMS)
    assert any(sample.loss_mask is None for judged in BATCH for sample in judged.scored)
    assert any(not sample.loss_mask.any() for sample in MASKED), "one that learns nothing"
    assert any(sample.loss_mask[-1] for sample in MASKED)
    assert any(sample.loss_mask.any() and not sample.loss_mask[-1] for sample in MASKED)
    for sample in MASKED:
        for said in (sample.logprobs, *sample.per_token.values()):
            assert np.isnan(said[~sample.loss_mask]).all()
    packed = pack([Row.of(sample) for judged in BATCH for sample in judged.scored])
    assert packed.places is not None, "prompts are shared"


@functools.cache
def plainly(name):
    """Gradients of an algorithm, sample by sample."""
    plain = toys.model()
    toys.sample_by_sample(plain, ALGORITHMS[name], BATCH).backward()
    return toys.gradients(plain)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(budget=st.integers(1, 150), random=st.randoms(), packs=st.booleans())
@settings(max_examples=2)
def test_gradients_are_those_of_the_learned_tokens_alone_however_the_batch_is_cut(name, budget, random, packs):
    algorithm, ours = ALGORITHMS[name], toys.model()
    policy = PolicyModel(ours, chunk=7)
    policy._use(packs=packs, plain_head=True)
    learner = Learner(policy, LearningSettings(lr=0.0))
    learned = advantage_rows(algorithm, BATCH, later=LATER)
    rows = [row for some in learned.rows for row in some]
    random.shuffle(rows)
    for piece in cut(rows, [row.size for row in rows], budget):
        learn_policy(learner, pack(piece), algorithm, version=0, compare=True)
    weight = float(learner._sum.weight)
    found = {name: gradient / weight for name, gradient in toys.gradients(ours).items()}
    assert toys.furthest(found, plainly(name)) < 1e-5
    assert all(np.isfinite(value) for value in learner._sum.values().values()), "metrics, too"


def branched(judged):
    """A group whose answers go on from within the longest, with the temperature of the first two."""
    longest = max((sample.response_ids for sample in judged.samples), key=len)
    samples = []
    for sample in judged.samples:
        count = max(0, len(sample.response_ids) - 1 - sample.index % 2)
        ids = np.concatenate([longest[:count], sample.response_ids[count:]])
        samples.append(replace(sample, response_ids=ids, temperature=judged.samples[sample.index // 2].temperature))
    return replace(judged, samples=tuple(samples))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_of_branches_are_those_of_rows_that_are_read_apart(name):
    batch = list(map(branched, BATCH))
    rows = [row for some in advantage_rows(ALGORITHMS[name], batch, later=LATER).rows for row in some]
    found = []
    for shares in (True, False):
        ours = toys.model().double()
        learner = Learner(PolicyModel(ours, chunk=7), LearningSettings(lr=0.0))
        learn_policy(learner, pack(rows, shares=shares), ALGORITHMS[name], version=0, compare=True)
        found.append(toys.gradients(ours))
    tree = pack(rows)
    assert len(tree.ids) < 0.7 * sum(tree.lengths), "tokens of answers, too"
    assert len(tree.distinct) < 0.9 * len(tree.targets)
    assert toys.furthest(*found) < 1e-6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_and_shaped_rewards_are_those_of_the_learned_tokens_alone(name):
    whole, bare = (
        advantage_rows(ALGORITHMS[name], some, later=LATER) for some in (BATCH, toys.without_the_rest(BATCH))
    )
    assert whole.rewards == bare.rewards
    for one, other in zip(whole.advantages, bare.advantages, strict=True):
        np.testing.assert_array_equal(one, other)


def test_supervised_gradients_are_those_of_the_learned_tokens_alone():
    plain, ours = toys.model(), toys.model()
    losses, rows = [], []
    for sample in MASKED:
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        logprobs = torch.log_softmax(plain(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        losses.append(-logprobs[len(sample.prompt.token_ids) - 1 :][torch.tensor(sample.loss_mask)])
        rows.append(Row(sample.prompt.token_ids, sample.response_ids, loss_mask=sample.loss_mask))
    torch.cat(losses).mean().backward()
    learner = Learner(PolicyModel(ours), LearningSettings(lr=0.0))
    for piece in (rows[:3], rows[3:]):
        learn_answers(learner, pack(piece))
    weight = float(learner._sum.weight)
    assert weight == sum(sample.loss_mask.sum() for sample in MASKED)
    found = {name: gradient / weight for name, gradient in toys.gradients(ours).items()}
    assert toys.furthest(found, toys.gradients(plain)) < 1e-5


def test_lengths_and_ages_are_of_what_was_generated():
    metrics, bare = describe(BATCH, 0), describe(toys.without_the_rest(BATCH), 0)
    assert metrics["tokens"] > bare.pop("tokens")
    assert {name: metrics[name] for name in bare} == bare
    assert metrics["staleness/max"] <= 2


def test_a_batch_that_could_not_be_learned_is_kept_with_its_mask(tmp_path):
    from safetensors.numpy import load_file

    learned = advantage_rows(ALGORITHMS["reinforce_pp"], BATCH)
    kept = load_file(rescue(BATCH, learned.advantages, tmp_path, 3))
    assert kept["loss_mask"].shape == kept["response_ids"].shape
    assert len(kept["advantages"]) == kept["loss_mask"].sum()


# Through the actors ---------------------------------------------------------------------------------------------------


class WatchedTrainer(Watched, critics.Trainer):
    """A trainer that shows its gradients."""


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


SHARED = {"model": toys.configuration(), "tokenizer": toys.ALPHABET, "micro_batch_tokens": 30, "grad_clip": 1e9}


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"minibatches": 2, "algorithm": "grpo_icepop"}])
async def test_a_trainer_learns_of_conversations_what_it_learns_of_their_learned_tokens(system, settings):
    trainer = (await system.spawn(WatchedTrainer, name="trainer", **{**SHARED, "algorithm": "async_grpo", **settings}))[
        0
    ]
    began = (await trainer.inspect())["weights"]
    metrics = await trainer.train(BATCH)
    assert metrics["response_tokens"] == sum(s.learned_tokens for judged in BATCH for s in judged.scored)
    if "minibatches" in settings:
        return
    plain = toys.model()
    plain.load_state_dict(began, strict=False)
    toys.sample_by_sample(plain, recipes.get("async_grpo"), BATCH).backward()
    assert toys.furthest((await trainer.inspect())["gradients"][0], toys.gradients(plain)) < 1e-5


async def test_a_trainer_learns_masked_examples(system):
    trainer = (await system.spawn(WatchedTrainer, name="trainer", **SHARED))[0]
    answered = [Example(s.prompt.token_ids, s.response_ids, s.loss_mask) for s in MASKED]
    one = await trainer.sft([answered], lr=0.0)
    empty = Example(np.array([4]), np.array([5, 6]), np.zeros(2, bool))
    assert (await trainer.sft([[*answered, empty]], lr=0.0))["sft/loss"] == pytest.approx(one["sft/loss"], rel=1e-6)
    with pytest.raises(ValueError, match=r"token.*learn"):
        await trainer.sft([[empty]])


async def test_a_reference_says_the_log_probs_of_learned_tokens_and_nothing_of_others(system):
    reference = await system.spawn(Reference, name="reference", model=SHARED["model"], tokenizer=SHARED["tokenizer"])
    net = build_model(SHARED["model"], toys.load_tokenizer(toys.ALPHABET), seed=0)
    for judged in await reference.logprobs(BATCH).collect():
        expected = toys.logprobs_of(net, judged)
        for sample, whole in zip(judged.samples, expected, strict=True):
            mask = np.ones(len(whole), bool) if sample.loss_mask is None else sample.loss_mask
            np.testing.assert_allclose(sample.per_token["ref_logprobs"][mask], whole[mask], atol=1e-5)
            assert np.isnan(sample.per_token["ref_logprobs"][~mask]).all()


async def test_a_critic_values_and_learns_the_learned_tokens_alone(system):
    settings = {**critics.SETTINGS, "model": SHARED["model"], "precise": True}
    critic = (await system.spawn(critics.WatchedCritic, name="critic", **settings))[0]
    await critic.train(critics.told(toys.groups(5), seed=1))  # so that the head says something
    plain = critics.plain_model((await critic.inspect())["weights"]).double()
    valued = await critic.values(BATCH).collect()
    for sample in (sample for judged in valued for sample in judged.scored if sample.loss_mask is not None):
        with torch.no_grad():
            expected = critics.plain_values(plain, sample.prompt.token_ids, sample.response_ids).numpy()
        said = sample.per_token["values"]
        np.testing.assert_allclose(said[sample.loss_mask], expected[sample.loss_mask], atol=1e-5)
        assert np.isnan(said[~sample.loss_mask]).all()
    metrics = await critic.train(BATCH)
    critics.by_a_plain_loop(plain, BATCH).backward()
    assert toys.furthest((await critic.inspect())["gradients"][-1], toys.gradients(plain)) < 1e-5
    bare = [s for judged in toys.without_the_rest(BATCH) for s in judged.scored if len(s.response_ids)]
    assert metrics["values/mean"] == pytest.approx(np.concatenate([s.per_token["values"] for s in bare]).mean())


async def test_a_batch_without_a_learned_token_says_so(system):
    silent = toys.conversations(toys.groups(2))
    nothing = [
        Group(g.prompt, tuple(replace(s, loss_mask=np.zeros(len(s.response_ids), bool)) for s in g.samples))
        for g in silent
    ]
    trainer = await system.spawn(critics.Trainer, name="trainer", **SHARED)
    with pytest.raises(ValueError, match=r"response.*masked"):
        await trainer.train(nothing)


# Weights --------------------------------------------------------------------------------------------------------------


def summed(algorithm, batch):
    """Gradients of the batch's mean loss, and the rows."""
    ours = toys.model()
    learner = Learner(PolicyModel(ours), LearningSettings(lr=0.0))
    learned = advantage_rows(algorithm, batch, later=frozenset({"proximal_logprobs"}))
    rows = [row for some in learned.rows for row in some]
    for piece in cut(rows, [row.size for row in rows], 60):
        learn_policy(learner, pack(piece), algorithm, version=0)
    return {name: gradient / float(learner._sum.weight) for name, gradient in toys.gradients(ours).items()}


TWICE = [3 * judged.prompt.id % 4 for judged in BATCH]
"""Which sample of each group weighs double."""
WEIGHTED = [
    Group(g.prompt, tuple(replace(s, weight=2.0) if s.index == twice else s for s in g.samples))
    for g, twice in zip(BATCH, TWICE, strict=True)
]
REPEATED = [
    Group(g.prompt, tuple(s for sample in g.samples for s in [sample] * (1 + (sample.index == twice))))
    for g, twice in zip(BATCH, TWICE, strict=True)
]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_sample_that_weighs_double_counts_as_two(name):
    assert toys.furthest(summed(ALGORITHMS[name], WEIGHTED), summed(ALGORITHMS[name], REPEATED)) < 1e-5


async def test_a_sample_that_weighs_double_counts_as_two_for_the_critic(system):
    found = []
    for number, batch in enumerate((WEIGHTED, REPEATED)):
        settings = {**critics.SETTINGS, "model": SHARED["model"], "precise": True}
        critic = (await system.spawn(critics.WatchedCritic, name=f"critic{number}", **settings))[0]
        await critic.train(batch)
        found.append((await critic.inspect())["gradients"][0])
    heads = [{name: tensor for name, tensor in some.items() if "score" in name} for some in found]
    assert heads[0]["score.weight"].any()
    assert toys.furthest(*heads) < 1e-6


def test_a_task_in_parts_that_share_its_reward_counts_once():
    alone = advantage_rows(recipes.get("grpo"), toys.groups(4))
    parts = [
        Group(g.prompt, tuple(replace(s, weight=1 / 3) for s in g.samples for _ in range(3))) for g in toys.groups(4)
    ]
    in_parts = advantage_rows(recipes.get("grpo"), parts)
    np.testing.assert_allclose(in_parts.advantages, np.repeat(alone.advantages, 3), rtol=1e-4, atol=1e-5)


# Schemas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_answers_kept_to_a_schema_are_learned_as_by_the_log_probs_of_the_whole_softmax(name):
    def kept(sample, mass):
        masses = np.full(len(sample.response_ids), mass, np.float32)
        return replace(
            sample, log_mass=masses, logprobs=sample.logprobs - masses if np.isfinite(mass) else sample.logprobs
        )

    def batch(mass):
        return [Group(g.prompt, tuple(kept(s, mass) for s in g.samples)) for g in BATCH]

    plain = summed(ALGORITHMS[name], BATCH)
    assert toys.furthest(summed(ALGORITHMS[name], batch(-1.5)), plain) < 1e-5
    unknown = summed(ALGORITHMS[name], batch(np.inf))  # of a server: as if these weights had drawn them
    assert all(bool(gradient.isfinite().all()) for gradient in unknown.values())
    assert toys.furthest(unknown, plain) > 1e-5
