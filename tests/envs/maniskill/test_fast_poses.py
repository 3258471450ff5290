"""Quick poses are ManiSkill's poses, to the last bit."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("mani_skill") is None:
    pytest.skip("ManiSkill is not installed: pip install 'rlinf[maniskill]'", allow_module_level=True)

from rlinf.envs import maniskill
from rlinf.envs.maniskill import ManiSkill

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mani_skill.*")


@pytest.fixture
def pose(monkeypatch):
    """ManiSkill's class, put back afterwards to how it was found."""
    import mani_skill.envs  # noqa: F401  its modules import each other in one order only
    from mani_skill.agents.base_agent import BaseAgent
    from mani_skill.utils.structs.articulation import Articulation
    from mani_skill.utils.structs.pose import Pose

    for kind, names in (
        (Pose, ("__mul__", "inv", "create")),
        (BaseAgent, ("set_action",)),
        (Articulation, ("set_joint_drive_targets",)),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, kind.__dict__[name])
    maniskill.quicken()
    return Pose


def slow(pose):
    """Let it compute as ManiSkill does by itself."""
    from mani_skill.agents.base_agent import BaseAgent
    from mani_skill.utils.structs.articulation import Articulation

    original = maniskill._original
    pose.__mul__, pose.inv, pose.create = original["times"], original["inverse"], classmethod(original["create"])
    BaseAgent.set_action, Articulation.set_joint_drive_targets = original["act"], original["aim"]


def poses(pose, rows, seed):
    drawn = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed))
    drawn[:, 3:] /= drawn[:, 3:].norm(dim=1, keepdim=True)
    return pose(raw_pose=drawn)


@pytest.mark.parametrize(("left", "right"), [(500, 500), (1, 500), (500, 1)])
def test_products_and_inverses_are_equal_to_the_last_bit(pose, left, right):
    a, b = poses(pose, left, 1), poses(pose, right, 2)
    quick = [(a * b).raw_pose, a.inv().raw_pose, (a.inv() * b).raw_pose]
    slow(pose)
    for mine, theirs in zip(quick, [(a * b).raw_pose, a.inv().raw_pose, (a.inv() * b).raw_pose], strict=True):
        assert torch.equal(mine, theirs)


def test_a_pose_of_sapien_becomes_the_same_row(pose):
    import sapien

    given = sapien.Pose([0.1, -2.0, 3.3], [0.5, -0.5, 0.5, 0.5])
    quick, product = pose.create(given).raw_pose, (poses(pose, 3, 1) * given).raw_pose
    slow(pose)
    assert torch.equal(quick, pose.create(given).raw_pose)
    assert torch.equal(product, (poses(pose, 3, 1) * given).raw_pose)


def test_a_list_of_one_pose_and_a_pose_become_the_same_row(pose):
    import sapien

    given = sapien.Pose([0.1, -2.0, 3.3], [0.5, -0.5, 0.5, 0.5])
    many = poses(pose, 3, 1)
    for each in ([given], [given, given], many, many.raw_pose):
        for device in (None, "cpu", torch.device("cpu")):
            quick = pose.create(each, device=device).raw_pose
            assert torch.equal(quick, maniskill._original["create"](pose, each, device).raw_pose)


def test_an_action_that_is_no_number_is_refused(pose):
    simulator = ManiSkill(1, id="PullCube-v1", control="pd_joint_delta_pos")
    simulator.reset(torch.tensor([3]), torch.arange(1))
    with pytest.raises(ValueError, match="NaN"):
        simulator.step(torch.full((1, simulator.action_spec.size), float("nan")), torch.ones(1, dtype=torch.bool))
    simulator.close()


def test_what_needs_a_gradient_keeps_it(pose):
    rows = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]], requires_grad=True)
    (pose(raw_pose=rows) * poses(pose, 1, 1)).raw_pose.sum().backward()
    assert rows.grad is not None


@pytest.mark.parametrize("control", ["pd_ee_delta_pos", pytest.param("pd_joint_delta_pos", marks=pytest.mark.repeated)])
def test_an_episode_is_the_same_step_by_step(pose, control):
    simulator = ManiSkill(2, id="PullCube-v1", control=control)
    actions = torch.rand(30, 2, simulator.action_spec.size, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def episode():
        first = simulator.reset(torch.tensor([3, 4]), torch.arange(2))["state"]
        moved = [simulator.step(each, torch.ones(2, dtype=torch.bool)) for each in actions]
        return torch.stack([first, *(each.observation["state"] for each in moved)]), [each.reward for each in moved]

    states, rewards = episode()
    slow(pose)
    expected, earned = episode()
    simulator.close()
    assert torch.equal(states, expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rewards, earned, strict=True))
