"""Whole runs with roles beside the usual ones: a reward model, several teachers, and roles of one's own."""

from __future__ import annotations

import json

import pytest

from rlinf.placement.profile import BESIDE
from rlinf.placement.profile import load as load_profile
from tests.launching import QUICKSTART, TINY, launch, metrics_of
from tests.models.scoring.saved import saved_classifier, saved_language_model

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(300)]
SHORT = (*TINY, "evaluation.every=0", "evaluation.problems=4", "sft.steps=0", "metrics.samples=100")


def test_a_reward_model_takes_turns_with_the_trainer_and_its_score_is_learned_from(tmp_path):
    path = saved_classifier(tmp_path)
    launch(
        "--config", QUICKSTART, *SHORT, f"output_dir={tmp_path}", f"reward_model.path={path}",
        "reward_model.weight=0.5", "placement.rollout=0", "placement.trainer=1", "placement.reward_model=1",
        "placement.device_memory_gb=1",
        processes=2,
    )  # fmt: skip
    run = tmp_path / "quickstart"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    trained = [sample for sample in samples if sample["step"] > 0 and "reward_model" in sample.get("scores", ())]
    assert len(trained) == 3 * 16
    for sample in trained:
        assert sample["reward"] == pytest.approx(sample["scores"]["judge"] + 0.5 * sample["scores"]["reward_model"])
    for metrics in metrics_of(run):
        both = metrics["reward/parts/judge"] + 0.5 * metrics["reward/parts/reward_model"]
        assert metrics["reward/mean"] == pytest.approx(both)
    stages = load_profile(run / "profile.json").stages
    assert stages["reward_model"].kind == "gpu"
    assert stages["reward_model"].footprints[0].active_bytes > 0


def test_a_judge_that_writes_scores_alone_in_training_and_evaluation(tmp_path):
    path = saved_language_model(tmp_path)
    launch(
        "--config", QUICKSTART, *SHORT, f"output_dir={tmp_path}", "reward.function=null",
        f"reward_model.path={path}", "reward_model.kind=generative",
        "reward_model.template='{prompt}{response}>'", "reward_model.pattern='([0-9>])'",
        "reward_model.max_new_tokens=4", "steps=1",
    )  # fmt: skip
    (metrics,) = metrics_of(tmp_path / "quickstart")
    assert metrics["reward/mean"] == metrics["reward/parts/reward_model"]
    assert metrics["evaluation/accuracy"] >= 1
    assert "reward/parts/judge" not in metrics


def test_roles_of_ones_own_work_in_the_flow_that_takes_them_and_go_on_where_they_were(tmp_path):
    own = (
        "flow=tests.own_roles.with_index", "roles.index={class: tests.own_roles.Index, hosts: 1, settings: {top: 3}}",
        "roles.verifier={class: tests.own_roles.Verifier, devices: 1, memory_gb: 0.01}",
        "placement.rollout=0", "placement.trainer=1", "placement.device_memory_gb=1",
    )  # fmt: skip
    run = tmp_path / "quickstart"
    begun = ("--config", QUICKSTART, *SHORT, *own, f"output_dir={tmp_path}", "checkpoint.every=1")
    launch(*begun, "steps=2", processes=2)
    assert [metrics["asked"] for metrics in metrics_of(run)] == [4, 8]
    assert all(metrics["reward/parts/verified"] == 1 for metrics in metrics_of(run))
    stages = load_profile(run / "profile.json").stages
    assert (stages["index"].kind, stages["verifier"].kind) == (BESIDE, "gpu")
    assert stages["verifier"].footprints[0].active_bytes == 10_000_000
    launch(*begun, "steps=3", "--resume", "auto", processes=2)
    assert [metrics["asked"] for metrics in metrics_of(run)][-1] == 12


def test_several_teachers_are_mixed_and_told_apart(tmp_path):
    one, other = (saved_language_model(tmp_path / str(width), initializer_range=width) for width in (0.1, 0.5))
    launch(
        "--config", QUICKSTART, *SHORT, f"output_dir={tmp_path}", "algorithm=opd", "steps=1",
        f"teachers.first.model={one}", f"teachers.second={{model: {other}, weight: 3.0, devices: 0}}",
        "placement.rollout=0", "placement.trainer=1", processes=2,
    )  # fmt: skip
    (metrics,) = metrics_of(tmp_path / "quickstart")
    assert metrics["teacher/kl/first"] != metrics["teacher/kl/second"]
    assert metrics["teacher/kl"] < max(metrics["teacher/kl/first"], metrics["teacher/kl/second"])
