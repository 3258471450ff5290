"""The learner against a plain loop, and its independence of how a batch is cut."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, cut, pack
from rlinf.models.language.policy_model import PolicyModel
from rlinf.training.checkpoint import copy_state, load_state
from rlinf.training.fsdp import Learner
from rlinf.training.optimizer import lr_factor
from rlinf.training.policy import advantage_rows, learn_answers, learn_policy
from tests.actors.toys import (
    ALGORITHMS,
    CLIP,
    advantages,
    by_a_plain_loop,
    furthest,
    gradients,
    groups,
    model,
    sample_by_sample,
    told,
)
from tests.actors.watched import in_double

BATCH = groups(6)
ROWS = [Row.of(s, gain) for judged in BATCH for s, gain in zip(judged.scored, advantages(judged), strict=True)]
TOKENS = sum(len(row.response_ids) for row in ROWS)
WITHOUT_CLIPPING = {"lr": 0.0, "grad_clip": math.inf}


@pytest.fixture(scope="module")
def expected():
    """Loss and gradients of a plain loop, for each kind of model."""
    found = {}
    for kind in ("qwen2", "llama", "qwen3"):
        plain = model(kind)
        loss = by_a_plain_loop(plain, BATCH)
        loss.backward()
        found[kind] = float(loss.detach()), gradients(plain)
    return found


def learned(rows, dtype):
    """Gradients of rows, and what they weigh."""
    net = model("qwen2") if dtype == torch.float32 else in_double(model("qwen2"))
    learner = Learner(PolicyModel(net), LearningSettings(**WITHOUT_CLIPPING))
    for piece in cut(rows, [row.size for row in rows], 40):
        learn_policy(learner, pack(piece), **CLIP)
    return gradients(net), float(learner._sum.weight)


@pytest.fixture(scope="module")
def by_one_copy():
    return {dtype: learned(ROWS, dtype) for dtype in (torch.float32, torch.float64)}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@given(copies=st.lists(st.integers(0, 3), min_size=len(ROWS), max_size=len(ROWS)), order=st.permutations(ROWS))
@settings(max_examples=6)
def test_gradients_of_copies_add_up_to_those_of_one_whichever_computed_what(by_one_copy, dtype, bound, copies, order):
    """However many copies join and leave between two micro-batches: up to rounding, which grows as the root of their
    number."""
    parts = [[row for copy, row in zip(copies, order, strict=True) if copy == number] for number in range(4)]
    several = [learned(rows, dtype) for rows in parts if rows]
    expected, weight = by_one_copy[dtype]
    found = {name: sum(gradient[name] for gradient, _ in several) for name in expected}
    assert furthest(found, expected) < bound * math.sqrt(len(ROWS))
    assert sum(mine for _, mine in several) == weight == TOKENS


@pytest.mark.parametrize(
    "kind",
    [pytest.param("qwen2", marks=pytest.mark.repeated), pytest.param("llama", marks=pytest.mark.repeated), "qwen3"],
)
@given(
    budget=st.integers(1, 150),
    order=st.permutations(range(len(ROWS))),
    chunk=st.integers(1, 40),
    checkpointing=st.booleans(),
    packs=st.booleans(),
)
@settings(max_examples=12)
def test_gradients_are_those_of_a_plain_loop_however_the_batch_is_cut(
    expected, kind, budget, order, chunk, checkpointing, packs
):
    ours = model(kind)
    policy = PolicyModel(ours, chunk=chunk, gradient_checkpointing=checkpointing)
    if not packs:
        policy._use(packs=False, plain_head=True)
    learner = Learner(policy, LearningSettings(**WITHOUT_CLIPPING))
    rows = [ROWS[i] for i in order]
    for piece in cut(rows, [row.size for row in rows], budget):
        learn_policy(learner, pack(piece), **CLIP)
    found = {name: gradient / TOKENS for name, gradient in gradients(ours).items()}
    loss, plain = expected[kind]
    assert furthest(found, plain) < 1e-5
    gathered, numbers = learner.step()
    assert numbers["loss"] == pytest.approx(loss, abs=1e-6)
    assert float(gathered.weight) == TOKENS
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in plain.values()))
    assert numbers["grad_norm"] == pytest.approx(norm, rel=1e-5)


TOLD = told(groups(5))


@functools.cache
def plainly(name):
    """Gradients of an algorithm, sample by sample."""
    plain = model()
    sample_by_sample(plain, ALGORITHMS[name], TOLD).backward()
    return gradients(plain)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(budget=st.integers(1, 150), random=st.randoms())
@settings(max_examples=2)
def test_every_algorithm_has_the_gradient_of_a_plain_loop_however_the_batch_is_cut(name, budget, random):
    ours, algorithm = model(), ALGORITHMS[name]
    learner = Learner(PolicyModel(ours, chunk=7), LearningSettings(**WITHOUT_CLIPPING))
    learned = advantage_rows(algorithm, TOLD, later=frozenset({"proximal_logprobs"}))
    rows = [row for some in learned.rows for row in some]
    random.shuffle(rows)
    for piece in cut(rows, [row.size for row in rows], budget):
        learn_policy(learner, pack(piece), algorithm, version=0)
    weight = float(learner._sum.weight)
    assert furthest({name: found / weight for name, found in gradients(ours).items()}, plainly(name)) < 1e-5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rank_without_work_knows_no_column_and_adds_nothing(name):
    ours = model()
    learner = Learner(PolicyModel(ours), LearningSettings(**WITHOUT_CLIPPING))
    learn_policy(learner, pack([]), ALGORITHMS[name], version=0, compare=True)
    assert all(not gradient.any() for gradient in gradients(ours).values())
    assert len(gradients(ours)) == len(list(ours.parameters()))
    assert float(learner._sum.weight) == 0


def test_a_rank_without_work_adds_nothing_to_any_gradient():
    ours = model()
    learner = Learner(PolicyModel(ours), LearningSettings(**WITHOUT_CLIPPING))
    learn_policy(learner, pack([]), **CLIP, compare=True)
    assert all(not gradient.any() for gradient in gradients(ours).values())
    assert len(gradients(ours)) == len(list(ours.parameters()))
    learn_policy(learner, pack(ROWS[:3]), **CLIP, compare=True)
    assert math.isfinite(learner.step()[0].values()["mismatch/max"])


def test_steps_are_those_of_adam_with_warm_up_and_clipping():
    plain, ours = model(), model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    learner = Learner(
        PolicyModel(ours),
        LearningSettings(lr=0.01, warmup_steps=3, betas=(0.9, 0.99), weight_decay=0.1, grad_clip=0.05),
    )
    for number in range(5):
        optimizer.zero_grad()
        by_a_plain_loop(plain, BATCH).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1, (number + 1) / 3)
        optimizer.step()
        learn_policy(learner, pack(ROWS), **CLIP)
        assert learner.step()[1]["lr"] == pytest.approx(group["lr"])
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    total=st.integers(1, 60),
    least=st.floats(0, 1),
)
def test_the_learning_rate_rises_then_falls_until_the_last_step_and_never_to_nothing(schedule, warmup, total, least):
    total += warmup
    rates = [lr_factor(done, schedule, warmup, total, least) for done in range(total + 5)]
    assert rates[:warmup] == pytest.approx([step / warmup for step in range(1, warmup + 1)])
    after = rates[max(0, warmup - 1) :]
    assert all(one >= other - 1e-12 for one, other in itertools.pairwise(after))
    assert rates[max(0, warmup - 1)] == 1.0
    assert all(rates)
    share = 1 / (total + 1 - max(1, warmup))  # of the way down that the last step is still above the end
    left = {"constant": 1.0, "linear": share, "cosine": (1 - math.cos(math.pi * share)) / 2}[schedule]
    assert rates[total - 1 :] == pytest.approx([1.0 if schedule == "constant" else least + (1 - least) * left] * 6)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_schedules_are_those_of_transformers(steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for name, reference in (
        ("linear", transformers.get_linear_schedule_with_warmup),
        ("cosine", transformers.get_cosine_schedule_with_warmup),
    ):
        (expected,) = reference(optimizer, 0, steps).lr_lambdas
        assert [lr_factor(done, name, 0, steps, 0.0) for done in range(steps)] == pytest.approx(
            [expected(done) for done in range(steps)]
        )


def test_steps_that_are_passed_over_move_the_schedule_on_but_no_warm_up():
    learner = Learner(PolicyModel(model()), LearningSettings(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6))
    learner.pass_over(3)
    assert learner.schedule.get_last_lr() == [0.5]
    for done, expected in ((2, 0.2), (3, 0.2)):  # of five that fall from the second on, the last; and none beyond
        learner.schedule.last_epoch = done
        learner.pass_over(3)
        assert learner.schedule.get_last_lr() == pytest.approx([expected])
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_schedules_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="needs total_steps"):
        Learner(PolicyModel(model()), LearningSettings(lr=0.1, schedule="linear"))
    with pytest.raises(ValueError, match="schedule"):
        LearningSettings(lr=0.1, schedule="steps")


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_checkpoint_brings_the_place_in_the_schedule_and_the_settings_stay_those_given(schedule, tmp_path):
    before = {"lr": 0.01, "warmup_steps": 6, "schedule": schedule, "total_steps": 20, "weight_decay": 0.3}
    saved = Learner(PolicyModel(model()), LearningSettings(**before))
    for _ in range(4):
        learn_policy(saved, pack(ROWS), **CLIP)
        saved.step()
    copy_state(saved.module.model, saved.optimizer, saved.schedule, 4, rank=0, ranks=1).write(tmp_path)

    def gone_on(**settings):
        learner = Learner(PolicyModel(model()), LearningSettings(**settings))
        load_state(learner.module.model, learner.optimizer, learner.schedule, tmp_path, rank=0)
        learner.resumed()
        learn_policy(learner, pack(ROWS), **CLIP)
        return learner, learner.step()[1]["lr"]

    learn_policy(saved, pack(ROWS), **CLIP)
    expected = saved.step()[1]["lr"]
    same, rate = gone_on(**before)
    assert rate == expected == pytest.approx(0.01 * 5 / 6)
    for one, other in zip(same.module.parameters(), saved.module.parameters(), strict=True):
        assert torch.equal(one, other)
    changed = {**before, "lr": 0.1, "warmup_steps": 2, "total_steps": 40, "weight_decay": 0.0, "betas": (0.5, 0.6)}
    other, rate = gone_on(**changed)
    assert rate == pytest.approx(0.1 * lr_factor(4, schedule, 2, 40, 0.0))
    (group,) = other.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.0, (0.5, 0.6))
    assert other.optimizer.state[next(iter(other.module.parameters()))]["step"] == 5, "what it remembers is there"


def test_the_mismatch_is_measured_when_asked():
    learner = Learner(PolicyModel(model()), LearningSettings(lr=0.0))
    learn_policy(learner, pack(ROWS), **CLIP)
    assert "mismatch/mean" not in learner._sum.values()
    learn_policy(learner, pack(ROWS), **CLIP, compare=True)
    values = learner.step()[0].values()
    assert 0 < values["mismatch/mean"] < values["mismatch/max"] < 10


def test_with_ages_the_mismatch_is_that_of_tokens_of_these_weights_and_older_ones_have_drifted():
    learner, quiet = (
        Learner(PolicyModel(model()), LearningSettings(lr=0.0)),
        Learner(PolicyModel(model()), LearningSettings(lr=0.0)),
    )
    aged = [replace(row, columns={"versions": np.full(row.learned, 5 - n % 3)}) for n, row in enumerate(ROWS)]
    learn_policy(learner, pack(aged), **CLIP, version=5, compare=True, oldest=2)
    learn_policy(learner, pack([]), **CLIP, version=5, compare=True, oldest=2)  # a rank without work
    found = learner.step()[0].values()
    for age, name in enumerate(("mismatch/mean", "staleness/drift/1", "staleness/drift/2")):
        learn_policy(quiet, pack(ROWS[age::3]), **CLIP, compare=True)
        assert found[name] == pytest.approx(quiet.step()[0].values()["mismatch/mean"], rel=1e-4)
    assert 0 < found["staleness/ess"] < 1


def test_a_step_without_a_token_is_refused():
    learner = Learner(PolicyModel(model()), LearningSettings(lr=0.1))
    with pytest.raises(ValueError, match=r"nothing.*learn"):
        learner.step()
    learn_answers(learner, pack([Row(np.array([1, 2]), np.array([], dtype=np.int64))]))
    with pytest.raises(ValueError, match="not one token"):
        learner.step()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_changes_nothing(bad):
    net = model()
    before = [parameter.clone() for parameter in net.parameters()]
    learner = Learner(PolicyModel(net), LearningSettings(lr=0.1))
    learn_policy(learner, pack([Row(r.prompt_ids, r.response_ids, r.old_logprobs, bad) for r in ROWS]), **CLIP)
    with pytest.raises(FloatingPointError, match=r"both finite"):
        learner.step()
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    learn_policy(learner, pack(ROWS), **CLIP)  # and it goes on
    learner.step()


@pytest.mark.parametrize(("name", "frozen"), [("layers.0.mlp.up_proj.weight", False), ("norm.weight", True)])
@pytest.mark.parametrize("taken", [0, 1])
def test_weights_that_are_not_finite_are_named_before_the_learning_rate_is(name, frozen, taken):
    net = model()
    weight = net.model.get_parameter(name)
    weight.requires_grad_(not frozen)
    learner = Learner(PolicyModel(net), LearningSettings(lr=0.1))
    for _ in range(taken):
        learn_policy(learner, pack(ROWS), **CLIP)
        learner.step()
    with torch.no_grad():
        weight.view(-1)[0] = math.nan
    learn_policy(learner, pack(ROWS), **CLIP)
    cure = "checkpoint" if taken else "files"
    with pytest.raises(FloatingPointError, match=rf"{name}.*{cure}"):
        learner.step()


def test_the_learning_rate_is_blamed_only_once_a_step_was_taken():
    learner = Learner(PolicyModel(model()), LearningSettings(lr=0.1))
    bad = pack([Row(r.prompt_ids, r.response_ids, r.old_logprobs, math.nan) for r in ROWS])
    learn_policy(learner, bad, **CLIP)
    with pytest.raises(FloatingPointError, match=r"optimizer's.*learning"):
        learner.step()
    learn_policy(learner, pack(ROWS), **CLIP)
    learner.step()
    learn_policy(learner, bad, **CLIP)
    with pytest.raises(FloatingPointError, match=r"smaller learning"):
        learner.step()
