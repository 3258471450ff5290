"""Seconds of steps in which policies act: beside published ones, beside a network's products, and by their keys."""

from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlinf.config.load import ConfigError
from rlinf.models.policy.build import build_policy_model, fitted
from rlinf.placement.hardware import KNOWN
from rlinf.placement.seats import CONTROL, place
from rlinf.runs.dry_run.embodied import seconds_of
from rlinf.runs.dry_run.estimate import acting_seconds
from rlinf.runs.rules import load_embodied
from tests.launching import ROOT

LIBERO = "openvla_oft_libero130_grpo"
H100 = "placement.devices={gpu: h100}"


@cache
def policy(kind, embodiment):
    given = {"type": kind, "embodiment": embodiment, "value_level": None}
    bounds = ((-1.0,) * 7, (1.0,) * 7)
    with torch.device("meta"):
        return build_policy_model(fitted(given, {"state": (8,), "rgb": (224, 224, 3)}, 7, bounds=bounds))


def step(name, *overrides, kind="openvla-oft", embodiment="libero"):
    config = load_embodied(ROOT / "configs" / "embodied" / f"{name}.yaml", list(overrides), 8)
    return acting_seconds(config, policy(kind, embodiment), place(config.placement, CONTROL, 8), KNOWN["h100"])


def test_what_learning_takes_of_a_published_step_comes_out_within_a_factor_of_two():
    """RLinf, figure 15's older plot: 396.4 s on 8 H100s for 512 episodes of 64 decisions, all weights learn. Nothing of
    the model was taken from runs of robots."""
    assert 0.5 < step(LIBERO).learns / 396.4 < 1


def test_a_decision_takes_the_products_of_its_tokens():
    network = policy("openvla-oft", "libero")
    read, drawn = network.tokens_of_a_decision
    assert (read, drawn) == (256 + 32 + 56, 0)
    pictures = torch.zeros(1, 3, 224, 224, dtype=torch.uint8, device="meta")
    embedded, mask = torch.zeros(1, read, 4096, device="meta"), torch.zeros(1, 1, read, read, device="meta")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        network.vision_backbone(pictures)
        network.language_model.model(inputs_embeds=embedded, attention_mask=mask, use_cache=False)
    parameters = sum(each.numel() for each in network.parameters())
    assert 2 * parameters * read == pytest.approx(counted.get_total_flops(), rel=0.15)


def test_tokens_that_are_drawn_one_by_one_read_all_weights_each():
    one_by_one, at_once = (policy(kind, "maniskill").tokens_of_a_decision for kind in ("openvla", "openvla-oft"))
    assert one_by_one == (256 + 30, 6)
    assert at_once == (256 + 30 + 8 * 7, 0)


def test_what_is_not_known_of_a_simulator_is_left_out_and_said():
    known = step(LIBERO)
    assert known.simulates == pytest.approx(64 * 64 * 8 / 70)
    assert not known.concurrent
    assert known.seconds == pytest.approx(known.simulates + known.decides + known.learns)
    unknown = step(LIBERO, "env.expected_steps_per_second=null")
    assert unknown.seconds == pytest.approx(known.seconds - known.simulates)


def test_simulating_goes_on_beside_deciding_where_there_are_slices_and_devices_for_it():
    apart = ("placement.env=0-3", "placement.policy=4-7", "env.slices=2", "env.workers=4")
    found = step(LIBERO, *apart)
    assert found.seconds == pytest.approx(found.learns + max(found.simulates, found.decides))
    assert not step(LIBERO, *apart[:2]).concurrent


def test_adapters_and_layers_that_are_kept_take_fewer_products():
    all_weights = step(LIBERO).learns
    assert step(LIBERO, "policy.gradient_checkpointing=false").learns == pytest.approx(all_weights * 3 / 4)
    assert step(LIBERO, "policy.lora.r=32").learns == pytest.approx(all_weights * 3 / 4)
    assert step(LIBERO, "algorithm.epochs=2").learns == pytest.approx(all_weights * 2)


def test_a_dry_run_counts_the_tokens_of_an_arm():
    config = load_embodied(
        ROOT / "configs" / "embodied" / f"{LIBERO}.yaml", [H100, "env.expected_steps_per_second=null"], 8
    )
    (line,) = seconds_of(config, place(config.placement, CONTROL, 8))
    assert f"learning {step(LIBERO).learns:,.4g} s)" in line
    assert "(simulating ?, deciding" in line


def test_policies_that_are_no_transformers_keep_the_line_about_profiles():
    path = ROOT / "configs" / "embodied" / "maniskill_pullcube_ppo.yaml"
    config = load_embodied(path, ["placement.devices={gpu: h100}"], 1)
    assert [*seconds_of(config, place(config.placement, CONTROL, 1))] == []


def test_a_rate_is_above_0():
    with pytest.raises(ConfigError, match="expected_steps_per_second"):
        step(LIBERO, "env.expected_steps_per_second=0")
