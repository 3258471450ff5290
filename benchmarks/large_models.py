"""`python -m benchmarks.large_models`: models and clusters that are not here, estimated, beside what is known of them.

    memory      what `--dry-run` says of a device of the trainer, beside torch's tracker over our own training step with
                fake tensors, of whole models: counted of 3 and 4 layers, each layer more as much as the last
    rehearsal   Qwen3-30B-A3B on 32, 64 and 128 GPUs: the real flow in virtual time, on stage costs that RLinf published
                (arXiv 2509.15965, figures 12 and 13), collocated and disaggregated; which is the quicker is published
    modelled    the same by the cards' figures alone, without any published cost of this model; for comparison

All seconds are SIMULATED. A figure that misses its bar says LOST.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.contestants import ROOT
from benchmarks.placement_planned import Row
from benchmarks.placement_published import moe
from benchmarks.runtime import machine
from rlinf.flows.grpo import grpo
from rlinf.placement.auto import choose_for
from rlinf.placement.planner import best_of_each_mode
from rlinf.placement.seats import TEXT, place
from rlinf.placement.simulate import rehearse
from rlinf.placement.workload import Edge, Option, Stage, Workload
from rlinf.runs.dry_run.estimate import as_placed, workload_of
from rlinf.runs.dry_run.footprint import footprints
from rlinf.runs.rules import load_config
from tests.runs.dry_run.shapes import SHAPES, model
from tests.runs.dry_run.test_peak import measured
from tests.runs.dry_run.tracked import Case

GRPO = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")]
PUBLISHED = {
    32: {"collocated": 14.17, "disaggregated": 18.39},
    64: {"collocated": 25.51, "disaggregated": 27.32},
    128: {"collocated": 36.73, "disaggregated": 33.96},
}
"""Thousand tokens a second, figure 12: RLinf-Temporal and RLinf-Spatial, 1 : 1."""
ITEMS = 1500
"""Groups of a step that are rehearsed: a multiple of the 100 chunks that the release curve was made for."""


def memory() -> Iterator[Row]:
    for name, shape in SHAPES.items():
        config, placed = _configured(name, 64, [])
        seats = {role: seat.devices for role, seat in placed.seats.items()}
        said = footprints(config, model(name), seats)["trainer"].active_bytes
        tokens, ranks = config.trainer.micro_batch_tokens, len(seats["trainer"])
        assert tokens is not None
        three, four = measured([Case(f"{name}/{count}", ranks, tokens, checkpointed=True) for count in (3, 4)])
        counted = four + (four - three) * (shape["num_hidden_layers"] - 4)
        ratio = said / counted
        found = f"{said / 1e9:.1f} GB said, {counted / 1e9:.1f} counted: {ratio:.3f}"
        yield Row(f"{name}, trainer on {ranks} devices", "within 10 %", found, abs(ratio - 1) <= 0.1)


def rehearsal() -> Iterator[Row]:
    for devices, published in PUBLISHED.items():
        yield _compared(f"rehearsed, {devices} GPUs", _with_judge(moe(devices)), published)


def _compared(what: str, workload: Workload, published: dict[str, float]) -> Row:
    seconds: dict[str, float] = {}
    for row in choose_for(workload, ITEMS, grpo, per_mode=1).rows:
        seconds.setdefault(row.mode, row.seconds)
    quickest = max(published, key=lambda mode: published[mode])
    ours = min(published, key=lambda mode: seconds[mode])
    ratio = seconds["collocated"] / seconds["disaggregated"]
    theirs = published["disaggregated"] / published["collocated"]
    found = ", ".join(f"{mode} {seconds[mode]:,.0f} s" for mode in published)
    return Row(what, f"{quickest} (x {theirs:.2f})", f"{found} (x {ratio:.2f})", quickest == ours)


def _with_judge(workload: Workload) -> Workload:
    """Extend a workload by the stage that the flow has besides, which takes no time and no device."""
    judge = Stage("judge", (Option(0, 0.0),))
    rollout, trainer = workload.stages
    edges = (Edge("rollout", "judge"), Edge("judge", "trainer"))
    return Workload((rollout, judge, trainer), edges, workload.devices, workload.memory, workload.chunks)


def modelled() -> Iterator[Row]:
    for devices in PUBLISHED:
        half = devices // 2
        where = [f"placement.rollout=0-{half - 1}:0-{half // 4 - 1}", f"placement.trainer={half}-{devices - 1}"]
        name = "qwen3-30b-a3b"
        config, placed = _configured(name, devices, where)
        workload, _ = workload_of(config, model(name), placed)
        items = config.algorithm.prompts_per_step
        took = rehearse(grpo, as_placed(placed, workload, items), workload, items=items).seconds
        turns = best_of_each_mode(workload)["collocated"].seconds
        found = f"collocated {turns:,.0f} s, disaggregated as configured {took:,.0f} s"
        yield Row(f"by the cards' figures, {devices} GPUs", "no bar", found, None)


def _configured(name: str, devices: int, overrides: list[str]) -> Any:
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "8"}):
        config = load_config(ROOT / f"configs/large/{name}.yaml", overrides, devices)
        return config, place(config.placement, GRPO, devices)


PARTS = {each.__name__: each for each in (rehearsal, modelled, memory)}


def save(rows: list[Row]) -> Path:
    """Write everything by date."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-large-models.json"
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Print the figures; 1 if one misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-large-models.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts")
    given = parser.parse_args()
    rows = []
    for name in given.only:
        for row in PARTS[name]():
            rows.append(row)
            verdict = {True: "met", False: "LOST", None: ""}[row.met]
            print(f"{row.what:<44} {row.bar:<24} {row.found}  {verdict}", flush=True)
    if given.save:
        print(save(rows))
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
