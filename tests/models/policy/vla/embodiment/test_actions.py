"""What becomes of actions between a model and a simulator, there and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.models.policy.robots import TABLE, Embodiment, RobotActions, Scaling

numbers = st.floats(-3, 3)
widths = st.floats(0.1, 4)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(TABLE)), st.sampled_from([0, 3, 6]))
def test_demonstrated_actions_come_back_from_the_models_numbers(data, row, relative):
    """Of every row, on any scale and within any bounds, absolute and relative to the state before the chunk."""
    row = TABLE[row]
    size = row.action_size

    def drawn(each, *shape):
        count = torch.Size(shape).numel()
        return torch.tensor(data.draw(st.lists(each, min_size=count, max_size=count))).reshape(shape)

    scaling = Scaling.of({"mean": drawn(numbers, size), "std": drawn(widths, size)}, "mean_std")
    taken = size if row.picked is None else len(row.picked)
    low = drawn(numbers, taken)
    low[-1] = -1.0  # of a gripper, which has no units
    high = low + drawn(widths, taken)
    high[-1] = 1.0
    robot = RobotActions(row, scaling, tuple(low.tolist()), tuple(high.tolist()), relative)
    state = drawn(numbers, 2, 7)
    actions = drawn(st.floats(-1, 1), 2, 3, taken)
    actions[..., -1] = actions[..., -1].sign() + (actions[..., -1] == 0)
    model = robot.to_model(actions, state)
    assert model.shape == (2, 3, size)
    torch.testing.assert_close(robot.to_simulator(model, state), actions, atol=2e-4, rtol=0)  # 3 / 0.1 of 1e-6


def test_relative_numbers_are_steps_away_from_the_state_on_the_scale_of_their_own_statistics():
    row = Embodiment(prompt="{instruction}", prompt_length=8)
    scaling = Scaling.of({"mean": [0.1] * 7, "std": [0.5] * 7}, "mean_std")
    robot = RobotActions(row, scaling, (-2.0,) * 7, (2.0,) * 7, relative=6)
    actions = torch.full((1, 2, 7), 0.5)  # 1 in the robot's units
    state = torch.tensor([[0.4, 1.0, 1.6, 0.9, 0.9, 0.9, 100.0, 100.0]])
    found = robot.to_model(actions, state)[0]
    steps = torch.tensor([0.6, 0.0, -0.6, 0.1, 0.1, 0.1, 1.0])  # the gripper is absolute
    torch.testing.assert_close(found, ((steps - 0.1) / 0.5).expand(2, 7))
    with pytest.raises(ValueError, match=r"relative.*6.*robot's.*3"):
        robot.to_model(actions, state[:, :3])
