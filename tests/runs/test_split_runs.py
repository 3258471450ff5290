"""The quickstart's task is learned where two processes have one copy of the model, by one key each."""

import json

import pytest

from tests.launching import QUICKSTART, start

RUNS = {
    "tensor": ["algorithm.name=grpo_clip_higher", "trainer.parallel.tensor=2"],
    "pipeline": ["algorithm.name=ppo", "trainer.parallel.pipeline=2", "placement.critic=0-1"],
}
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "split", [pytest.param(name, marks=[pytest.mark.repeated] * (name != "pipeline")) for name in RUNS]
)
def test_it_is_learned(split, tmp_path):
    ranks = start(
        "--config", QUICKSTART, "trainer.backend=megatron", *RUNS[split], "steps=12", "evaluation.problems=200",
        f"output_dir={tmp_path}", "name=run", processes=2,
    )  # fmt: skip
    try:
        assert ranks.codes(250.0) == [0, 0], ranks.everything()
    finally:
        ranks.end()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    accuracy = [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]
    assert accuracy[0] < 0.9 < accuracy[-1], "the warm-up leaves something to learn"
