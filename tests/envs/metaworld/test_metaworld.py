"""Meta-World as a simulator: its own tasks, goals, observations and rewards, and episodes that repeat."""

import importlib.util

import numpy as np
import pytest
import torch

from rlinf.envs import metaworld as simulator_module
from rlinf.envs.base import CannotSimulate, WrongOption
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.experts import scripted
from rlinf.envs.metaworld import (
    INSTRUCTIONS,
    NEEDED,
    SUITES,
    MetaWorld,
    Simulation,
    can_draw,
    chosen_tasks,
    goal_vectors,
)
from tests.envs.protocol import ProtocolSuite, actions_for, begin, everyone, same, told

if importlib.util.find_spec("metaworld") is None:
    pytest.skip("Meta-World is not installed: pip install 'rlinf[metaworld]'", allow_module_level=True)

drawing = pytest.mark.skipif(not can_draw(), reason=NEEDED)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
HARD = ["basketball-v3", "door-lock-v3"]
"""Tasks that alone begin otherwise after other episodes, or whose numbers look into MuJoCo's memory."""


class TestTwoTasks(ProtocolSuite):
    def make(self, num_envs):
        return MetaWorld(num_envs, tasks=HARD, number_tasks=True)


def own(task, vector, hidden=False):
    """Meta-World's own environment, just made and begun, and its first observation."""
    from metaworld.env_dict import (
        ALL_V3_ENVIRONMENTS,
        ALL_V3_ENVIRONMENTS_GOAL_HIDDEN,
        ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE,
    )

    if hidden:
        env = ALL_V3_ENVIRONMENTS_GOAL_HIDDEN[f"{task}-goal-hidden"]()
    else:
        env = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"]()
    assert ALL_V3_ENVIRONMENTS[task]
    env._freeze_rand_vec, env._last_rand_vec = True, vector.copy()
    return env, env.reset()[0]


@pytest.mark.parametrize(("task", "hidden"), [("basketball-v3", False), ("shelf-place-v3", True)])
def test_an_episode_is_that_of_meta_worlds_own_environment_even_after_others(task, hidden):
    simulator = MetaWorld(1, tasks=[task], reward="dense", hide_goal=hidden)
    begin(simulator, [5])
    for step in range(5):
        simulator.step(actions_for(simulator, 1, seed=step), everyone(simulator))
    theirs, observed = own(task, goal_vectors(task, 0)[3], hidden)
    assert np.array_equal(begin(simulator, [3])["state"][0].numpy(), observed.astype(np.float32))
    for step in range(20):
        action = actions_for(simulator, 1, seed=step) + torch.tensor([0, 0.3, -0.4, 0.2])
        moved = simulator.step(action, everyone(simulator))
        observed, reward, *_, info = theirs.step(action[0].numpy())
        assert np.array_equal(moved.observation["state"][0].numpy(), observed.astype(np.float32))
        assert moved.reward.item() == np.float32(reward)
        assert moved.success.item() == bool(info["success"])


def test_the_goals_are_those_of_meta_worlds_own_benchmark():
    import pickle

    import metaworld

    theirs = [pickle.loads(task.data)["rand_vec"] for task in metaworld.MT1("push-v3", seed=4).train_tasks]
    before = np.random.get_state()[1].copy()
    assert np.array_equal(goal_vectors("push-v3", 4), theirs)
    assert np.array_equal(np.random.get_state()[1], before), "the process's own random numbers are left alone"
    assert not np.array_equal(goal_vectors("push-v3", 5), theirs)


def test_meta_worlds_scripts_solve_what_they_are_instructed_to():
    rules = Rules(seed=1, max_steps=150)
    environment = Environment(
        MetaWorld(2, tasks=["reach-v3", "drawer-close-v3"], number_tasks=True, end_on_success=True), rules
    )
    seen, ended = environment.reset(), []
    while len({episode.env for episode in ended}) < 2:
        seen = environment.step(scripted(seen.observation, seen.instructions))
        ended += seen.episodes
    assert all(episode.success_once and episode.length < 150 for episode in ended)


def test_meta_worlds_scripts_are_asked_with_all_numbers_and_an_instruction():
    for state, words in ((torch.zeros(1, 39), None), (torch.zeros(1, 4), ["Reach a goal position"])):
        with pytest.raises(ValueError, match=r"39 numbers.*instructions"):
            scripted({"state": state}, words)


def test_rewards_are_of_the_chosen_kind_and_episodes_go_on_unless_told_otherwise():
    from metaworld.policies import ENV_POLICY_MAP

    kinds = ("dense", "normalized_dense", "sparse")
    made = [MetaWorld(1, tasks=["reach-v3"], reward=reward, end_on_success=reward == "sparse") for reward in kinds]
    (seen, *_), expert = [begin(each, [0])["state"] for each in made], ENV_POLICY_MAP["reach-v3"]()
    solved = False
    while not solved:
        action = torch.tensor(expert.get_action(seen[0].double().numpy()), dtype=torch.float32)[None].clamp(-1, 1)
        dense, normal, sparse = (each.step(action, everyone(each)) for each in made)
        assert normal.reward.item() == pytest.approx(dense.reward.item() / 10, rel=1e-6)
        solved = dense.success.item()
        assert sparse.reward.item() == float(solved)
        assert (dense.terminated.item(), sparse.terminated.item()) == (False, solved)
        seen = dense.observation["state"]
    assert dense.reward.item() > 9


