"""The trainer over one and three processes: the same gradients, weights and metrics; and how it fails."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from tests.actors import toys
from tests.actors.programs.ranks import ALGORITHMS, CASES
from tests.actors.watched import PRECISELY

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(400)]
PROGRAMS = Path(__file__).parent / "programs"
WORLDS = (1, 3)
NAMES = [*CASES, "saved"]
PATIENCE = 150.0
"""Seconds for a job; generous, since tests share their cores."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with weights unlike those that its configuration starts with, in two files."""
    path = tmp_path_factory.mktemp("saved")
    toys.model("llama", seed=3).save_pretrained(path, max_shard_size="40KB")
    load_tokenizer(toys.ALPHABET).save_pretrained(path)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def results(zygotes, saved, tmp_path_factory):
    """What every number of ranks made of every case."""
    found = {}
    checkpoint = ""
    for world in WORLDS:
        out = tmp_path_factory.mktemp("ranks") / "out.pt"
        ranks = zygotes.run(PROGRAMS / "ranks.py", world, out, saved, checkpoint, *NAMES)
        checkpoint = str(out.with_name("checkpoint"))
        try:
            assert ranks.codes(PATIENCE) == [0] * world, ranks.everything()
        finally:
            ranks.end()
        found[world] = torch.load(out, weights_only=False)
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["qwen2", "checkpointing", "copies", "padded", "saved"])
def test_gradients_are_those_of_one_process_that_goes_sample_by_sample(results, saved, world, name):
    source = str(saved) if name == "saved" else CASES[name]["model"]
    plain = build_model(source, load_tokenizer(toys.ALPHABET)).eval()
    loss = toys.by_a_plain_loop(plain, toys.groups(7))
    loss.backward()
    found = results[world][name]
    assert toys.furthest(found["gradients"][0], toys.gradients(plain)) < 1e-5
    assert found["packs"] == (name != "padded")


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", [name for name in NAMES if "bfloat16" not in name])
def test_every_number_of_ranks_learns_the_same_and_says_the_same(results, world, name):
    one, many = results[1][name], results[world][name]
    rounds = name == "padded" or "experts" in name  # transformers' own attention and gates go through float32
    bound = 1e-3 if rounds else PRECISELY
    for metrics in (one["metrics"], many["metrics"]):
        # what prompts share by chance is not known to a rank 0 that has only the faces of their groups
        assert metrics.pop("tokens_read/per_learned") >= 1 > metrics.pop("tokens_read/saved")
    assert many["metrics"] == pytest.approx(one["metrics"], rel=bound, abs=bound)
    assert many["samples"] == one["samples"]
    assert many["version"] == one["version"] == 1
    assert len(many["gradients"]) == len(one["gradients"])
    for first, second in zip(one["gradients"], many["gradients"], strict=True):
        assert toys.furthest(second, first) < bound
    assert toys.furthest(many["published"], one["published"]) < bound
    assert many["sft"] == pytest.approx(one["sft"], rel=bound)
    assert many["after"]["weights"].keys() == many["published"].keys()
    if "copies" in name:
        assert many["slice"] == one["slice"]
    else:
        assert abs(many["slice"] * world - one["slice"]) < 0.1 * one["slice"]  # each holds its part, and no more


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_the_gradient_of_one_process_that_goes_sample_by_sample(results, world, name):
    plain = build_model(toys.configuration(), load_tokenizer(toys.ALPHABET)).eval()
    toys.sample_by_sample(plain, toys.ALGORITHMS[name], toys.conversations(toys.told(toys.groups(7)))).backward()
    expected, found = toys.gradients(plain), results[world]["algorithms"][name]["gradient"]
    assert sum(float(gradient.abs().sum()) for gradient in expected.values()) > 0.1
    assert toys.furthest(found, expected) < 1e-5


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["", " freely"])
def test_log_probs_before_the_update_are_ours_whatever_the_engine_said(results, world, how):
    """With several minibatches they are computed for the whole batch first."""
    plain = build_model(toys.configuration(), load_tokenizer(toys.ALPHABET)).eval()
    found = results[world][f"proximal{how}"]
    assert_told(found["groups"], plain)
    assert [group.prompt.id for group in found["groups"]] == list(range(7))
    assert found["metrics"]["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert found["metrics"]["is/outside"] == 1.0
    assert found["metrics"]["mismatch/mean"] > 4.0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["", " freely"])
def test_groups_come_back_with_what_all_ranks_together_said_of_them(results, world, how):
    said = results[world][f"said{how}"]
    assert_told(said, build_model(toys.configuration(), load_tokenizer(toys.ALPHABET)).eval())
    assert [group.prompt.id for group in said] == list(range(7))[:: -1 if how else 1]


