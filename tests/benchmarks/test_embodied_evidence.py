"""`python -m benchmarks.embodied_evidence`: what its table says of runs, without one."""

import json
from dataclasses import replace

import pytest

from benchmarks import embodied_evidence
from benchmarks.embodied_evidence import HEADINGS, TABLE, Trained, main, markdown, rows, shipped

SOLVED = Trained("toy", 1, 100, 0.95, 0.9, -3.456, 0.01, 12800, 0.35, 1.24)
SCORED = Trained("cartpole_ppo", 0, 100, None, None, 475.0, 20.0, 61440, 1.0, 0.9)


def test_a_row_says_what_its_headings_are_and_how_sure_the_share_is():
    told = [dict(zip(HEADINGS, row, strict=True)) for row in rows([SOLVED, SCORED])]
    assert told[0] == {
        "configuration": "`toy`", "seed": "1", "solved once, %": "95", "95 %": "89 to 98", "at end, %": "90",
        "return": "-3.46", "env steps": "12,800", "minutes": "0.3", "CPU min": "1.2",
    }  # fmt: skip
    assert [told[1][name] for name in HEADINGS[2:6]] == ["-", "-", "-", "475.00"]  # nobody says what is solved


def test_the_table_names_every_shipped_configuration_that_is_not_run_and_why():
    other = replace(SOLVED, seed=0, solved=1.0, total=1.0)
    lines = markdown([SOLVED, other]).splitlines()

    assert lines[2] == "| `toy` | 100, 95 | 94 to 99 | 1.00, -3.46 | 12,800 | 1.2 |"
    assert {line.count("|") for line in lines} == {len(TABLE) + 1}
    said = {name: why for name, why in shipped().items() if why is not None}
    assert "a GPU and a checkpoint" in said["openvla_maniskill_ppo"]
    assert shipped()["toy"] is None
    assert len(lines) == 3 + len(said)
    for name, why in said.items():
        assert any(line.startswith(f"| `{name}` | not run: needs {why} |") for line in lines)


def test_runs_that_were_saved_are_not_run_again_and_a_run_that_fails_is_told(tmp_path, monkeypatch, capsys):
    saved, asked = tmp_path / "saved.json", []

    def trained(name, seed, directory, overrides):
        asked.append((name, seed, tuple(overrides)))
        if seed == 2:
            raise RuntimeError("toy, seed 2: it broke")
        return Trained(name, seed, 100, 0.5 * seed, None, 0.0, 0.0, 1, 1.0, 1.0)

    monkeypatch.setattr(embodied_evidence, "trained", trained)
    arguments = ["bench", "--only", "toy", "--save", str(saved), "steps=2"]
    for seeds, status in (("0", 0), ("0,1,2", 1)):
        monkeypatch.setattr("sys.argv", [*arguments, "--seeds", seeds])
        assert main() == status
    assert asked == [("toy", seed, ("steps=2",)) for seed in (0, 1, 2)]
    assert [each["seed"] for each in json.loads(saved.read_text())["runs"]] == [0, 1]
    told = capsys.readouterr()
    assert "it broke" in told.err
    assert "toy: 25.0 % of 2 seeds, least 0" in told.out
    monkeypatch.setattr("sys.argv", ["bench", "--only", "toys"])
    with pytest.raises(SystemExit):
        main()
    assert "no configuration is called toys" in capsys.readouterr().err
