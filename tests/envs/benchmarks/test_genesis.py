"""Genesis's adapter before a stand-in of its scene and entities, all environments in one tensor."""

from types import SimpleNamespace

import pytest
import torch

from rlinf.envs.adapters import genesis
from rlinf.envs.adapters.genesis import GenesisLift
from rlinf.envs.base import CannotSimulate, WrongOption
from tests.envs.benchmarks.stand_ins import missing, stand_in
from tests.envs.protocol import ProtocolSuite, begin, everyone


class Entity:
    """An arm of nine joints, or a free body whose seven numbers are its place and its turn."""

    def __init__(self, joints, speeds):
        self.sizes = joints, speeds

    def build(self, count):
        self.q, self.v = (torch.zeros(count, size) for size in self.sizes)
        self.goal = self.q.clone()

    def set_qpos(self, qpos, envs_idx=None):
        self.q[envs_idx] = qpos

    def set_dofs_velocity(self, velocity, envs_idx=None):
        self.v[envs_idx] = velocity

    def control_dofs_position(self, position, envs_idx=None):
        self.goal[slice(None) if envs_idx is None else envs_idx] = position

    def get_qpos(self):
        return self.q

    def get_dofs_velocity(self):
        return self.v

    def get_pos(self):
        return self.q[:, :3]

    def get_quat(self):
        return self.q[:, 3:7]

    def get_dofs_limit(self):
        return torch.full((9,), -3.0), torch.tensor([3.0] * 7 + [0.04] * 2)

    def get_link(self, name):
        assert name == "hand"
        return self

    def set_dofs_kp(self, kp):
        assert len(kp) == 9

    set_dofs_kv = set_dofs_kp

    def set_dofs_force_range(self, low, high):
        assert (low == -high).all()


class Scene:
    def __init__(self, sim_options, show_viewer):
        self.entities = []

    def add_entity(self, entity):
        self.entities.append(entity)
        return entity

    def build(self, n_envs):
        for entity in self.entities:
            entity.build(n_envs)

    def step(self):
        """The arm goes where it shall be with a speed of its own; a cube is lifted by a closed gripper and joint 1."""
        _, arm, cube = self.entities
        arm.v = 0.5 * arm.v + 0.5 * (arm.goal - arm.q)
        arm.q = arm.q + 0.5 * arm.v
        cube.v[:, 2] = (arm.q[:, 8] < 0.01) * 0.1 * arm.q[:, 0].clamp(min=0)
        cube.q[:, :3] += cube.v[:, :3]

    def destroy(self):
        pass


@pytest.fixture(autouse=True)
def package(monkeypatch):
    morphs = SimpleNamespace(
        Plane=lambda: Entity(7, 6), MJCF=lambda file: Entity(9, 9), Box=lambda size, pos: Entity(7, 6)
    )
    asked = []
    stand_in(
        monkeypatch,
        {
            "genesis": {
                "init": lambda **arguments: asked.append(arguments),
                "cpu": "cpu",
                "cuda": "cuda",
                "morphs": morphs,
                "Scene": Scene,
                "options": SimpleNamespace(SimOptions=lambda dt: dt),
            }
        },
    )
    genesis._started.cache_clear()
    yield asked
    genesis._started.cache_clear()


class TestStandIn(ProtocolSuite):
    def make(self, num_envs):
        return GenesisLift(num_envs)


def test_it_starts_once_on_the_device_of_its_process_and_a_seed_says_where_the_cube_lies(package):
    simulator = GenesisLift(8)
    GenesisLift(1)
    assert [asked["backend"] for asked in package] == ["cpu"]
    cubes = begin(simulator, list(range(8)))["state"][:, -7:-4]
    assert (cubes[:, 2] == 0.02).all()
    assert ((cubes[:, :2] >= torch.tensor([0.45, -0.2])) & (cubes[:, :2] <= torch.tensor([0.7, 0.2]))).all()
    assert len(cubes.unique(dim=0)) == 8


def test_joints_move_by_a_stride_within_their_limits_and_the_gripper_opens_and_closes():
    simulator = GenesisLift(2, stride=0.5)
    begin(simulator, [0, 1])
    actions = torch.zeros(2, 8)
    actions[0, :2] = torch.tensor([1.0, -1.0])
    actions[:, 7] = torch.tensor([1.0, -1.0])
    for _ in range(20):
        simulator.step(actions, everyone(simulator))
    assert torch.allclose(simulator._target[0, :2], torch.tensor([3.0, -3.0]))
    assert torch.allclose(simulator._target[1, :2], torch.tensor([0.0, -0.4]))
    assert torch.allclose(simulator._target[:, 7:], torch.tensor([[0.04, 0.04], [0.0, 0.0]]))


@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_a_lifted_cube_is_solved_and_earns_more_than_one_that_lies(reward):
    simulator = GenesisLift(2, reward=reward, stride=0.5)
    begin(simulator, [0, 1])
    lift = torch.zeros(2, 8)
    lift[0, 0], lift[:, 7] = 1.0, -1.0
    for _ in range(5):
        moved = simulator.step(lift, everyone(simulator))
    assert moved.terminated.tolist() == moved.success.tolist() == [True, False]
    assert moved.reward[0] >= 0.75 > 0.25 > moved.reward[1] >= 0


def test_wrong_options_pictures_without_a_card_and_a_missing_package_are_said(monkeypatch):
    with pytest.raises(WrongOption, match=r"Genesis.*'rgb'"):
        GenesisLift(1, observe="rgb")
    with pytest.raises(CannotSimulate, match=r"CUDA device alone"):
        GenesisLift(1, observe="state+rgb")
    genesis._started.cache_clear()
    missing(monkeypatch, "genesis")
    with pytest.raises(CannotSimulate, match=r"genesis.*installed:"):
        GenesisLift(1)
