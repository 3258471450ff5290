import json

from rlinf.metrics.files import MetricsFile, SamplesFile
from rlinf.metrics.reading import appended
from rlinf.metrics.reading.files import RunFiles


def answers(step, count, kind=None, text="x"):
    return [{"prompt": f"{step}.{each}", "response": text, **({"kind": kind} if kind else {})} for each in range(count)]


def test_metrics_are_followed_while_a_run_writes_them(tmp_path):
    files = RunFiles(tmp_path)
    files.update()
    assert len(files.metrics.rows) == 0
    with MetricsFile(tmp_path / "metrics.jsonl") as out:
        for step in range(4):
            out.write(step, {"loss": step / 2, "broken": float("nan")})
            files.update()
            assert files.metrics.rows[-1] == {"step": step, "loss": step / 2}
    assert files.metrics.times_anew == 0


def test_a_run_that_goes_on_from_a_checkpoint_drops_what_came_after(tmp_path):
    path, files = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    with MetricsFile(path) as out:
        for step in range(1, 6):
            out.write(step, {"loss": 1.0})
    files.update()
    kept = path.read_text().splitlines(keepends=True)[:2]
    aside = tmp_path / "aside"
    aside.write_text("".join(kept) + json.dumps({"step": 3, "loss": 2.0}) + "\n")
    aside.replace(path)
    files.update()
    assert (files.metrics.rows.steps, files.metrics.rows.values("loss")) == ([1, 2, 3], [1.0, 1.0, 2.0])
    assert files.metrics.times_anew == 1


def test_what_is_no_row_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 1}\n[]\n\xff\xfe\n{"step": 2, "a"\n{"step": 3}\n')
    files = RunFiles(tmp_path)
    files.update()
    assert files.metrics.rows.steps == [1, 3]


def test_answers_of_a_step_are_found_without_keeping_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(appended, "BLOCK", 256)
    files = RunFiles(tmp_path)
    with SamplesFile(tmp_path / "samples.jsonl") as out:
        out.write(0, answers(0, 2, "held-out"))
        for step in (1, 2):
            out.write(step, answers(step, 3, text='"kind": "held-out" is said, not meant. ' * 9))
            files.samples.update()
        out.write(2, answers(2, 2, "held-out"))
        files.samples.update()
        out.write(1, answers(1, 1, text="later"))
    files.samples.update()
    samples = files.samples
    assert (samples.steps, samples.held_out_steps) == ([1, 2], [0, 2])
    assert [row["prompt"] for row in samples.rows(1)] == ["1.0", "1.1", "1.2", "1.0"]
    assert [row["response"] for row in samples.rows(1)][-1] == "later"
    assert [row["prompt"] for row in samples.rows(2, most=2)] == ["2.0", "2.1"]
    assert [row["prompt"] for row in samples.held_out(2)] == ["2.0", "2.1"]
    assert (samples.rows(7), samples.held_out(1)) == ([], [])


def test_a_step_that_does_not_come_first_in_its_row_is_found_too(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"prompt": "p", "step": 4}\n{"prompt": "q"}\n')
    files = RunFiles(tmp_path)
    files.update()
    assert files.samples.rows(4) == [{"prompt": "p", "step": 4}]
    assert files.samples.steps == [4]


def test_an_evaluation_that_is_told_after_its_step_adds_to_the_row(tmp_path):
    files = RunFiles(tmp_path)
    with MetricsFile(tmp_path / "metrics.jsonl") as out:
        for row in ({"loss": 1.0}, {"evaluation/accuracy": 0.5}):
            out.write(1, row)
            files.update()
    assert list(files.metrics.rows) == [{"step": 1, "loss": 1.0, "evaluation/accuracy": 0.5}]
