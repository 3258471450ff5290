"""LIBERO's own package beside our adapter, number by number; `make test-libero` installs it and runs these."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from benchmarks.libero_bowl import BowlOnPlate
from rlinf.envs.adapters.libero import MAX_STEPS, Libero
from rlinf.envs.environment import Environment, Rules
from tests.envs.protocol import begin, everyone

pytestmark = [
    pytest.mark.libero,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="LIBERO is not installed: make test-libero"),
]
TASKS = {"libero_spatial": 5, "libero_object": 0, "libero_goal": 7, "libero_10": 3, "libero_90": 22}
"""One of each suite: among them open drawers, which are sampled before all else, and a stove that lights up."""
SIZE = 64
STILL = [0.0] * 6 + [-1.0]


@pytest.fixture(params=TASKS)
def simulator(request):
    simulator = Libero(1, suite=request.param, tasks=[TASKS[request.param]], image_size=SIZE)
    yield simulator
    simulator.close()


def theirs(suite, task):
    """The package's simulation of a task, and its starts, as OpenVLA's evaluation makes them."""
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs import OffScreenRenderEnv

    tasks = benchmark.get_benchmark_dict()[suite]()
    description = tasks.get_task(task)
    file = f"{get_libero_path('bddl_files')}/{description.problem_folder}/{description.bddl_file}"
    made = OffScreenRenderEnv(bddl_file_name=file, camera_heights=SIZE, camera_widths=SIZE)
    return made, tasks.get_task_init_states(task)


def arrays(model):
    """Every array of a compiled model but for its meshes and textures."""
    names = [name for name in dir(model) if not name.startswith(("_", "mesh_", "tex_"))]
    return {name: np.array(value) for name in names if isinstance(value := getattr(model, name), np.ndarray)}


def differing(one, other):
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def assert_alike(seen, row, observed):
    assert np.array_equal(seen["rgb"][row, :, :, :3], observed["agentview_image"][::-1, ::-1])
    assert np.array_equal(seen["rgb"][row, :, :, 3:], observed["robot0_eye_in_hand_image"][::-1, ::-1])
    felt = np.concatenate([observed["robot0_eef_pos"], observed["robot0_gripper_qpos"]])
    assert np.array_equal(seen["state"][row, [0, 1, 2, 6, 7]].numpy(), felt.astype(np.float32))


def test_a_later_episode_is_that_of_a_simulation_just_made_by_the_package_itself(simulator):
    suite = type(simulator._suite).__name__.lower()
    begin(simulator, [3])
    for _ in range(3):
        simulator.step(torch.tensor([[0.3] * 6 + [1.0]]), everyone(simulator))
    seen = begin(simulator, [52])
    reference, starts = theirs(suite, TASKS[suite])
    reference.seed(52)
    reference.reset()
    reference.set_init_state(starts[52 % len(starts)])
    for _ in range(10):
        observed, *_ = reference.step(STILL)
    assert_alike(seen, 0, observed)
    actions = torch.rand(10, 1, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for action in actions:
        moved = simulator.step(action, everyone(simulator))
        observed, reward, solved, _ = reference.step(action[0].numpy())
        assert (moved.reward.item(), moved.terminated.item()) == (reward, solved)
    assert_alike(moved.observation, 0, observed)
    ours = simulator._envs[0]
    assert ours.get_sim_state().tobytes() == reference.get_sim_state().tobytes()
    assert differing(arrays(ours.sim.model._model), arrays(reference.sim.model._model)) == []
    reference.close()


def test_a_chunk_shows_what_its_last_step_would_have_shown_by_itself():
    simulator = Libero(2, suite="libero_spatial", tasks=[0], image_size=SIZE)
    environment = Environment(simulator, Rules(max_steps=5))
    environment.reset()
    actions = torch.rand(2, 6, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    chunk = environment.step(actions)  # the fifth action ends the episodes, and others begin
    begin(simulator, [environment.seed_of(env, 0) for env in range(2)])
    simulator.deferring = False
    for time in range(5):
        moved = simulator.step(actions[:, time], everyone(simulator))
    assert torch.equal(chunk.final["rgb"], moved.observation["rgb"])
    assert torch.equal(chunk.final["state"], moved.observation["state"])
    seen = begin(simulator, [environment.seed_of(env, 1) for env in range(2)])
    assert torch.equal(chunk.observation["rgb"], seen["rgb"])
    simulator.close()


def test_every_suite_is_tried():
    assert list(TASKS) == list(MAX_STEPS)


def test_simulations_of_one_process_do_not_draw_with_each_others_textures():
    """Before this, what was made last drew everybody's pictures, whatever their tasks."""
    alone = []
    for seed in (0, 1, 2):
        simulator = Libero(1, suite="libero_object", tasks=[0, 4], image_size=SIZE)
        alone.append(begin(simulator, [seed])["rgb"][0])
        simulator.close()
    together = Libero(2, suite="libero_object", tasks=[0, 4], image_size=SIZE)
    seen = begin(together, [0, 1])["rgb"]
    assert torch.equal(seen[0], alone[0])
    assert torch.equal(seen[1], alone[1])
    assert not torch.equal(seen[0], seen[1])
    again = together.reset(torch.tensor([2]), torch.tensor([1]))["rgb"]  # the other one's task now
    assert torch.equal(again[0], alone[2])
    moved = together.step(torch.tensor([STILL, STILL]), everyone(together)).observation["rgb"]
    assert (moved[0].int() - alone[0].int()).abs().float().mean() < 1
    assert torch.equal(together.reset(torch.tensor([0]), torch.tensor([0]))["rgb"][0], alone[0])
    together.close()


