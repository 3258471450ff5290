"""Two processes that have one copy of the model, by one key each, learn what one process learns."""

import pytest

from tests.launching import QUICKSTART, TINY, launch, metrics_of

RUNS = {
    "tensor": (("algorithm.name=grpo_clip_higher",), ("trainer.parallel.tensor=2",)),
    "pipeline": (("algorithm.name=ppo",), ("trainer.parallel.pipeline=2", "placement.critic=0-1")),
}
SMALL = (*TINY, "model.config.num_hidden_layers=2", "evaluation.every=0", "reward.function=tests.own_parts.overlap",
         "reward.isolate=never", "trace=false", "optimizer.warmup_steps=0", "name=run")  # fmt: skip
pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]


def run(output, *more, processes):
    launch("--config", QUICKSTART, *SMALL, *more, f"output_dir={output}", processes=processes, timeout=100)
    return metrics_of(output / "run")


@pytest.mark.parametrize("split", [pytest.param("tensor", marks=pytest.mark.repeated), "pipeline"])
def test_the_same_is_learned(split, tmp_path):
    algorithm, keys = RUNS[split]
    alone = run(tmp_path / "alone", *algorithm, processes=0)
    both = run(tmp_path / "both", "trainer.backend=megatron", *algorithm, *keys, processes=2)
    for ours, theirs in zip(both, alone, strict=True):
        for name in ("loss", "grad_norm", "reward/mean", *(("critic/loss",) if split == "pipeline" else ())):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=2e-5), (ours["step"], name)
    assert alone[0]["grad_norm"] > 1e-3, "there was something to learn"
