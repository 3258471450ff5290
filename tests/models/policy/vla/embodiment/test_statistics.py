"""Numbers of robots: the formulas of the checkpoints' authors, both ways, masks and padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.envs.base import ActionSpec
from rlinf.models.policy.robots import Scaling, from_unit, padded, to_unit

BRIDGE = {
    "q01": [-0.02872725, -0.04170349, -0.02609386, -0.08092105, -0.09288699, -0.20718276, 0.0],
    "q99": [0.02832544, 0.04086989, 0.04034953, 0.08192380, 0.07792288, 0.20382574, 1.0],
    "mask": [True] * 6 + [False],
}


def test_openvla_s_formula_scales_all_but_the_gripper():
    scaling = Scaling.of(BRIDGE, "q01_q99", 1e-8)
    x = torch.linspace(-1, 1, 21).view(3, 7)
    low, high = np.array(BRIDGE["q01"]), np.array(BRIDGE["q99"])
    expected = np.where(BRIDGE["mask"], 0.5 * (x.double().numpy() + 1) * (high - low + 1e-8) + low, x.numpy())
    np.testing.assert_allclose(scaling.unnormalised(x).numpy(), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(scaling.normalised(scaling.unnormalised(x)), x, rtol=1e-5, atol=1e-6)


def test_openpi_s_formulas_and_places_that_the_robot_does_not_have():
    stats = {"mean": [1.0, -2.0], "std": [0.5, 4.0], "q01": [0.0, -8.0], "q99": [2.0, 4.0]}
    x = torch.tensor([[1.5, 2.0, 7.0]])
    found = Scaling.of(stats, "mean_std", 1e-6).normalised(x)
    torch.testing.assert_close(found, torch.tensor([[0.5 / 0.500001, 4 / 4.000001, 7.0]]))
    found = Scaling.of(stats, "q01_q99", 1e-6).normalised(x)
    torch.testing.assert_close(found, torch.tensor([[3 / 2.000001 - 1, 20 / 12.000001 - 1, 7.0]]))
    with pytest.raises(ValueError, match=r"another robot"):
        Scaling.of(stats, "mean_std").normalised(x[:, :1])


def test_a_number_that_never_changes_normalises_to_zero_and_comes_back():
    scaling = Scaling.of({"min": [3.0, 0.0], "max": [3.0, 2.0]}, "min_max")
    assert scaling.normalised(torch.tensor([3.0, 2.0])).tolist() == [0.0, 1.0]
    assert scaling.unnormalised(torch.tensor([0.3, -1.0])).tolist() == [3.0, 0.0]


def test_statistics_that_lack_something_say_what():
    with pytest.raises(ValueError, match=r"q01.*q99.*q01_q99 needs:.*\['mean'\]"):
        Scaling.of({"mean": [0.0]}, "q01_q99")
    with pytest.raises(ValueError, match=r"2 numbers.*1 std"):
        Scaling.of({"mean": [0.0, 1.0], "std": [1.0]}, "mean_std")


@given(st.lists(st.tuples(st.floats(-5, 0, width=32), st.floats(0.125, 5, width=32)), min_size=1, max_size=4))
def test_the_environment_undoes_what_the_adapter_does(bounds):
    low, high = torch.tensor(bounds).T
    spec = ActionSpec(low, high)
    units = low + (high - low) * torch.linspace(0, 1, 5)[:, None]
    assert to_unit(units, low, high).abs().max() <= 1
    torch.testing.assert_close(spec.scaled(to_unit(units, low, high)), units, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(from_unit(to_unit(units, low, high), low, high), units, rtol=1e-5, atol=1e-5)


def test_numbers_without_bounds_pass_and_others_are_cut():
    low, high = torch.tensor([-torch.inf, -1.0]), torch.tensor([torch.inf, 1.0])
    assert to_unit(torch.tensor([7.0, 7.0]), low, high).tolist() == [7.0, 1.0]
    assert from_unit(torch.tensor([7.0, 7.0]), low, high).tolist() == [7.0, 1.0]


def test_padding_adds_zeros_and_refuses_to_cut():
    assert padded(torch.ones(2, 3), 5).tolist() == [[1, 1, 1, 0, 0]] * 2
    with pytest.raises(ValueError, match=r"3 numbers.*into.*2"):
        padded(torch.ones(2, 3), 2)


@pytest.mark.parametrize("std", [None, [0.0, 1.0]])
def test_bounds_that_leave_no_number_any_room_are_refused(std):
    """What a data set's statistics are whose quantiles were never computed."""
    given = {"q01": [0.0, 0.0], "q99": [0.0, 0.0]} | ({} if std is None else {"std": std})
    with pytest.raises(ValueError, match="q01_q99"):
        Scaling.of(given, "q01_q99", 1e-6)


def test_a_number_that_moves_between_equal_bounds_is_told_of(caplog):
    Scaling.of({"q01": [0.0, 0.0], "q99": [1.0, 0.0], "std": [0.3, 0.1]}, "q01_q99", 1e-6)
    assert "number 1" in caplog.text
    caplog.clear()
    Scaling.of({"q01": [0.0, 0.0], "q99": [1.0, 0.0], "std": [0.3, 0.0]}, "q01_q99", 1e-6)
    Scaling.of({"q01": [0.0, 0.0], "q99": [1.0, 0.0], "std": [0.3, 0.1], "mask": [True, False]}, "q01_q99", 1e-6)
    assert caplog.text == ""
