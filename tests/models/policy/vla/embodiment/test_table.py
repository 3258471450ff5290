"""The table of models and simulators, and the grippers' conventions, from the authors' numbers."""

import pytest
import torch

from rlinf.models.policy.robots import GRIPPERS, PI05_PROMPT, TABLE, embodiment, gripper_to_model, gripper_to_robot


@pytest.mark.parametrize(("simulator", "opening", "closing"), [("libero", -1.0, 1.0), ("maniskill", 1.0, -1.0)])
def test_one_opens_in_openvla_s_data_and_each_simulator_has_its_own_sign(simulator, opening, closing):
    name = embodiment("openvla", simulator).gripper
    actions = torch.tensor([[0.3, 0.996], [0.3, 0.004]])
    found = gripper_to_robot(actions, name)
    assert found[:, 1].tolist() == [opening, closing]
    assert torch.equal(found[:, 0], actions[:, 0])
    assert gripper_to_model(found, name)[:, 1].tolist() == [1.0, 0.0]


def test_pi0_s_gripper_passes_and_calvin_s_is_its_sign():
    actions = torch.tensor([[0.1, -0.4]])
    assert torch.equal(gripper_to_robot(actions, embodiment("pi0", "libero").gripper), actions)
    assert gripper_to_robot(actions, embodiment("pi0", "calvin").gripper)[0, 1] == -1
    with pytest.raises(ValueError, match=r"same, libero"):
        gripper_to_robot(actions, "thumb")


@pytest.mark.parametrize(
    ("model", "simulator", "chunk", "size", "state", "scale"),
    [
        ("openvla", "libero", 1, 7, 0, "q01_q99"),
        ("openvla-oft", "libero", 8, 7, 8, "q01_q99"),
        ("openvla-oft", "bridge", 5, 7, 7, "q01_q99"),
        ("openvla-oft", "robotwin", 25, 14, 14, "min_max"),
        ("pi0", "libero", 5, 7, 8, "mean_std"),
        ("pi05", "libero", 5, 7, 0, "q01_q99"),
        ("pi05", "maniskill", 5, 7, 0, "q01_q99"),
        ("pi05", "metaworld", 5, 4, 0, "q01_q99"),  # fine-tuned without a state, as all of RLinf's pi0.5
        ("pi05", "calvin", 5, 7, 0, "q01_q99"),
        ("pi0", "metaworld", 5, 4, 4, "mean_std"),
    ],
)
def test_constants_are_the_authors(model, simulator, chunk, size, state, scale):
    row = embodiment(model, simulator)
    assert (row.chunk, row.action_size, row.state_size, row.scale) == (chunk, size, state, scale)


def test_prompts_are_the_authors():
    row = embodiment("openvla-oft", "libero")
    assert row.prompt.format(instruction="pick up the bowl") == (
        "In: What action should the robot take to pick up the bowl?\nOut: "
    )
    assert (row.prompt_length, embodiment("openvla", "maniskill").prompt_length) == (128, 30)
    assert embodiment("pi0", "libero").prompt.format(instruction="put it down") == "put it down\n"
    assert embodiment("pi05", "calvin").prompt == embodiment("pi0", "calvin").prompt  # which says no state
    assert PI05_PROMPT.format(instruction="go", state="1 2") == "Task: go, State: 1 2;\nAction: "


def test_every_row_fits_together():
    for row in TABLE.values():
        assert row.gripper in GRIPPERS
        assert "{instruction}" in row.prompt
        assert 0 < row.crop <= 1
        assert row.picked is None or max(row.picked) < row.action_size


def test_the_widowx_opens_and_closes_alike_whatever_model_moves_it():
    simulated = {row.gripper for (_, simulator), row in TABLE.items() if simulator in ("maniskill", "bridge")}
    assert simulated == {"maniskill"}
    actions = torch.tensor([[0.1, 0.51], [0.1, 0.49]])
    assert gripper_to_robot(actions, embodiment("pi0", "maniskill").gripper)[:, 1].tolist() == [1.0, -1.0]


def test_a_simulator_without_a_row_is_refused_with_those_that_have_one():
    with pytest.raises(ValueError, match=r"openvla: embodiment='libro'"):
        embodiment("openvla", "libro")
