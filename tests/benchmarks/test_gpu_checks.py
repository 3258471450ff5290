"""`make test-gpu`, rehearsed: every check passes here, and what is wrong is found."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from benchmarks.gpu.checks import (
    decode,
    device,
    failing,
    flow,
    memory,
    parts,
    publishing,
    ranks,
    runs,
    sends,
    simulators,
    training,
    ways,
)
from benchmarks.gpu.checks.__main__ import CHECKS
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.harness import Check, main
from benchmarks.gpu.scale import NotRun, Outcome, Scale
from rlinf.actors.trainer import Trainer
from tests.launching import Forked

pytestmark = pytest.mark.torchrun  # some start processes

BOUNDS: dict[str, tuple[Bound, ...]] = {
    "decode-steps": decode.STEPS,
    "packed-training": training.PACKED,
    "ways": ways.WAYS,
    "generate": decode.GENERATE,
    "recorded-steps": decode.ALIKE,
    "engine-and-trainer": training.ENGINE,
    "quickstart": runs.RUN,
    "collocated": flow.COLLOCATED,
    "compiled": training.COMPILED,
    "parking": memory.PARKED,
    "peaks": memory.PEAKS,
    "checkpoint": flow.RESTORED,
    "sends": sends.SENDS,
    "publish": publishing.PUBLISHED,
    "out-of-memory": failing.MEMORY,
    "two-ranks": failing.PAIR,
    "maniskill": simulators.SIMULATED,
}
LONG = ("quickstart", "ways", "compiled", "publish", "sends", "two-ranks", "out-of-memory")
"""Their rehearsals take ten seconds and more; `make test-gpu GPU_ARGS=--rehearse` runs them, too."""
ALONE = ("out-of-memory",)
"""Takes the memory of its process away: by the harness, in a process of its own."""
FORKED = ("sends", "publish")
"""Their ranks are forked off a process that has imported most of it; those of "two-ranks" are started as on a card."""


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Scale:
    return Scale(True, tmp_path_factory.mktemp("gpu"), 100.0)


def made(check: Check, scale: Scale) -> Outcome:
    module, function = check.run.split(":")
    found: Outcome = getattr(importlib.import_module(f"benchmarks.gpu.checks.{module}"), function)(scale)
    return found


def test_every_check_has_bounds_and_all_fit_into_the_time() -> None:
    assert {check.name for check in CHECKS} == BOUNDS.keys()
    assert all(BOUNDS.values())


@pytest.mark.parametrize(
    "check",
    [pytest.param(one, marks=[pytest.mark.repeated] * (one.name in LONG), id=one.name) for one in CHECKS],
)
def test_a_check_passes_in_rehearsal_and_says_what_it_left_out(
    check: Check, scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check.name in FORKED:
        monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
    if check.name in ALONE:
        out = tmp_path / "out.json"
        code = main("checks", "benchmarks.gpu.checks", [check], ["--rehearse", "--out", str(out)])
        found = json.loads(out.read_text())["outcomes"][check.name]
        assert code == 0, found
        outcome = Outcome(found["state"] == "passed", found["figures"], found["why"])
    else:
        try:
            outcome = made(check, scale)
        except NotRun as missing:
            pytest.skip(str(missing))
    assert outcome.passed, outcome
    for bound in BOUNDS[check.name]:
        assert bound.figure in outcome.figures
        assert not bound.needs or bound.needs in outcome.why


# What a CPU would not run -------------------------------------------------------------------------------------------


def test_what_is_asked_of_cuda_is_asked_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    names = ("synchronize", "ipc_collect", "empty_cache", "memory_allocated", "memory_reserved", "mem_get_info")
    names += ("reset_peak_memory_stats", "max_memory_allocated", "set_per_process_memory_fraction")
    asked = {name: create_autospec(getattr(torch.cuda, name)) for name in names}
    for name, stand_in in asked.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    asked["mem_get_info"].return_value = (60 << 30, 80 << 30)
    asked["memory_reserved"].return_value = 8 << 30
    asked["memory_allocated"].return_value = 7
    asked["max_memory_allocated"].return_value = 9
    device.synchronize(card)
    device.emptied(card)
    device.peak_begun(card)
    assert (device.held_bytes(card), device.peak_bytes(card), device.whole_bytes(card)) == (7, 9, 80 << 30)
    with pytest.raises(torch.OutOfMemoryError), device.short_of_memory(card):
        raise torch.OutOfMemoryError
    shares = [call.args[0] for call in asked["set_per_process_memory_fraction"].call_args_list]
    assert shares == [pytest.approx((8 * 2**30 + 2e9) / (80 << 30)), 1.0]
    assert all(stand_in.called for stand_in in asked.values())


@pytest.mark.parametrize(("fits", "passes"), [(1.0, True), (0.5, False)])
def test_a_case_that_runs_out_of_memory_must_have_been_estimated_so(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, fits: float, passes: bool
) -> None:
    """On a card that has so much of the least estimate of a case that does not fit."""
    least = memory.estimated(scale, 128, False)
    monkeypatch.setattr(memory, "whole_bytes", lambda _: least / 1.01 if passes else least / fits)

    def taken(scale: Scale, back: Any, tokens: int) -> float:
        if not back.checkpointed:
            raise torch.OutOfMemoryError
        return memory.estimated(scale, tokens, True) / 1.1

    @contextmanager
    def trainer(scale: Scale, gradient_checkpointing: bool) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(checkpointed=gradient_checkpointing)

    monkeypatch.setattr(memory, "_peak", taken)
    monkeypatch.setattr(memory, "trainer", trainer)
    found = memory.peaks(scale).figures
    outcome = judge(Scale(False, scale.work), found, memory.PEAKS)
    assert outcome.passed is passes, outcome
    assert found["128_kept_peak_gb"] == "did not fit"


@pytest.fixture
def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's model is another one than that of the files."""
    build = parts.build_model

    def other(*args: Any, **settings: Any) -> Any:
        model = build(*args, **settings)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        return model

    monkeypatch.setattr(parts, "build_model", other)


@pytest.mark.usefixtures("other_weights")
def test_an_engine_with_other_weights_is_found_by_transformers_and_by_the_trainer(scale: Scale) -> None:
    assert decode.beside_generate(scale).passed is False
    assert training.beside_engine(scale).passed is False


def test_a_restore_that_forgets_is_found(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Trainer._take

    def forgetful(self: Trainer, source: Any) -> Any:
        found = take(self, source)
        state = next(iter(self._learner.optimizer.state.values()))
        state["exp_avg"].zero_()
        return found

    monkeypatch.setattr(Trainer, "_take", forgetful)
    failed = flow.checkpoint(scale)
    assert failed.passed is False
    assert "tensors_that_changed" in failed.why
