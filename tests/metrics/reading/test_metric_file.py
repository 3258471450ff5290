import json

from rlinf.storage.files import MetricsFile
from rlinf.storage.reading import MetricFile


def test_metrics_are_followed_while_a_run_writes_them(tmp_path):
    file = MetricFile(tmp_path / "metrics.jsonl")
    file.update()
    assert len(file.rows) == 0
    with MetricsFile(tmp_path / "metrics.jsonl") as out:
        for step in range(4):
            out.write(step, {"loss": step / 2, "broken": float("nan")})
            file.update()
            assert file.rows[-1] == {"step": step, "loss": step / 2}
    assert file.times_anew == 0


def test_a_run_that_goes_on_from_a_checkpoint_drops_what_came_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricFile(path)
    with MetricsFile(path) as out:
        for step in range(1, 6):
            out.write(step, {"loss": 1.0})
    file.update()
    kept = path.read_text().splitlines(keepends=True)[:2]
    aside = tmp_path / "aside"
    aside.write_text("".join(kept) + json.dumps({"step": 3, "loss": 2.0}) + "\n")
    aside.replace(path)
    file.update()
    assert (file.rows.steps, file.rows.values("loss")) == ([1, 2, 3], [1.0, 1.0, 2.0])
    assert file.times_anew == 1


def test_what_is_no_row_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 1}\n[]\n\xff\xfe\n{"step": 2, "a"\n{"step": 3}\n')
    file = MetricFile(tmp_path / "metrics.jsonl")
    file.update()
    assert file.rows.steps == [1, 3]


def test_an_evaluation_that_is_told_after_its_step_adds_to_the_row(tmp_path):
    file = MetricFile(tmp_path / "metrics.jsonl")
    with MetricsFile(tmp_path / "metrics.jsonl") as out:
        for row in ({"loss": 1.0}, {"evaluation/accuracy": 0.5}):
            out.write(1, row)
            file.update()
    assert list(file.rows) == [{"step": 1, "loss": 1.0, "evaluation/accuracy": 0.5}]
