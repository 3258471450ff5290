"""Models that no machine here can hold: what `--dry-run` says of a device's memory, beside what tensors without storage
come to; and seconds by the devices' figures, beside published ones."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rlinf.config.learning import ParallelConfig
from rlinf.flows.grpo import grpo
from rlinf.placement.hardware import KNOWN
from rlinf.placement.seats import TEXT, place
from rlinf.runs.dry_run.estimate import SPREAD, Work, generation, passes, step_lines, work_of, workload_of
from rlinf.runs.dry_run.footprint import fit, footprints
from rlinf.runs.dry_run.transformer import Shape, part_of
from rlinf.runs.rules import load_config
from tests.runs.dry_run.shapes import SHAPES, model
from tests.runs.dry_run.test_peak import measured
from tests.runs.dry_run.tracked import Case

GRPO = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")]
FEWER = ["placement.rollout=0-15:0-3", "placement.trainer=16-31"]
MORE = ["placement.rollout=0-63:0-15", "placement.trainer=64-127"]
RUNS = {
    ("qwen3-30b-a3b", 32): FEWER,
    ("qwen3-30b-a3b", 64): [],
    ("qwen3-30b-a3b", 128): MORE,
    ("qwen2.5-32b", 64): [],
    ("qwen2.5-72b", 64): [],
}
"""Configurations with the devices that they are for, and what their first lines say to set for these."""


def prepared(monkeypatch, name, hosts, overrides):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = load_config(f"configs/large/{name}.yaml", overrides, hosts)
    return config, place(config.placement, GRPO, hosts)


def empty(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model(name), dtype=torch.bfloat16)


@pytest.mark.parametrize(("name", "hosts"), RUNS, ids=str)
def test_a_configuration_fits_its_devices_and_says_how_long_a_step_takes(monkeypatch, name, hosts):
    config, placed = prepared(monkeypatch, name, hosts, RUNS[name, hosts])
    found, problems = fit(config, model(name), placed, ())
    assert (problems, found.warnings) == ([], ())
    first, *rows, why = step_lines(found.config, model(name), placed, grpo)
    took = re.search(r"nothing was measured: ([\d.,]+) s a step as placed", first)
    assert took is not None
    assert 100 < float(took[1].replace(",", "")) < 2000
    assert {row.split()[0] for row in rows} >= {"collocated", "disaggregated"}
    assert "of the bound" in why


@pytest.mark.parametrize(("name", "hosts"), [("qwen3-30b-a3b", 64), ("qwen2.5-32b", 64), ("qwen2.5-72b", 64)])
def test_what_generation_takes_is_within_a_tenth_of_its_tensors(monkeypatch, name, hosts):
    """Weights by name, split as engines split them, twice, since new ones come while the old ones are there; keys and
    values of a cache; two copies of the logits."""
    config, placed = prepared(monkeypatch, name, hosts, [])
    split = config.rollout.engine_args["tensor_parallel"]
    made = empty(name)
    weights = sum(p.numel() * 2 / (1 if p.dim() == 1 else split) for p in made.parameters())
    cache, tokens, text = DynamicCache(), config.rollout.max_tokens, made.config
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for layer in range(text.num_hidden_layers):
        one = torch.empty(1, text.num_key_value_heads, tokens, head, dtype=torch.bfloat16, device="meta")
        cache.update(one, one, layer)
    kept = sum(t.numel() * 2 for layer in cache.layers for t in (layer.keys, layer.values)) / split
    logits = 2 * config.rollout.max_rows * text.vocab_size * 4 / split
    said = footprints(config, model(name), {r: s.devices for r, s in placed.seats.items()})["rollout"].active_bytes
    assert said == pytest.approx(2 * weights + kept + logits, rel=0.1)


def trained(monkeypatch, name, layers=None):
    """What `--dry-run` says of the trainer, with what its share of the data is."""
    config, placed = prepared(monkeypatch, name, 64, [])
    seats = {role: seat.devices for role, seat in placed.seats.items()}
    said = footprints(config, model(name, layers), seats)["trainer"].active_bytes
    return said, Case(f"{name}/{layers}", len(seats["trainer"]), config.trainer.micro_batch_tokens, checkpointed=True)


def test_what_training_experts_takes_is_within_a_tenth_of_the_tracker(monkeypatch):
    """Of three layers: `benchmarks/large_models.py` counts whole models, each layer more as much as the last."""
    said, case = trained(monkeypatch, "qwen3-30b-a3b", 3)
    assert said == pytest.approx(*measured([case]), rel=0.1)


LAYOUTS = [
    ("qwen3-30b-a3b", {"tensor": 4, "pipeline": 4, "expert": 8}),
    ("qwen3-30b-a3b", {"tensor": 2, "expert": 16, "context": 2}),
    ("qwen2.5-72b", {"tensor": 8, "pipeline": 8}),
    ("qwen2.5-72b", {"tensor": 8, "pipeline": 3}),
]


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_the_largest_part_of_a_split_model_is_that_of_its_tensors(name, sizes):
    """Each tensor by its name: experts by experts, matrices by tensors, the rest whole; layers by stages."""
    parallel = ParallelConfig(**sizes)
    per_stage = -(-SHAPES[name]["num_hidden_layers"] // parallel.pipeline)
    stages = [0.0] * parallel.pipeline
    for key, parameter in empty(name).named_parameters():
        layer = re.search(r"layers\.(\d+)\.", key)
        last = key.startswith(("lm_head", "model.norm"))
        stage = int(layer[1]) // per_stage if layer else parallel.pipeline - 1 if last else 0
        shares = parallel.expert if ".experts." in key else 1 if parameter.dim() == 1 or "mlp.gate.w" in key else 0
        stages[stage] += parameter.numel() / (shares or parallel.tensor)
    assert part_of(Shape.of(model(name)), parallel).parameters == pytest.approx(max(stages), rel=0.02)


def test_a_split_trainer_holds_its_part_and_not_a_share_of_all(monkeypatch):
    split = ["trainer.backend=megatron", "trainer.parallel.tensor=4", "trainer.parallel.pipeline=4",
             "trainer.parallel.expert=8"]  # fmt: skip
    config, placed = prepared(monkeypatch, "qwen3-30b-a3b", 64, [])
    seats = {role: seat.devices for role, seat in placed.seats.items()}
    shared = footprints(config, model("qwen3-30b-a3b"), seats)["trainer"]
    for each in split:
        section, _, value = each.partition("=")
        owner = config.trainer.parallel if "parallel" in section else config.trainer
        setattr(owner, section.rpartition(".")[2], int(value) if value.isdigit() else value)
    own = footprints(config, model("qwen3-30b-a3b"), seats)["trainer"]
    part = part_of(Shape.of(model("qwen3-30b-a3b")), config.trainer.parallel).parameters
    assert own.weights + own.gradients + own.optimizer == pytest.approx(16 * part)
    assert own.gathered == pytest.approx(2 * part), "its parts stay where they are, with copies in bfloat16"
    assert own.activations == pytest.approx(shared.activations / 4, rel=0.01)


SEVEN_B = Shape(7_615_616_512, 1_089_994_752, 28, 3584, 18_944, 152_064, 3584, 512)


def test_published_seconds_come_out_of_the_cards_figures():
    """RLinf, figure 9: 7B on 64, 128 and 256 H100s."""
    shape = SEVEN_B
    work = Work(answers=8192, group=16, cap=28_672, prompt=0, rows=256, mean=15_300)
    for devices, rollout, training, scoring in ((64, 591.3, 367.7, 102.3), (256, 236.3, 111.5, 30.4)):
        assert generation(shape, KNOWN["h100"], 2, devices, work)[0] == pytest.approx(rollout, rel=0.1)
        learned = passes(shape, KNOWN["h100"], devices, work, learns=1, checkpointed=True)
        assert learned == pytest.approx(training, rel=0.2)
        assert passes(shape, KNOWN["h100"], devices, work, learns=0, scores=True) == pytest.approx(scoring, rel=0.25)


def test_a_published_rollout_of_short_answers_comes_out_of_their_number_of_tokens():
    """RLinf, figures 10 and 11: 346,000 tokens in 256 answers and their prompts, 14.0 s on 32 H100s; nothing of the
    model was taken from there. The longest answer decides it, so this holds the spread of lengths."""
    work = Work(answers=256, group=1, cap=11_264, prompt=256, rows=63, mean=1100)
    assert work.tokens == pytest.approx(346_000, rel=0.01)
    assert generation(SEVEN_B, KNOWN["h100"], 2, 32, work)[0] == pytest.approx(14.0, rel=0.15)


@pytest.mark.parametrize("answers", [1, 64, 8192])
@pytest.mark.parametrize("mean", [3, 100, 530, 900, 1000])
def test_lengths_have_the_mean_that_is_expected_and_none_is_above_the_cap(answers, mean):
    drawn = Work(answers=answers, group=1, cap=1000, prompt=0, rows=1, mean=mean).lengths()
    assert drawn.max() <= 1000
    if answers > 1:
        assert drawn.mean() == pytest.approx(mean, rel=0.02)


def test_as_many_of_the_usual_lengths_are_cut_as_were_in_the_published_run():
    drawn = Work(answers=8192, group=16, cap=28_672, prompt=0, rows=1, mean=15_300).lengths()
    assert (drawn == 28_672).mean() == pytest.approx(0.088, abs=0.004)
    cut = 1 - (1 - (drawn == 28_672).mean()) ** 16
    assert cut == pytest.approx(0.77, abs=0.03)
    assert 0.5 < SPREAD < 0.56


def test_an_engine_decodes_as_many_answers_as_it_lets_in(monkeypatch):
    config, _ = prepared(monkeypatch, "qwen3-30b-a3b", 64, ["rollout.max_tokens=100000"])
    assert work_of(config).rows == 100_000 // (256 + 18_432), "by the longest that each may come to"
    config, _ = prepared(monkeypatch, "qwen3-30b-a3b", 64, ["rollout.max_tokens=null"])
    assert work_of(config).rows == config.rollout.max_rows


def learning(config, placed, role="trainer", **more):
    stages, _ = workload_of(config, model("qwen2.5-7b"), placed, ("critic",), **more)
    return max(stages.stage(role).options, key=lambda option: option.devices).seconds


def test_every_pass_of_a_trainer_counts(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = load_config("configs/large/qwen2.5-7b-ppo.yaml", [], 32)
    config = replace(config, trainer=replace(config.trainer, gradient_checkpointing=True))
    kinds = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer", "critic")]
    placed = place(config.placement, kinds, 32)
    once = learning(config, placed)
    assert learning(config, placed, recomputes=True) == pytest.approx(once * 5 / 4)
    assert learning(config, placed, "critic") == pytest.approx(once * 5 / 4), "it values what it learns from"
    config.algorithm.epochs = 3
    assert learning(config, placed) == pytest.approx(once * 3)


def test_an_expected_length_above_the_longest_counts_as_the_longest(monkeypatch):
    """So that a shipped configuration runs with `rollout.max_new_tokens` turned down, and nothing else changed."""
    config, placed = prepared(monkeypatch, "qwen3-30b-a3b", 64, ["rollout.max_new_tokens=512"])
    assert config.rollout.expected_new_tokens > 512
    assert work_of(config).mean == 512
    assert fit(config, model("qwen3-30b-a3b"), placed, ())[1] == []
