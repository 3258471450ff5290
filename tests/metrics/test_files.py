"""metrics.jsonl and samples.jsonl: on disk at once, readable by anything, and after any crash."""

from __future__ import annotations

import json

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.metrics import MetricsFile, SamplesFile
from rlinf.storage.files import read_lines


def test_a_step_is_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(1, {"reward/mean": 0.5, "loss": float("nan"), "kl": float("inf")})
        assert json.loads(path.read_text()) == {"step": 1, "reward/mean": 0.5, "loss": None, "kl": None}
        file.write(2, {"loss": np.float32(0.5), "grad_norm": torch.tensor(2.0)})
    assert [row["step"] for row in read_lines(path)] == [1, 2]
    assert list(read_lines(path))[1] == {"step": 2, "loss": 0.5, "grad_norm": 2.0}


def test_a_file_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with MetricsFile(path) as file:
            file.write(step, {})
    assert [row["step"] for row in read_lines(path)] == [1, 2]


plain = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.dictionaries(st.text(max_size=8), plain | st.text() | st.lists(plain, max_size=3), max_size=5)))
def test_samples_come_back_as_they_were_whatever_a_model_wrote(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    with SamplesFile(path) as file:
        file.write(7, rows)
    assert list(read_lines(path)) == [{"step": 7, **row} for row in rows]
    assert path.read_text(encoding="utf-8").count("\n") == len(rows)


def test_half_a_line_and_foreign_lines_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1, 2]\n\xff\xfe\n{"step": 2}\n{"step": 3, "rew')
    assert [row["step"] for row in read_lines(path)] == [1, 2]
    assert list(read_lines(tmp_path / "none.jsonl")) == []
