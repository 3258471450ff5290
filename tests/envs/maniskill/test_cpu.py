"""ManiSkill on the CPU, with and without a renderer."""

import importlib.util

import pytest
import torch

from rlinf.envs import maniskill
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.experts import pull_cube
from rlinf.envs.maniskill import ManiSkill, MissingAssets, Task, find
from tests.envs.protocol import ProtocolSuite, actions_for, begin, everyone, same, scaled, told

if importlib.util.find_spec("mani_skill") is None:
    pytest.skip("ManiSkill is not installed: pip install 'rlinf[maniskill]'", allow_module_level=True)

DRAWS = maniskill.can_draw()
drawing = pytest.mark.skipif(not DRAWS, reason=maniskill.NEEDED)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mani_skill.*")
PULL = {"id": "PullCube-v1", "control": "pd_ee_delta_pos"}


@pytest.fixture
def pull():
    simulators = []

    def make(num_envs=1, **task):
        simulators.append(ManiSkill(num_envs, **{**PULL, **task}))
        return simulators[-1]

    yield make
    for simulator in simulators:
        simulator.close()


@pytest.fixture(scope="module")
def drawing_device():
    """A simulator that draws and lives as long as all others: with the last of them SAPIEN forgets its shaders."""
    simulator = ManiSkill(1, id="MS-CartpoleBalance-v1", observe="rgb", image_size=16)
    yield
    simulator.close()


class TestPullCube(ProtocolSuite):
    def make(self, num_envs):
        return ManiSkill(num_envs, **PULL)


@drawing
@pytest.mark.slow
@pytest.mark.usefixtures("drawing_device")
class TestPictures(ProtocolSuite):
    """A task without meshes: drawing a robot takes ten times as long. Without depth, which was seen to differ by a
    millimetre, its unit, between environments of equal state."""

    def make(self, num_envs):
        return ManiSkill(num_envs, id="MS-CartpoleBalance-v1", observe="rgb", image_size=16)


def pressing(simulator, seed):
    """Fifty random actions that press the gripper down, so that it meets the table and the cube."""
    actions = actions_for(simulator, 50, 1, seed=seed)
    actions[..., 2] -= 0.6
    return scaled(simulator, actions)


def played(simulator, actions):
    """What each step said, by its number."""
    return {step: told(simulator.step(action, everyone(simulator)), 0) for step, action in enumerate(actions)}


@pytest.mark.parametrize("seed", [3, *(pytest.param(more, marks=pytest.mark.repeated) for more in (4, 5))])
def test_an_episode_with_contacts_repeats_bit_for_bit_after_other_episodes(pull, seed):
    """With these seeds ManiSkill alone gives another episode."""
    fresh, used = pull(), pull()
    begin(fresh, [seed])
    begin(used, [seed + 77])
    played(used, pressing(used, seed + 50)[:13])
    begin(used, [seed])
    actions = pressing(fresh, seed)
    assert same(played(fresh, actions), played(used, actions))


def test_rewards_and_observations_are_those_of_maniskills_own_wrapper(pull):
    import gymnasium
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    ours = pull()
    theirs = CPUGymWrapper(
        gymnasium.make(
            "PullCube-v1",
            control_mode="pd_ee_delta_pos",
            obs_mode="state",
            reward_mode="normalized_dense",
            sim_backend="physx_cpu",
            render_backend="none",
        )
    )
    observed, _ = theirs.reset(seed=8)
    assert torch.equal(begin(ours, [8])["state"][0], torch.from_numpy(observed))
    for step in range(5):
        action = actions_for(ours, 1, seed=step)
        moved = ours.step(action, everyone(ours))
        observed, reward, terminated, _, info = theirs.step(action[0].numpy())
        assert torch.equal(moved.observation["state"][0], torch.from_numpy(observed))
        assert moved.reward.item() == reward
        assert (moved.terminated.item(), moved.success.item()) == (terminated, info["success"])
    theirs.close()


def test_a_solved_task_says_so_and_terminates(pull):
    """The cube is put on its target, where the task calls itself solved."""
    simulator = pull()
    begin(simulator, [1])
    task = simulator._envs[0]
    still = torch.zeros(1, 4)
    assert not simulator.step(still, everyone(simulator)).success.item()
    task.obj.set_pose(task.goal_region.pose)
    moved = simulator.step(still, everyone(simulator))
    assert moved.success.item()
    assert moved.terminated.item()
    assert moved.reward.item() == 1.0


def test_what_comes_out_can_be_trained_on(pull):
    simulator = pull()
    weight = torch.zeros(35, requires_grad=True)
    (begin(simulator)["state"] @ weight).sum().backward()
    assert weight.grad.any()


def test_the_time_limit_is_the_tasks_own(pull):
    environment = Environment(pull(2), Rules(seed=1, ignore_terminations=True))
    environment.reset()
    chunk = environment.step(torch.zeros(2, 51, 4))
    assert chunk.truncated.nonzero().tolist() == [[0, 49], [1, 49]]


