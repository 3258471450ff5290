"""`make bench-gpu`: every measure runs in a rehearsal, and what it counts is counted right."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu import harness
from benchmarks.gpu.harness import BUDGET
from benchmarks.gpu.measures import decode, training
from benchmarks.gpu.measures.__main__ import MEASURES, measure
from benchmarks.gpu.measures.step import figures as of_steps
from benchmarks.gpu.measuring import clock, limits, profiled
from benchmarks.gpu.measuring.bars import BARS
from benchmarks.gpu.measuring.flops import Shape
from benchmarks.gpu.scale import NotRun, Scale
from rlinf.runtime.base import tensors
from tests.launching import Forked

TINY = Qwen2Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=160, tie_word_embeddings=True,
)  # fmt: skip


# The whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.repeated  # each measure runs by `make bench-gpu GPU_ARGS=--rehearse` too
@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_all_measures_run_in_a_rehearsal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
    out = tmp_path / "out.json"
    common = ["--rehearse", "--out", str(out), "--work", str(tmp_path / "work")]

    assert measure(common) == 0, capsys.readouterr().out

    told = capsys.readouterr().out
    outcomes = json.loads(out.read_text())["outcomes"]
    assert {name: found["state"] for name, found in outcomes.items()} == {one.name: "measured" for one in MEASURES}
    assert "was not reached" not in told
    for name, bars in BARS.items():
        figures = outcomes[name]["figures"]
        assert figures["peak_gb"] > 0
        for bar in bars:
            assert full_scale(bar.figure) or bar.figure in figures, bar
            assert bar.limit is None or full_scale(bar.limit) or figures[bar.limit] > 0, bar
    assert told.count("rehearsed\n") == sum(
        bar.figure in outcomes[name]["figures"] for name in BARS for bar in BARS[name]
    )

    # once more, nothing is left to do; and a file stands beside itself with ratios of 1
    assert measure([*common, "--against", str(out)]) == 0
    ratios = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("head: ")]
    assert len(ratios) == len(outcomes["head"]["figures"])
    assert set(ratios) <= {"1.000", "-"}
    with pytest.raises(SystemExit, match=r"--against .*missing\.json:"):
        measure([*common, "--against", str(tmp_path / "missing.json")])


def full_scale(figure: str) -> bool:
    """Whether a rehearsal names it otherwise, by its own sizes; and a real run would have it."""
    names = [f"graphed_r{rows}_c{context}" for context, rows in (*decode.CELLS, (600, 256))]
    names += [f"t{tokens}_{way}" for tokens in training.SIZES for way in training.WAYS]
    return any(figure.startswith(f"{name}_") for name in names)


def test_all_limits_together_stay_within_the_time_of_one_call() -> None:
    assert sum(one.limit for one in MEASURES) <= BUDGET


# Bars -----------------------------------------------------------------------------------------------------------------


# What is counted ------------------------------------------------------------------------------------------------------


def angles_of(model: Any, length: int) -> int:
    """What torch counts for the angles of rotary embeddings: a product in some releases of transformers."""
    with FlopCounterMode(display=False) as counter:
        model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    return counter.get_total_flops()


def test_flops_are_those_that_torch_counts() -> None:
    shape, lengths = Shape.of(TINY), [7, 19]
    model = AutoModelForCausalLM.from_config(TINY, attn_implementation="eager")

    forward, training, angles = 0, 0, 0
    for length in lengths:  # each by itself: torch counts the products of padding too
        ids = torch.randint(160, (1, length))
        with FlopCounterMode(display=False) as counter:
            loss = model(input_ids=ids).logits.sum()
        forward += counter.get_total_flops()
        angles += angles_of(model, length)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        training += counter.get_total_flops()

    ours = shape.forward_flops(lengths, sum(lengths), causal=False)
    assert forward == ours + angles
    assert training == 2 * ours
    causal = ours - shape.forward_flops(lengths, sum(lengths))
    above = sum(1 for length in lengths for row in range(length) for column in range(length) if column > row)
    assert causal == shape.pairs_flops(above)
    assert shape.training_flops(lengths, 5) == 3 * shape.forward_flops(lengths, 5)


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    shape, lengths = Shape.of(TINY), [11, 3]
    model = AutoModelForCausalLM.from_config(TINY, attn_implementation="eager").requires_grad_(False)
    embedded = [torch.randn(1, length, TINY.hidden_size, requires_grad=True) for length in lengths]

    with FlopCounterMode(display=False) as counter:
        for one in embedded:
            model(inputs_embeds=one).logits.sum().backward()
    angles = sum(angles_of(model, length) for length in lengths)

    above = shape.forward_flops(lengths, 14, causal=False) - shape.forward_flops(lengths, 14)
    assert counter.get_total_flops() == shape.training_flops(lengths, 14, frozen=True) + 3 * above + angles


def test_bytes_of_a_decode_step_are_the_weights_that_are_multiplied_and_the_cache() -> None:
    shape = Shape.of(TINY)
    model = AutoModelForCausalLM.from_config(TINY)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)  # tied: the embedding once

    assert shape.weights == matrices
    per_token = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, width, bytes
    assert shape.decode_bytes(5, 10, 2) == 2 * matrices + 50 * per_token
    untied = Shape.of(Qwen2Config(**{**TINY.to_dict(), "tie_word_embeddings": False}))
    assert untied.decode_bytes(5, 10, 2) == shape.decode_bytes(5, 10, 2)  # one of the two is only looked up
    assert untied.weights == matrices + 160 * 64


def test_launches_waits_and_copies_are_read_off_a_trace_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, category: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "cat": category, **more}

    events = [
        event("cudaGraphLaunch", "cuda_runtime"),
        event("cudaLaunchKernel", "cuda_runtime"),
        event("cudaLaunchKernelExC", "cuda_runtime"),
        event("cuLaunchKernelEx", "cuda_driver"),
        event("cudaMemcpyAsync", "cuda_runtime"),
        event("cudaStreamSynchronize", "cuda_runtime"),
        event("cudaEventSynchronize", "cuda_runtime"),
        event("gemm", "kernel"),
        event("aten::mm", "cpu_op"),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", args={"bytes": 4096}),
        event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", args={"bytes": 9}),
        {"ph": "M"},
    ]

    class Seen:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"traceEvents": events}))

    found = profiled.counts(Seen(), torch.device("cuda", 0))  # type: ignore[arg-type]

    assert found == {"launches": 4, "graphs": 1, "syncs": 2, "kernels": 1, "to_host": 1, "to_host_bytes": 4096}
    twice = type(found)({kind: 2 * value + 3 for kind, value in found.items()})
    assert profiled.each(found, twice, 2)["launches"] == 3.5


def test_phases_of_a_step_are_shares_of_its_own_time() -> None:
    def metrics(seconds: float) -> dict[str, float]:
        phases = {"generation": 0.4, "training": 0.4, "sync": 0.02, "switching": 0.06, "other": 0.04}
        return {f"timing/{name}": share * seconds for name, share in phases.items()} | {
            "timing/step": seconds, "tokens": 1200.0, "response_tokens": 800.0,
        }  # fmt: skip

    cap = limits.Limits(1.0, 1e9, 1.0, 1.0)
    found = of_steps([metrics(2.0), metrics(4.0)], Shape.of(TINY), cap, 10)

    assert found["busy_share"] == pytest.approx(0.90)
    assert found["publish_and_switch_share"] == pytest.approx(0.08)
    assert found["step_s"] == pytest.approx(3.0)
    assert found["generated_tokens_per_s"] == pytest.approx(800 / 1.2)
    lengths = [120] * 10
    work = Shape.of(TINY).forward_flops(lengths, 800) * 4
    assert found["flops_share"] == pytest.approx(work / 3.0 / 1e9)


# Clocks ---------------------------------------------------------------------------------------------------------------


class Card:
    """Stands for a card whose clock goes on by a millisecond for every piece of work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.peak, self.settled = 0.0, 5_000_000_000, 0
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = card.time

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        def settle(device: torch.device) -> None:
            self.settled += 1

        faked = {
            "Event": Event, "synchronize": settle, "empty_cache": lambda: None, "mem_get_info": lambda _: (100, 200),
            "reset_peak_memory_stats": lambda _: None, "max_memory_allocated": lambda _: self.peak,
        }  # fmt: skip
        for name, fake in faked.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(tensors, "enter_device", lambda: torch.device("cuda", 0))

    def work(self) -> None:
        self.time += 1.0


