"""Statistics of features against numpy's over all rows, and the files of published checkpoints."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.demonstrations import open_episodes, write_demonstrations
from rlinf.data.demonstrations.statistics import (
    Accumulator,
    as_groot,
    as_openpi,
    as_openvla,
    statistics_of,
    write_statistics,
)
from rlinf.data.demonstrations.stream import Part, bounded
from rlinf.models.policy.robots import Scaling
from tests.data.demonstrations.shown import episode


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=40),
    st.lists(st.integers(0, 20), max_size=4),
    st.floats(-1e6, 1e6),
)
def test_statistics_are_those_of_all_rows_however_they_come(values, cuts, offset):
    rows = np.array(values[: len(values) // 2 * 2]).reshape(-1, 2) + offset
    found = Accumulator()
    for part in np.split(rows, sorted(cut % (len(rows) + 1) for cut in cuts)):
        found.add(torch.from_numpy(part))
    made = found.done()
    near = {"rtol": 1e-12, "atol": 1e-9}  # float64 of numbers up to 1e6
    np.testing.assert_allclose(made.mean, rows.mean(0), **near)
    np.testing.assert_allclose(made.std, rows.std(0), rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(made.min, rows.min(0))
    np.testing.assert_array_equal(made.max, rows.max(0))
    np.testing.assert_allclose(made.q01, np.quantile(rows, 0.01, axis=0), **near)
    np.testing.assert_allclose(made.q99, np.quantile(rows, 0.99, axis=0), **near)
    assert made.count == len(rows)


def test_quantiles_of_many_rows_are_as_near_as_is_said():
    keep, rows = 4000, torch.arange(40_000, dtype=torch.float64)[:, None] / 40_000  # so that quantile q is q
    found = Accumulator(keep)
    for part in rows.split(777):
        found.add(part)
    made = found.done()
    bound = 4 * (0.01 * 0.99 / keep) ** 0.5  # four standard deviations
    assert 0 < abs(made.q01[0] - 0.01) < bound
    assert abs(made.q99[0] - 0.99) < bound
    assert float(made.mean[0]) == pytest.approx(float(rows.mean()), abs=1e-12)
    assert (made.count, made.max[0]) == (40_000, rows[-1, 0])


def test_features_of_a_data_set_by_name(tmp_path):
    shown = [episode(3, seed=1, extra=True), episode(5, seed=2, extra=True)]
    write_demonstrations(tmp_path, shown)
    episodes = open_episodes(tmp_path)
    found = statistics_of(episodes, [1, 0])
    assert found.keys() == {"actions", "state", "depth"}
    actions = torch.cat([each.actions[:, 0] for each in shown]).double()
    seen = torch.cat([each.observation["state"][:-1] for each in shown]).double()  # what actions were decided on
    torch.testing.assert_close(found["actions"].mean, actions.mean(0))
    torch.testing.assert_close(found["state"].std, seen.std(0, unbiased=False))
    write_demonstrations(tmp_path, [episode(2, actions=torch.full((2, 1, 2), torch.nan))])
    with pytest.raises(ValueError, match=r"actions.*episode 2:"):
        statistics_of(open_episodes(tmp_path), range(3))


def test_files_of_published_checkpoints(tmp_path):
    write_demonstrations(tmp_path, [episode(3), episode(5, seed=2)])
    found = statistics_of(open_episodes(tmp_path), range(2))
    found["actions"] = found["actions"].masked([-1])
    openvla = as_openvla(found, "my_robot", 2)["my_robot"]
    assert openvla["action"].keys() == {"mean", "std", "max", "min", "q01", "q99", "mask"}
    assert openvla["action"]["mask"] == [True, False]
    assert (openvla["num_transitions"], openvla["num_trajectories"], len(openvla["proprio"]["mean"])) == (8, 2, 3)
    openpi = as_openpi(found)["norm_stats"]
    wanted = ["mean", "std", "q01", "q99"]
    assert {name: [*each] for name, each in openpi.items()} == {"state": wanted, "actions": wanted}
    parts = {"action": {"arm": (0, 1), "gripper": (1, 2)}}
    groot = as_groot(found, "new_embodiment", parts, {"front": (48, 64, 3)}, 20.0)["new_embodiment"]
    assert groot["statistics"]["action"]["gripper"]["max"] == found["actions"].max[1:].tolist()
    assert groot["modalities"]["video"]["front"] == {"resolution": [64, 48], "channels": 3, "fps": 20.0}
    assert groot["modalities"]["state"]["state"]["shape"] == [3]
    write_statistics(tmp_path / "new" / "stats.json", openvla)
    assert json.loads((tmp_path / "new" / "stats.json").read_text()) == openvla
    with pytest.raises(ValueError, match=r"number 2.*feature.*2"):
        found["actions"].masked([2])
    with pytest.raises(ValueError, match="no row"):
        Accumulator().done()


def test_a_number_that_moves_in_fewer_than_one_row_in_a_hundred_is_scaled_by_its_bounds(tmp_path, caplog):
    """Its quantiles are one value: scaled by them the event would be lost (learned as 0), or become 2,000,000."""
    actions = torch.randn(800, 1, 2, generator=torch.Generator().manual_seed(0))
    actions[:, 0, 1] = (torch.arange(800) == 400).float()
    shown = episode(800, cameras=0, actions=actions)
    write_demonstrations(tmp_path, [shown])
    episodes = open_episodes(tmp_path)
    made = statistics_of(episodes, [0])["actions"]
    assert made.rare.tolist() == [False, True]
    assert (float(made.q01[1]), float(made.q99[1])) == (0.0, 1.0)
    assert "number 1" in caplog.text
    scaling = Scaling.of({"q01": made.q01, "q99": made.q99}, "q01_q99", 1e-6)
    assert scaling.normalised(shown.actions[:, 0])[:, 1].abs().max() <= 1.0
    learned = bounded(Part(episodes, (0,)), "q01_q99").read(0).actions[:, 0, 1]
    assert learned.tolist() == [-1.0] * 400 + [1.0] + [-1.0] * 399


def test_a_number_that_never_moves_is_not_rare():
    rows = torch.zeros(800, 2)
    rows[:, 0] = torch.arange(800)
    made = Accumulator()
    made.add(rows)
    assert made.done().rare.tolist() == [False, False]
