"""A run that was stopped goes on as if it had not been: bit for bit, also after `kill -9`, and on other numbers of
ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlinf.config.load import InputError
from rlinf.runs.start import checkpoint_to_resume
from tests.launching import QUICKSTART, TINY, equal, killed, launch, learned, metrics_of, steps_noted, typed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 8
RUN = ("--config", QUICKSTART, *TINY, f"steps={STEPS}", "algorithm.epochs=2", "algorithm.prompts_per_step=8")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """A run from start to end in one go, with another seed of hashes than those that are held against it."""
    output = tmp_path_factory.mktemp("uninterrupted")
    typed(*RUN, f"output_dir={output}")
    return output / "quickstart"


def killed_after(output: Path, steps: int, *overrides: str, processes: int = 0) -> Path:
    """A run that was killed some time after so many steps; the moment is random."""
    run = output / "quickstart"
    begun = (*RUN, f"output_dir={output}", *overrides)
    killed(lambda: steps_noted(run) >= steps, *begun, processes=processes, later=random.random() * 0.3)
    return run


def test_two_runs_of_one_configuration_are_equal_bit_for_bit(uninterrupted, tmp_path):
    launch(*RUN, f"output_dir={tmp_path}")
    equal(uninterrupted, tmp_path / "quickstart")


@pytest.mark.parametrize("after", [*(pytest.param(early, marks=pytest.mark.repeated) for early in (1, 3)), 6])
def test_a_killed_run_goes_on_as_if_it_had_not_been(uninterrupted, tmp_path, after):
    run = killed_after(tmp_path, after)
    done = launch(*RUN, f"output_dir={tmp_path}", "--resume", "auto")
    if after > 3:
        assert "going on after step" in done.stdout
    assert [line["step"] for line in metrics_of(run)] == list(range(1, STEPS + 1))
    equal(uninterrupted, run)


@pytest.mark.torchrun
def test_a_killed_run_on_two_hosts_goes_on_in_one_process(uninterrupted, tmp_path):
    run = killed_after(
        tmp_path, 5, "placement.trainer=1", "placement.rollout=0", processes=2
    )  # two trainers' sums would be rounded differently
    launch(*RUN, f"output_dir={tmp_path}", "--resume", "auto")
    equal(uninterrupted, run)


@pytest.mark.torchrun
def test_a_run_goes_on_with_another_number_of_trainer_ranks(uninterrupted, tmp_path):
    launch(*RUN, f"output_dir={tmp_path}", "steps=4")
    launch(*RUN, f"output_dir={tmp_path}", "--resume", "auto", "placement.trainer=0-1", processes=2)
    lines, reference = learned(tmp_path / "quickstart"), learned(uninterrupted)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[4]["reward/mean"] == reference[4]["reward/mean"], "the same samples, since the weights are the same"
    assert lines[4]["loss"] == pytest.approx(reference[4]["loss"], abs=1e-5)
    assert lines[4]["grad_norm"] == pytest.approx(reference[4]["grad_norm"], rel=1e-4)


def test_a_run_can_go_on_from_an_older_checkpoint_or_that_of_another_run(uninterrupted, tmp_path):
    older = uninterrupted / "checkpoints" / "step_000006"
    done = launch(*RUN, f"output_dir={tmp_path}", "--resume", str(older))
    assert "going on after step 6" in done.stdout
    assert [line["step"] for line in metrics_of(tmp_path / "quickstart")] == [7, 8]
    assert learned(tmp_path / "quickstart") == learned(uninterrupted)[6:]


def test_a_finished_run_has_nothing_left_to_do_and_more_steps_go_on(uninterrupted, tmp_path):
    launch(*RUN, f"output_dir={tmp_path}", "steps=2")
    done = launch(*RUN, f"output_dir={tmp_path}", "steps=2", "--resume", "auto")
    assert "going on after step 2" in done.stdout
    assert [line["step"] for line in metrics_of(tmp_path / "quickstart")] == [1, 2]


def test_what_is_changed_on_resume_is_applied_or_said_to_be_ignored_or_refused(uninterrupted, tmp_path):
    older = uninterrupted / "checkpoints" / "step_000004"
    here = (*RUN, f"output_dir={tmp_path}", "--resume", str(older))
    changed = ("optimizer.lr=0.0002", "optimizer.warmup_steps=0", "sft.steps=5", "evaluation.every=0")
    done = launch(*here, *changed, "steps=5")
    (line,) = metrics_of(tmp_path / "quickstart")
    assert line["lr"] == 0.0002
    said = [line for line in done.stdout.splitlines() if line.startswith("changed since then: ")]
    assert "changed since then: optimizer.lr: 0.0005 -> 0.0002 (applied from here on)" in said
    assert "changed since then: sft.steps: 2 -> 5 (ignored: the warm-up is over)" in said
    (tmp_path / "refused").mkdir()
    refused = launch(
        *RUN, f"output_dir={tmp_path / 'refused'}", "--resume", str(older), "model.config.hidden_size=32", "seed=9",
        expect=2,
    )  # fmt: skip
    assert refused.stderr.count("error:") == 1
    assert "model.config.hidden_size: 16 -> 32: the weights are the checkpoint's" in refused.stderr
    assert "seed: 0 -> 9: the checkpoint's position in the data" in refused.stderr
    assert not list((tmp_path / "refused").iterdir()), "nothing was touched"


def test_what_cannot_be_gone_on_from_is_one_message(tmp_path):
    with pytest.raises(InputError, match=r"checkpoint.*directory"):
        checkpoint_to_resume(str(tmp_path / "none"), tmp_path)
    with pytest.raises(InputError, match=r"checkpoint.*run's"):
        checkpoint_to_resume(str(tmp_path), tmp_path)
    assert checkpoint_to_resume("auto", tmp_path) is None
    assert checkpoint_to_resume("never", tmp_path) is None
