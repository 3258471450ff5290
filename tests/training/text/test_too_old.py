"""`staleness.mode: mask`: tokens that are too old are read and not learned, and everything else is as if they were."""

from dataclasses import replace

import numpy as np
import pytest

from rlinf import ActorSystem
from rlinf.actors.trainer import Trainer
from rlinf.algos import recipes
from rlinf.data.in_flight.admission import Fresh, fresh
from rlinf.data.sample import REWARDS, Group
from rlinf.training.batch_metrics import describe
from rlinf.training.policy import RETURNS, advantage_rows, algorithm_of, value_rows
from tests.actors import toys
from tests.actors.watched import Watched

NOW = 5
"""Version of the weights that learn."""


def aged(batch, seed=3):
    """Answers that were begun by weights up to four versions old and finished by newer ones; one is old throughout."""
    rng = np.random.default_rng(seed)

    def grown(sample):
        versions = np.sort(rng.integers(NOW - 4, NOW + 1, len(sample.response_ids))).astype(np.int32)
        old = sample.prompt.id == 1 and sample.index == 0
        return replace(sample, versions=np.full_like(versions, NOW - 4) if old else versions)

    return [Group(judged.prompt, tuple(map(grown, judged.samples))) for judged in batch]


def masked(batch, bound):
    found = Fresh()
    return [fresh(judged, NOW - bound, "mask", found) for judged in batch], found.masked


WHOLE = aged(toys.groups(6))
BATCH, MASKED = masked(WHOLE, 2)
SAMPLES = [sample for judged in BATCH for sample in judged.samples]
SHARED = {"model": toys.configuration(), "tokenizer": toys.ALPHABET, "micro_batch_tokens": 30, "grad_clip": 1e9}


class WatchedTrainer(Watched, Trainer):
    """A trainer that shows its gradients."""


def test_the_batch_has_what_it_is_to_test():
    assert MASKED == sum(sample.too_old for sample in SAMPLES) > 0
    assert any(sample.too_old and not sample.learned_tokens for sample in SAMPLES), "one with nothing left"
    assert any(sample.too_old and sample.learned_tokens for sample in SAMPLES)
    assert any(not sample.too_old for sample in SAMPLES)
    assert all(sample.generated_tokens == len(sample.response_ids) for sample in SAMPLES)
    again, more = masked(masked(WHOLE, 3)[0], 2)  # masked step by step
    assert [sample.too_old for judged in again for sample in judged.samples] == [s.too_old for s in SAMPLES]
    assert more < MASKED


def test_advantages_compare_whole_answers_and_rows_have_the_other_tokens():
    spec = recipes.get("grpo")
    whole, found = advantage_rows(spec, WHOLE), advantage_rows(spec, BATCH)
    assert found.advantages == whole.advantages
    assert [row.learned for rows in found.rows for row in rows] == [
        sample.learned_tokens for judged in BATCH for sample in judged.scored if sample.learned_tokens
    ]
    nothing = replace(BATCH[0].samples[0], loss_mask=np.zeros(len(BATCH[0].samples[0].response_ids), bool))
    silent = Group(BATCH[0].prompt, (nothing, replace(nothing, index=1, reward=0.0)))
    assert advantage_rows(spec, [silent]).rows == [[]]


def test_the_penalty_near_the_length_limit_is_that_of_the_whole_answer():
    spec = recipes.get("dapo", {"shaping": {"longest": 6, "cache": 4}})
    assert advantage_rows(spec, BATCH).rewards == advantage_rows(spec, WHOLE).rewards
    assert advantage_rows(spec, BATCH).rewards != [reward for judged in BATCH for reward in judged.rewards]


def test_returns_of_the_tokens_that_are_left_have_no_reward_that_fell_before():
    spec = recipes.get("ppo", {"advantage": {"gamma": 0.5, "whiten": False}})
    (judged,) = WHOLE[:1]

    def told(sample):
        rng = np.random.default_rng(sample.index)
        rewards, values = rng.random((2, len(sample.response_ids))).astype(np.float32)
        return replace(sample, per_token={"values": values, REWARDS: rewards}, reward=float(rewards.sum()) + 0.5)

    whole = Group(judged.prompt, tuple(told(sample) for sample in judged.samples))
    ((short,), count) = masked([whole], 2)
    assert count
    ours = iter(value_rows(spec, [short]).rows[0])
    for row, sample in zip(value_rows(spec, [whole]).rows[0], short.scored, strict=True):
        if sample.learned_tokens:  # what is left is the end of an answer, and returns look ahead
            np.testing.assert_allclose(
                next(ours).columns[RETURNS], row.columns[RETURNS][-sample.learned_tokens :], atol=1e-6
            )


def test_metrics_tell_what_was_generated_and_the_ages_of_what_is_learned():
    found, whole = describe(BATCH, NOW, oldest=2), describe(WHOLE, NOW, oldest=4)
    for name in ("reward/mean", "response_length/mean", "response_length/max", "response_tokens", "tokens", "samples"):
        assert found[name] == whole[name], name
    ages = np.concatenate([NOW - sample.column("versions") for judged in BATCH for sample in judged.scored])
    assert (whole["staleness/max"], found["staleness/max"]) == (4, 2)
    assert found["staleness/mean"] == pytest.approx(ages.mean())
    assert [found[f"staleness/share/{age}"] for age in range(3)] == pytest.approx(
        [(ages == n).mean() for n in range(3)]
    )
    assert "staleness/share/0" not in describe(BATCH, NOW)


def test_answers_that_were_cut_and_give_no_gradient_have_no_age():
    old = [s for judged in WHOLE for s in judged.scored if s.versions[0] < NOW - 2]
    cut = [Group(g.prompt, tuple(replace(s, truncated=s in old) for s in g.samples)) for g in WHOLE]
    young = max(NOW - s.versions[0] for judged in WHOLE for s in judged.scored if s not in old)
    assert describe(cut, NOW, recipes.get("grpo", {"truncated": "mask"}))["staleness/max"] == young < 3
    assert describe(cut, NOW)["staleness/max"] == 4


PER_ANSWER = {"name": "grpo", "overrides": {"aggregation.how": "seq-mean-token-mean"}}
"""The mean over an answer is that over what is learned of it."""


@pytest.mark.parametrize("algorithm", ["grpo_tis", PER_ANSWER])
async def test_gradients_are_those_of_the_tokens_that_are_left(algorithm):
    batch = [judged.with_column("ref_logprobs", [s.logprobs for s in judged.samples]) for judged in BATCH]
    async with ActorSystem.local() as system:
        trainer = (await system.spawn(WatchedTrainer, name="trainer", **SHARED, algorithm=algorithm, staleness=2))[0]
        began = (await trainer.inspect())["weights"]
        metrics = await trainer.train(
            [Group(g.prompt, tuple(replace(s, per_token={}) for s in g.samples)) for g in batch]
        )
        gradient = (await trainer.inspect())["gradients"][0]
    plain = toys.model()
    plain.load_state_dict(began, strict=False)
    batch = [judged.with_column("teacher_logprobs", [s.logprobs for s in judged.samples]) for judged in batch]
    toys.sample_by_sample(plain, algorithm_of(algorithm), batch).backward()
    assert toys.furthest(gradient, toys.gradients(plain)) < 1e-5
    assert metrics["response_tokens"] == sum(len(s.response_ids) for g in BATCH for s in g.scored)
    assert 0 < metrics["staleness/ess"] < 1