def test_a_bowl_that_is_put_onto_the_plate_by_hand_solves_the_task():
    simulator = Libero(1, suite="libero_spatial", tasks=[0], image_size=SIZE)
    begin(simulator, [0])
    assert not simulator.step(torch.tensor([STILL]), everyone(simulator)).terminated.any()
    domain = simulator._envs[0].env
    plate = domain.sim.data.body_xpos[domain.obj_body_id["plate_1"]]
    joint = domain.objects_dict["akita_black_bowl_1"].joints[-1]
    pose = domain.sim.data.get_joint_qpos(joint)
    domain.sim.data.set_joint_qpos(joint, [*plate[:2], plate[2] + 0.03, *pose[3:]])
    for _ in range(20):
        moved = simulator.step(torch.tensor([STILL]), everyone(simulator))
        if moved.terminated.all():
            break
    assert (moved.reward.item(), moved.terminated.item(), moved.success.item()) == (1.0, True, True)
    simulator.close()


def test_a_task_without_textures_that_computes_each_step_once_moves_as_the_package_does():
    ours = BowlOnPlate(starts="odd")
    ours.reset(seed=2)
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs.env_wrapper import ControlEnv

    tasks = benchmark.get_benchmark_dict()["libero_spatial"]()
    file = f"{get_libero_path('bddl_files')}/libero_spatial/{tasks.get_task(0).bddl_file}"
    drawn = dict.fromkeys(("use_camera_obs", "has_offscreen_renderer", "has_renderer"), False)
    reference = ControlEnv(bddl_file_name=file, **drawn, hard_reset=False)
    reference.seed(2)
    reference.reset()
    reference.set_init_state(tasks.get_task_init_states(0)[5])
    for _ in range(10):
        reference.step(STILL)
    for place, gripper in np.random.default_rng(0).uniform(-1, 1, (40, 2, 3)):
        ours.step(np.append(place, gripper[0]).astype(np.float32))
        reference.step([*place.astype(np.float32), 0.0, 0.0, 0.0, np.float32(gripper[0])])
    # the solver of contacts begins from another guess, which leaves 1e-6 metres after a hundred steps
    places = (each.env.sim.data.qpos for each in (ours._simulation, reference))
    np.testing.assert_allclose(*places, rtol=0, atol=1e-5)
    reference.close()
