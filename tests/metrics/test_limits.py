"""How much of its devices a step used: from what actors note, by the limits of a card or of this machine."""

import json

import numpy as np
import pytest

from rlinf.metrics import limits as module
from rlinf.metrics.explain import Explainer
from rlinf.metrics.limits import BYTES, COMPUTE, DECODE, READ, OwnDevice, Work, known, worth_a_word
from rlinf.metrics.verdict import typical, verdict
from rlinf.models.language.cost import ModelCost
from rlinf.placement.bound import Lane
from rlinf.placement.costs import MeasuredStep, StageTime
from rlinf.placement.hardware import KNOWN, NAMES
from rlinf.runtime.observe.spans import Lap, Span

H100 = "NVIDIA H100 80GB HBM3"


def noted(actor, part, unit, amount, seconds=0.0):
    return Span("part", actor, "", part + unit, 1.0, 1.0 + seconds, int(amount))


def step_of(seconds, **roles):
    """A step of one device, in which roles worked one after the other."""
    at, spans, stages = 0.0, [], {}
    for role, took in roles.items():
        spans.append((at, at + took))
        stages[role] = StageTime((role,), frozenset([0]), took, took)
        at += took
    return MeasuredStep(seconds, {0: Lane(np.array(spans))}, stages)


def on_an_h100():
    """Step 2 of the run of 2026-11-28: SmolLM2-135M, half of 512 answers of 30 tokens learned from in 0.86 s, all of
    them generated in 0.96 s. Its verdict was 94 % of what is possible."""
    cost = ModelCost(
        {None: 30}, pair=2304, cached=384, block_weights=106_168_320, expert_weights=0, share=1.0,
        head_weights=28_311_552, vocabulary=49_152, tied=True,
    )  # fmt: skip
    moved = 96 * cost.weight_bytes(512, 2) + 512 * cost.pairs(77, 47) * cost.cached * 2
    parts = (
        noted("trainer[0]", COMPUTE, "bfloat16", cost.training_flops([77] * 240, 30 * 240)),
        noted("rollout[0]", READ, "bfloat16", cost.forward_flops([47] * 64, 64), 0.02),
        noted("rollout[0]", DECODE, "bfloat16", 1e12),
        noted("rollout[0]", DECODE, BYTES, moved, 0.9),
    )
    return Lap(0.0, 1.94, (), parts=parts), step_of(1.94, rollout=0.96, trainer=0.86)


def test_a_card_that_idled_while_roles_were_at_work_is_named_before_all_else():
    lap, step = on_an_h100()
    work, card = Work(lap), known(H100)
    uses = {use.role: use for use in work.uses(step, card)}
    assert (uses["trainer"].resource, uses["rollout"].resource) == ("products", "bandwidth")
    metrics = work.metrics(uses.values(), card, 1)
    assert metrics["mfu/trainer"] == pytest.approx(lap.parts[0].bytes / 989e12 / 0.86)
    assert metrics["mbu/decode"] == pytest.approx(lap.parts[3].bytes / 3350e9 / 0.9)
    assert metrics["mfu/prefill"] == pytest.approx(lap.parts[1].bytes / 989e12 / 0.02)
    assert metrics["bound/device"] < 0.05
    assert metrics["idle/rollout"] > metrics["idle/trainer"] > 0.8
    told = Explainer().step(lap, {"rollout[0]": frozenset([0])}, step, metrics, [*uses.values()])
    assert told.cause == "idle device"
    assert told.text.startswith("generation used")
    whole = {"timing/step": 1.94, "bound/seconds": 1.82, "bound/area": 1.82, "bound/efficiency": 0.94}
    first, second = verdict(typical([whole | metrics | {"bound/devices": 1.0}]), H100)[:2]
    assert H100 in first
    assert second.startswith("94% of what is possible")


def test_work_near_the_limit_is_no_cause_and_a_toy_is_told_in_a_few_words():
    card = known(H100)
    lap = Lap(0.0, 1.0, (), parts=(noted("trainer[0]", COMPUTE, "bfloat16", 0.5 * 989e12),))
    step = step_of(1.0, trainer=1.0)
    (use,) = Work(lap).uses(step, card)
    assert (use.share, use.lost) == (pytest.approx(0.5), 0.0)
    assert Explainer().step(lap, {"trainer[0]": frozenset([0])}, step, {}, [use]).cause == "none"
    toy = {"timing/step": 0.2, "bound/seconds": 0.19, "bound/efficiency": 0.95, "bound/devices": 1.0}
    toy |= {"bound/device": 0.004, "mfu/trainer": 0.02, "idle/trainer": 0.15}
    assert not worth_a_word(toy, "cpu")
    (line,) = [line for line in verdict(typical([toy]), "CPU x86_64, 2 cores") if "too little work" in line]
    assert "2.0%" in line


def test_what_a_role_does_beside_products_counts_by_the_slower_of_both():
    """Decoding many rows multiplies longer than it reads; reading prompts comes on top."""
    card = known(H100)
    parts = [(READ, "bfloat16", 989e12), (DECODE, "bfloat16", 2 * 989e12), (DECODE, BYTES, 3350e9)]
    lap = Lap(0.0, 9.0, (), parts=tuple(noted("rollout[0]", *part) for part in parts))
    (use,) = Work(lap).uses(step_of(9.0, rollout=6.0), card)
    assert (use.resource, use.least) == ("products", pytest.approx(3.0))


def test_an_unknown_device_is_measured_once_and_kept(tmp_path, monkeypatch):
    cache = tmp_path / "of" / "devices.json"
    monkeypatch.setattr(module, "_copied", lambda device: 1e10)
    monkeypatch.setattr(module, "_multiplied", lambda device, dtype: 1e11)
    device = OwnDevice(cache)
    assert device.limits(["float32"]) is None
    device.measure(["float32"])
    found = OwnDevice(cache).limits(["float32"])
    assert (found.products["float32"], found.bandwidth, found.measured) == (1e11, 1e10, True)
    assert OwnDevice(cache).limits(["bfloat16"]) is None, "was not measured"
    cache.write_text("[1]")
    assert OwnDevice(cache).limits(["float32"]) is None, "a file that nobody of ours wrote"
    device.measure(["bfloat16"])
    assert set(next(iter(json.loads(cache.read_text()).values()))) == {"float32", "bfloat16", BYTES}


def test_nobody_does_more_than_a_measured_device_can_however_little_was_measured():
    slow = module.Limits("CPU", {"float32": 1e9}, 1e9, measured=True)
    lap = Lap(0.0, 4.0, (), parts=(noted("trainer[0]", COMPUTE, "float32", 12e9),))
    (use,) = Work(lap).uses(step_of(4.0, trainer=4.0), slow)
    assert (use.share, use.lost) == (1.0, 0.0)


def test_a_measurement_takes_about_a_second_and_draws_no_random_number(monkeypatch):
    import torch

    before = torch.get_rng_state()
    rate = module._multiplied(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e14
    assert torch.equal(before, torch.get_rng_state())


def test_every_card_that_torch_names_is_in_the_table_with_what_limits_need():
    assert set(NAMES.values()) == set(KNOWN)
    for name in NAMES:
        assert {"bfloat16", "float32"} <= known(name).products.keys()
    assert known("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
