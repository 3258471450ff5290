"""Every recipe runs from a configuration, with the roles that it needs, and goes on from a checkpoint bit for bit."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf.algos.recipes import NAMES
from tests.launching import QUICKSTART, TINY, launch, learned, metrics_of, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parent / "programs"
SMALL = (*TINY, "evaluation.every=0", "trace=false", "optimizer.lr=0.01", "optimizer.warmup_steps=0", "critic.lr=0.01",
         "evaluation.problems=1", "reward.function=tests.own_parts.overlap", "reward.isolate=never")  # fmt: skip
LORA = ("model.lora.r=2", "reference.kind=adapters_off")
VARIANTS = {
    **{name: (f"algorithm={name}",) for name in NAMES},
    "kl in the reward": ("algorithm.kl={place: reward, kind: k1, beta: 0.1}",),
    "kl to a running mean": ("algorithm=deepseek_grpo", "reference.kind=ema", "reference.decay=0.5"),
    "kl under the adapters": ("algorithm=deepseek_grpo", *LORA),
    "kl in the reward, under the adapters": ("algorithm=reinforce_pp", *LORA),
    "ppo with kl and a head start": (
        "algorithm=ppo", "algorithm.kl={place: reward, kind: k1, beta: 0.1}", "critic.head_start=1",
    ),
    "decoupled, several minibatches": ("algorithm=async_grpo", "algorithm.minibatches=2", "algorithm.epochs=2"),
    "a loss of one's own": ("algorithm.loss=tests.own_parts.reinforce",),
    "entropy bonus": ("algorithm.entropy_bonus=0.01",),
    "kl to saved adapters": ("algorithm=deepseek_grpo", "model.lora.r=4", "model.lora.target_modules=all-linear",
                             "reference.adapter={directory}/kl_under_the_adapters/checkpoints/latest/adapter"),
    "adapters gone on with": ("model.lora.path={directory}/kl_under_the_adapters/checkpoints/latest/adapter",),
    "8-bit": ("optimizer.kind=adamw_8bit", "model.config.hidden_size=64", "model.config.intermediate_size=192"),
}  # fmt: skip
RESUMED = (
    "dapo", "ppo with kl and a head start", "kl to a running mean", "kl under the adapters", "reinforce_pp",
    "decoupled, several minibatches", "kl to saved adapters",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The output directory with a run of every variant; in `half`, what goes on from the checkpoints of two steps of
    three."""
    directory = tmp_path_factory.mktemp("recipes")
    lines = [["never", *arguments(name, directory)] for name in VARIANTS]
    for name in RESUMED:
        older = directory / slug(name) / "checkpoints" / "step_000002"
        lines.append([str(older), *arguments(name, directory), f"output_dir={directory}/half"])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    launch(QUICKSTART, program=PROGRAMS / "many.py", text=text, timeout=280)
    return directory


def arguments(name, directory):
    teacher = [f"teacher.model={directory}/grpo/checkpoints/latest/hf"] if "opd" in name else []
    settings = [setting.format(directory=directory) if "/" in setting else setting for setting in VARIANTS[name]]
    return [*SMALL, *settings, f"output_dir={directory}", f"name={slug(name)}", *teacher]


def slug(name):
    return name.replace(" ", "_").replace(",", "")


@pytest.mark.parametrize("name", VARIANTS)
def test_it_runs_and_changes_the_weights(runs, name):
    steps = metrics_of(runs / slug(name))
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(math.isfinite(value) for step in steps for value in step.values() if isinstance(value, float))
    assert all(0 <= step["mismatch/mean"] < 1e-4 for step in steps if "mismatch/mean" in step)
    others = {other: weights_of(runs / slug(other)) for other in ("grpo", "dr_grpo") if other != name}
    mine = weights_of(runs / slug(name))
    assert all(any(not torch.equal(mine[key], other[key]) for key in other) for other in others.values())


def test_what_is_special_about_a_recipe_shows_in_its_metrics(runs):
    def step(name):
        return metrics_of(runs / slug(name))[-1]

    assert step("dapo")["sampling/rounds"] >= 1
    assert {"critic/loss", "critic/explained_variance", "values/mean"} <= step("ppo").keys()
    assert step("deepseek_grpo")["kl"] >= 0
    first, *_, last = metrics_of(runs / "ppo_with_kl_and_a_head_start")
    assert "critic/loss" in first
    assert "grad_norm" not in first
    assert "grad_norm" in last


@pytest.mark.parametrize("name", RESUMED)
def test_it_goes_on_bit_for_bit(runs, name):
    whole, half = runs / slug(name), runs / "half" / slug(name)
    assert learned(half) == learned(whole)[2:]
    assert [step["step"] for step in learned(half)] == [3]
    mine, expected = weights_of(half), weights_of(whole)
    assert all(torch.equal(mine[key], expected[key]) for key in expected)
    for part in ("critic", "reference"):
        kept = [path.relative_to(whole) for path in (whole / "checkpoints" / "latest" / part).rglob("*.safetensors")]
        for path in kept:
            here, there = load_file(half / path), load_file(whole / path)
            drawn_from = {key for key in there if key.startswith("rng.")}  # by nobody: models are built in any order
            assert all(torch.equal(here[key], there[key]) for key in there.keys() - drawn_from), path
        assert bool(kept) == ((part == "critic" and "ppo" in name) or (part == "reference" and "mean" in name))


@pytest.mark.torchrun
@pytest.mark.parametrize("placement", ["placement.trainer=0-1", "placement.critic=1"])
def test_ppo_on_two_processes_shares_or_divides_them(tmp_path, placement):
    launch("--config", QUICKSTART, *SMALL, "algorithm=ppo", f"output_dir={tmp_path}", placement,
           "algorithm.kl={place: reward, kind: k1, beta: 0.1}", processes=2)  # fmt: skip
    assert len(metrics_of(tmp_path / "quickstart")) == 3