def test_a_card_is_timed_by_its_own_events_and_waited_for_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    card, device = Card(monkeypatch), torch.device("cuda", 0)

    assert clock.device_seconds(card.work, device, 4, warm=3) == [pytest.approx(1e-3)] * 4
    assert card.settled == 2  # once before the first, once after the last: rounds are not held up
    assert card.time == 7

    assert len(clock.wall_seconds(card.work, device, 2, warm=1)) == 2
    assert card.settled == 2 + 6
    clock.freed(device)
    assert clock.peak_gb(device) == pytest.approx(5.0)


def test_a_part_that_fails_leaves_the_others_what_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Card(monkeypatch)
    parts = clock.Parts("head", Scale(False, tmp_path, 100.0))

    def full() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def broken() -> dict[str, float]:
        raise RuntimeError("the kernel is gone\nfor good")

    def missing() -> dict[str, float]:
        raise NotRun("flash is not installed")

    assert parts.make("", lambda: {"rest_share": 0.1})
    assert not parts.make("large", full)
    assert parts.outcome().passed is True
    assert not parts.make("flash", missing)
    assert not parts.make("late", lambda: {"x": 1.0}, expected=1000.0)
    assert parts.outcome().passed is True
    assert not parts.make("odd", broken)
    found = parts.outcome()

    assert found.passed is False
    assert found.figures == {"rest_share": 0.1, "peak_gb": 5.0}
    for told in ("large: OutOfMemoryError: CUDA out of memory", "flash: flash is not installed",
                 "late was not reached", "odd: RuntimeError: the kernel is gone"):  # fmt: skip
        assert told in found.why
    assert "for good" in capsys.readouterr().err  # with its traceback, for the file
    bare = clock.Parts("head", Scale(False, tmp_path, 100.0))
    assert not bare.make("", lambda: {"x": float(bool(importlib.import_module("a_package_of_nobody")))})
    with pytest.raises(NotRun, match=r"^a_package_of_nobody.*installed$"):
        bare.outcome()
    rehearsed = clock.Parts("head", Scale(True, tmp_path, 100.0))
    with pytest.raises(RuntimeError, match=r"kernel.*gone"):
        rehearsed.make("odd", broken)


def test_limits_are_measured_once_for_all_measures_of_a_call(tmp_path: Path) -> None:
    scale = Scale(True, tmp_path / "work")

    first = limits.limits_of(scale)

    assert min(first.memory_bytes_per_s, first.matmul_flop_per_s, first.to_host_bytes_per_s) > 0
    assert limits.limits_of(SimpleNamespace(work=scale.work, device=scale.device)) == first  # type: ignore[arg-type]