def test_a_script_pulls_the_cube_onto_its_goal(pull):
    environment = Environment(pull(4), Rules(seed=3))
    seen, ended = environment.reset(), []
    while len({episode.env for episode in ended}) < 4:
        seen = environment.step(pull_cube(seen.observation))
        ended += seen.episodes
    assert all(episode.success_once for episode in ended)


def test_the_script_refuses_what_another_task_shows():
    with pytest.raises(ValueError, match=r"looks.*35 numbers.*42"):
        pull_cube({"state": torch.zeros(1, 42)})


def test_control_and_reward_modes_are_those_asked_for(pull):
    simulator = pull(control="pd_joint_delta_pos", reward="sparse")
    assert simulator.action_spec.size == 8
    begin(simulator)
    assert simulator.step(torch.zeros(1, 8), everyone(simulator)).reward.tolist() == [0.0]
    with pytest.raises(ValueError, match=r"StackPyramid-v1.*made so.*dense"):
        pull(id="StackPyramid-v1", reward="dense")


def test_an_episode_goes_on_where_objects_change_with_each_reset():
    """PegInsertionSide draws the size of its peg from the seed, and builds everything anew for it."""
    simulator = ManiSkill(1, id="PegInsertionSide-v1", control="pd_ee_delta_pose")
    begin(simulator, [2])
    actions = pressing(simulator, 2)[:6]
    played(simulator, actions[:3])
    saved = simulator.save()
    expected = played(simulator, actions[3:])
    begin(simulator, [3])
    simulator.restore(saved, torch.tensor([0]))
    assert same(played(simulator, actions[3:]), expected)


def test_an_unknown_task_is_answered_with_its_neighbours():
    with pytest.raises(ValueError, match=r"task 'PullCub-v1'; near.*PullCube"):
        find("PullCub-v1")


def test_missing_files_of_a_task_are_said_with_the_command(monkeypatch, tmp_path):
    missing(monkeypatch, tmp_path)
    with pytest.raises(MissingAssets, match=r"needs ycb.*download_asset -y PickSingleYCB-v1`"):
        ManiSkill(1, id="PickSingleYCB-v1")


def test_missing_files_of_a_robot_are_said_with_the_command_and_nobody_is_asked(monkeypatch, tmp_path):
    missing(monkeypatch, tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(MissingAssets, match=r"Robot anymal_c.*download_asset -y anymal_c`"):
        ManiSkill(1, id="AnymalC-Reach-v1", control="pd_joint_delta_pos")


def missing(monkeypatch, folder):
    """No file that must be downloaded is there, whatever this machine has."""
    import mani_skill.envs  # noqa: F401
    from mani_skill.agents import base_agent
    from mani_skill.utils import assets

    monkeypatch.setattr(assets, "is_data_source_downloaded", lambda name: False)
    there = base_agent.format_path
    monkeypatch.setattr(base_agent, "format_path", lambda path: there(path).replace(".maniskill", str(folder)))


def test_what_to_observe_is_one_of_a_few():
    with pytest.raises(ValueError, match=r"observe='lidar'.*state"):
        Task("PullCube-v1", observe="lidar")


@pytest.mark.skipif(DRAWS, reason="this machine can draw")
@pytest.mark.parametrize("asked", [{"observe": "rgb"}, {"pictures": True}])
def test_pictures_where_nothing_can_be_drawn_name_the_packages(asked):
    with pytest.raises(RuntimeError, match=r"install libvulkan1"):
        ManiSkill(1, **PULL, **asked)


def test_no_pictures_for_people_unless_asked_for(pull):
    simulator = pull()
    begin(simulator)
    with pytest.raises(NotImplementedError, match="pictures: true"):
        simulator.render(torch.tensor([0]))


@drawing
def test_drawing_does_not_change_what_is_simulated(pull):
    drawn, blind = pull(pictures=True, picture_size=32), pull()
    assert same(begin(drawn, [3]), begin(blind, [3]))
    actions = pressing(drawn, 3)[:20]
    assert same(played(drawn, actions), played(blind, actions))


@drawing
@pytest.mark.slow
@pytest.mark.usefixtures("drawing_device")
def test_pictures_show_the_scene_and_repeat(pull):
    simulator = pull(2, observe="state+rgbd", image_size=32, pictures=True, picture_size=48)
    observed = begin(simulator, [5, 6])
    assert {name: spec.shape for name, spec in simulator.observation_spec.items()} == {
        "state": (35,),
        "rgb": (32, 32, 3),
        "depth": (32, 32, 1),
    }
    assert observed["rgb"].float().std() > 10
    assert 0.1 < observed["depth"].median() < 5  # metres: the camera looks at a table
    frame = simulator.render(torch.tensor([1]))
    assert (frame.shape, frame.dtype) == ((1, 48, 48, 3), torch.uint8)
    assert frame.float().std() > 10
    played(simulator, actions_for(simulator, 5, 2))
    assert not same(simulator.render(torch.tensor([1])), frame)
    assert same(begin(simulator, [5, 6]), observed)
    assert same(simulator.render(torch.tensor([1])), frame)