def assert_told(groups, plain):
    for group in groups:
        for sample, expected in zip(group.samples, toys.logprobs_of(plain, group), strict=True):
            told = sample.per_token["proximal_logprobs"]
            if sample.loss_mask is not None:
                assert np.isnan(told[~sample.loss_mask]).all(), "nothing is said of what was only read"
                told, expected = told[sample.loss_mask], expected[sample.loss_mask]
            assert np.isnan(told).all() if sample.reward is None else np.abs(told - expected).max(initial=0) < 1e-5


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_model_without_its_adapters_is_a_reference_like_any_other(results, world, place, minibatches):
    one, other = (results[world]["adapters"][place, minibatches, off] for off in (True, False))
    assert toys.furthest(one, other) < 1e-4
    elsewhere = results[world]["adapters"]["reward" if place == "loss" else "loss", minibatches, True]
    assert toys.furthest(one, elsewhere) > 0.01  # it makes a difference
    assert toys.furthest(one, results[1]["adapters"][place, minibatches, True]) < PRECISELY


@pytest.mark.parametrize("world", WORLDS)
def test_in_bfloat16_the_gradient_points_the_same_way(results, world):
    exact, rounded = (results[world][name]["gradients"][0] for name in ("qwen2", "bfloat16"))
    flat = [torch.cat([part[name].flatten() for name in exact]) for part in (exact, rounded)]
    assert all(tensor.dtype == torch.float32 for tensor in rounded.values())
    assert 0.999 < torch.nn.functional.cosine_similarity(*flat, dim=0) < 0.9999999


@pytest.mark.parametrize("world", WORLDS[1:])
def test_what_other_ranks_have_saved_is_resumed(results, world):
    found = results[world]["resumed"]
    assert found["version"] == 1
    assert toys.furthest(found["weights"], results[1]["continued"]["weights"]) < PRECISELY


@pytest.fixture(scope="module")
def told(zygotes, tmp_path_factory):
    """What a job of three ranks that is disturbed in every way said, by the way; and its directory."""
    directory = tmp_path_factory.mktemp("disturbed")
    names = ("cancelled", "cancelled_scoring", "unheard", "misfed", "crossing", "collocated")
    ranks = zygotes.run(PROGRAMS / "disturbed.py", 3, directory, *names)
    try:
        assert ranks.codes(PATIENCE) == [0, 0, 0], ranks.everything()
    finally:
        ranks.end()
    parts = ranks.printed(0).removeprefix("# ").split("\n# ")
    return {lines[0]: lines[1:] for lines in map(str.splitlines, parts)}, directory


def test_cancelled_at_any_moment_all_ranks_go_on_together(told):
    assert told[0]["cancelled"] == ["cancelled 5 times"]


def test_cancelled_while_log_probs_are_computed_first_all_ranks_go_on_together(told):
    assert told[0]["cancelled_scoring"] == ["cancelled 5 times"]


def test_when_nobody_listens_to_what_they_say_all_ranks_go_on_together(told):
    assert told[0]["unheard"] == ["OSError", "goes on"]


def test_bad_input_is_told_once_and_all_ranks_go_on_together(told):
    lines = told[0]["misfed"]
    assert [line.split()[0] for line in lines[:3]] == ["OSError", "FloatingPointError", "ValueError"]
    assert lines[1].endswith("kept")
    assert "trainer" in lines[3]
    assert lines[4] == "goes on"
    assert (told[1] / "nan_step_0.safetensors").exists()


def test_calls_that_cross_are_done_in_one_order_on_all_ranks(told):
    assert told[0]["crossing"] == ["versions [1, 1, 2, 2] failures 2"]


def test_on_devices_of_its_own_input_all_ranks_take_turns_with_it(told):
    assert told[0]["collocated"] == ["took turns"]


@pytest.mark.parametrize("when", ["failing", "failing_to_score"])
def test_a_rank_that_fails_within_a_batch_ends_the_job_at_once(zygote, tmp_path, when):
    ranks = zygote.run(PROGRAMS / "disturbed.py", 3, tmp_path, when)
    ranks.await_line("begins", seconds=PATIENCE)
    start = time.monotonic()
    codes = ranks.codes(60.0)
    print("ended after", time.monotonic() - start)
    assert codes[0] != 0
    assert "MemoryError" in ranks.complained(0)
    assert "trainer[2].train()" in ranks.complained(0)


def test_replicas_that_join_two_processes_and_are_lost_change_nothing_that_is_learned(zygotes, tmp_path):
    ranks = zygotes.run(PROGRAMS / "helped.py", 2, tmp_path / "out.pt")
    try:
        assert ranks.codes(PATIENCE) == [0, 0], ranks.everything()
    finally:
        ranks.end()
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    for step in found["steps"]:
        assert step["metrics"] == pytest.approx(step["expected"], rel=PRECISELY, abs=PRECISELY)
    assert sum(step["computed"] for step in found["steps"]) > 2
    assert found["there"] == 1
    one, other = found["alone"], found["helped"]
    assert len(one["gradients"]) == len(other["gradients"]) == 6
    for expected, gradient in zip(one["gradients"], other["gradients"], strict=True):
        assert toys.furthest(gradient, expected) < PRECISELY
    assert toys.furthest(other["weights"], one["weights"]) < PRECISELY