def test_a_seed_chooses_the_task_and_its_goal():
    simulator = MetaWorld(4, tasks=["reach-v3", "push-v3"], number_tasks=True)
    state = begin(simulator, [6, 7, 106, 2])["state"]
    assert simulator.instructions() == [INSTRUCTIONS[f"{name}-v3"] for name in ("reach", "push", "reach", "reach")]
    assert state[:, 39:].tolist() == [[1, 0], [0, 1], [1, 0], [1, 0]]
    assert np.allclose(state[0, 36:39].numpy(), goal_vectors("reach-v3", 0)[3][3:])
    assert torch.equal(state[0], state[2])  # 3 and 53: there are fifty goals
    assert not torch.equal(state[0], state[3])


def test_each_task_is_simulated_once_and_rows_take_turns(monkeypatch):
    made = []
    monkeypatch.setattr(simulator_module, "Simulation", lambda *about: made.append(about) or Simulation(*about))
    together, alone = MetaWorld(3, tasks=HARD), [MetaWorld(1, tasks=HARD) for _ in range(3)]
    for seeds in ([0, 2, 1], [3, 2, 4]):
        begin(together, seeds)
        for step in range(2):
            actions = actions_for(together, 3, seed=step)
            moved = together.step(actions, everyone(together))
            for row, each in enumerate(alone):
                if step == 0:
                    begin(each, [seeds[row]])
                assert same(told(moved, row), told(each.step(actions[row : row + 1], everyone(each)), 0))
    assert [task for task, _ in made[:2]] == HARD
    assert len(made) == 2 + 2 + 1 + 2, "two for all rows together, and for each row alone those that it met"


def test_suites_are_meta_worlds():
    import metaworld

    assert sorted(chosen_tasks("MT50", None)) == sorted(INSTRUCTIONS) == sorted(metaworld.MT1.ENV_NAMES)
    sizes = {"MT10": 10, "MT25": 25, "MT50": 50, "ML10-train": 10, "ML25-train": 25, "ML45-train": 45}
    assert {suite: len(chosen_tasks(suite, None)) for suite in SUITES} == {
        **sizes,
        **{f"ML{size}-test": 5 for size in (10, 25, 45)},
    }
    for size in (10, 45):  # of ML25, Meta-World itself trains on one of the tasks that it tests on
        assert not set(chosen_tasks(f"ML{size}-train", None)) & set(chosen_tasks(f"ML{size}-test", None))
    assert chosen_tasks("MT10", None)[0] == "reach-v3"


def test_the_goal_is_hidden_in_suites_for_learning_to_learn():
    hidden = MetaWorld(1, suite="ML10-train", tasks=["reach-v3"])
    assert begin(hidden, [1])["state"][0, 36:39].tolist() == [0, 0, 0]
    assert begin(MetaWorld(1, suite="MT10", tasks=["reach-v3"]), [1])["state"][0, 36:39].all()


def test_settling_comes_before_the_first_observation():
    still, settled = (MetaWorld(1, tasks=["push-v3"], settle=steps) for steps in (0, 3))
    begin(still, [2])
    for _ in range(3):
        moved = still.step(torch.tensor([[0.0, 0.0, 0.0, -1.0]]), everyone(still))
    assert torch.equal(begin(settled, [2])["state"], moved.observation["state"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"tasks.*\[reach-v3\].*MT10"),
        ({"tasks": ["reach-v2"]}, r"'reach-v2'.*reach-v3"),
        ({"tasks": "reach-v3"}, r"names: \[reach-v3\]"),
        ({"suite": "MT11"}, r"'MT11'.*none.*MT10"),
        ({"suite": "MT10", "tasks": ["sweep-v3"]}, r"MT10.*task 'sweep-v3'"),
        ({"tasks": ["reach-v3"], "observe": "pictures"}, r"none.*state"),
        ({"tasks": ["reach-v3"], "cameras": ["left"]}, "some of corner2"),
        ({"tasks": ["reach-v3"], "goalseed": 3}, r"did.*mean goal_seed"),
    ],
)
def test_wrong_options_are_answered_with_what_there_is(options, said):
    with pytest.raises(WrongOption, match=said):
        MetaWorld.check_options(options)


@drawing
def test_pictures_show_the_table_the_right_way_up_and_follow_the_arm():
    simulator = MetaWorld(1, tasks=["reach-v3"], observe="rgb", cameras=["corner2", "gripperPOV"], image_size=32)
    first = begin(simulator, [0])
    assert {name: tuple(rows.shape) for name, rows in first.items()} == {"rgb": (1, 32, 32, 6), "state": (1, 4)}
    for _ in range(4):
        moved = simulator.step(torch.tensor([[1.0, 0.0, 1.0, -1.0]]), everyone(simulator))
    scene = first["rgb"][0, ..., :3].float()
    brown = (scene[..., 0] - scene[..., 2]).clamp(0)  # the wooden table, and behind it the grey floor
    assert brown[16:].mean() > 2 * brown[:8].mean()
    assert (moved.observation["rgb"] != first["rgb"]).float().mean() > 0.03
    again = begin(simulator, [0])
    assert torch.equal(again["rgb"], first["rgb"])
    assert simulator.render(torch.tensor([0])).shape == (1, 256, 256, 3)
    simulator.close()


def test_where_nothing_can_be_drawn_the_packages_are_named(monkeypatch):
    import mujoco

    def renderer(*about):
        raise mujoco.FatalError("an OpenGL platform library has not been loaded into this process")

    monkeypatch.setenv("MUJOCO_GL", "disabled")
    monkeypatch.setattr(mujoco, "Renderer", renderer)
    simulator = MetaWorld(1, tasks=["reach-v3"], observe="rgb", image_size=8)
    with pytest.raises(CannotSimulate, match=r"MUJOCO_GL=egl.*install libegl1.*platform"):
        begin(simulator, [0])
